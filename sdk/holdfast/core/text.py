"""Texts that people are told, as every message and database can hold them. Pure."""

from __future__ import annotations

TEXT_LENGTH_MAX = 2_000


def tellable(text: str) -> str:
    """Return ``text``, cut to ``TEXT_LENGTH_MAX``, without what some database cannot hold.

    What an exception says is not ours: it may quote bytes, or a file whose name is no text. No
    message takes half a surrogate pair, and Postgres no NUL.
    """
    plain = text[:TEXT_LENGTH_MAX].replace("\0", r"\x00")
    return plain.encode(errors="backslashreplace").decode()


def holds_nul(text: str) -> bool:
    """Tell whether ``text`` holds a NUL, which Postgres takes in no text."""
    return "\0" in text


def shown(text: str, *, keeps: str = "") -> str:
    r"""Return ``text`` as a terminal may show it: what would steer the terminal is written out.

    >>> print(shown("a\x1b[31m\nb"), shown("a\nb", keeps="\n"), sep="|")
    a\x1b[31m\nb|a
    b
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keeps else repr(c)[1:-1] for c in text)
