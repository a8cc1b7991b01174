"""Values that people are shown, without the secrets of addresses. Rather too much is hidden."""

from __future__ import annotations

import re

MASK = "***"
_ACCOUNT = re.compile(r"(://[^:/?#@]*):(?:[^/?#]*@|.*@)", re.DOTALL)
"""A password ends before the last ``@`` of the host's part, or of all: it may hold a slash."""
_OPTION = re.compile(r"([?#&;][^=&;?#]*(?:pass|secret|token|key)[^=&;?#]*=)[^&;]*", re.IGNORECASE)


def masked(text: str) -> str:
    """Return a value without the secrets of an address: its password, and those of its options.

    >>> masked("postgresql://ada:pw@db/x?sslpassword=z&port=1"), masked("redis://:a@b@host:1/0")
    ('postgresql://ada:***@db/x?sslpassword=***&port=1', 'redis://:***@host:1/0')
    >>> masked("postgresql://ada:p/w?@db/x"), masked("s3://b?endpoint=http://u:pw@h&region=x")
    ('postgresql://ada:***@db/x', 's3://b?endpoint=http://u:***@h&region=x')
    >>> masked("redis://host:7300/0"), masked("ada=8,bob=16"), masked("s3://b?endpoint=http://h:1")
    ('redis://host:7300/0', 'ada=8,bob=16', 's3://b?endpoint=http://h:1')
    """
    if "://" not in text:
        return text
    return _OPTION.sub(rf"\g<1>{MASK}", _ACCOUNT.sub(rf"\g<1>:{MASK}@", text))
