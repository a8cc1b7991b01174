"""Settings from the environment: each reader names the variable, its value and what it should be.

A variable that is set to nothing counts as not set.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from holdfast.core.byte_sizes import parse_bytes
from holdfast.errors import InvalidRequestError

SHOWN_CHARACTERS_MAX = 40
PORT_MAX = 65_535
LOOPBACK = "127.0.0.1"


def required(environ: Mapping[str, str], name: str, meaning: str) -> str:
    """Return the value of ``name``; ``meaning`` says what to set it to.

    Raises:
        InvalidRequestError: it is not set.
    """
    if value := environ.get(name):
        return value
    raise InvalidRequestError(f"{name} is not set: set it to {meaning}")


def port(environ: Mapping[str, str], name: str) -> int:
    """Return a port; 0, also where it is not set, means any free one.

    Raises:
        InvalidRequestError: it is no port.
    """
    return number(environ, name, 0, low=0, high=PORT_MAX)


def listen(environ: Mapping[str, str], name: str) -> str:
    """Return the ``host:port`` to listen on, a port alone on loopback; empty: not set, or ``off``.

    Raises:
        InvalidRequestError: it is neither.
    """
    text = environ.get(name, "")
    if text == "off":
        return ""
    host, _, port = text.rpartition(":")
    if text and not (port.isascii() and port.isdigit() and int(port[:6]) <= PORT_MAX):
        raise _refusal(name, text, "host:port, or a port")
    return f"{LOOPBACK}:{port}" if port and not host else text


def number(environ: Mapping[str, str], name: str, otherwise: int, *, low: int, high: int) -> int:
    """Return a whole number, ``otherwise`` if it is not set.

    Raises:
        InvalidRequestError: it is none from ``low`` to ``high``.
    """
    text = environ.get(name)
    if not text:
        return otherwise
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(high))) or not (
        low <= int(text) <= high
    ):
        raise _refusal(name, text, f"a number from {low} to {high}")
    return int(text)


def seconds(
    environ: Mapping[str, str], name: str, otherwise: float, *, zero: bool = False
) -> float:
    """Return a time in seconds, ``otherwise`` if it is not set; ``zero``: it may be 0.

    Raises:
        InvalidRequestError: it is no number, or not above 0.
    """
    text = environ.get(name)
    if not text:
        return otherwise
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf or (value == 0 and not zero):
        least = "from 0" if zero else "above 0"
        raise _refusal(name, text, f"a number of seconds {least}, like 30 or 0.5")
    return value


def size(environ: Mapping[str, str], name: str, otherwise: int) -> int:
    """Return a number of bytes, ``otherwise`` if it is not set.

    Raises:
        InvalidRequestError: it is no size.
    """
    text = environ.get(name)
    if not text:
        return otherwise
    try:
        return parse_bytes(text)
    except InvalidRequestError as cause:
        raise _refusal(name, text, "a size like 512M or 2GiB") from cause


def rate(environ: Mapping[str, str], name: str, otherwise: int) -> int:
    """Return bytes per second, ``otherwise`` if it is not set; the ``/s`` may be left out.

    Raises:
        InvalidRequestError: it is no size.
    """
    return size({name: environ.get(name, "").removesuffix("/s")}, name, otherwise)


def _refusal(name: str, text: str, meaning: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name}={text[:SHOWN_CHARACTERS_MAX]!r} is not {meaning}")
