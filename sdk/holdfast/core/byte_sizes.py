"""Bytes as people write them. Binary units throughout."""

from __future__ import annotations

import re

from holdfast.errors import InvalidRequestError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(
    r"\s*([0-9]{1,15})(\.[0-9]{1,6})?\s*([KMGT]?)(?:i?B)?\s*", re.IGNORECASE | re.ASCII
)


def parse_bytes(text: str) -> int:
    """Return the bytes that ``"512M"``, ``"2 GiB"`` or ``"1024"`` mean.

    Raises:
        InvalidRequestError: not a size.
    """
    match = _SIZE.fullmatch(text)
    if not match:
        raise InvalidRequestError(f"{text!r} is not a size like 512M or 2GiB")
    unit = _UNITS[match[3].upper()]
    return int(match[1]) * unit + int(float(match[2] or 0) * unit)


def format_bytes(length_bytes: int) -> str:
    """Return ``length_bytes`` with a binary unit and at most one decimal.

    >>> format_bytes(1536), format_bytes(10)
    ('1.5 KiB', '10 B')
    """
    size = float(length_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.1f} {unit}".replace(".0 ", " ")
        size /= 1024
    return f"{size:.1f} TiB".replace(".0 ", " ")
