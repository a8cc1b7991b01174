"""Canonical JSON: one value, one text; and a strict reader of what others wrote.

Keys sorted, no spaces, ASCII, no NaN. The reader refuses duplicate keys, depth, size and numbers
beyond limits, before anything is believed. What ``with_digest``
writes carries the digest of its own text.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import NoReturn

from holdfast.errors import ManifestError
from holdfast.format.digest import DIGEST_BYTES, part_digest

DEPTH_MAX = 64
_DIGEST = "digest"
_ZEROS = "0" * (2 * DIGEST_BYTES)
_OWN = re.compile(rb'"digest":"([0-9a-f]{%d})"' % len(_ZEROS))
_HEX = re.compile(r"[0-9a-f]*")


def canonical(value: object) -> bytes:
    """Return the one text of ``value``, ended by a newline.

    Raises:
        ValueError: it holds NaN or an infinity, which JSON cannot say.
    """
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )
    return text.encode() + b"\n"


def with_digest(value: Mapping[str, object]) -> bytes:
    """Return the canonical text of ``value`` with one more key, ``digest``.

    It is that of the whole text in which the digest's own 32 digits are zeros.
    """
    text = canonical({**value, _DIGEST: _ZEROS})
    return _with_digits(text, part_digest(text).hex().encode())


def check_digest(data: bytes, *, what: str) -> None:
    """Do nothing if ``data`` is what ``with_digest`` returned.

    Raises:
        ManifestError: it has changed since, or never had one.
    """
    match = _OWN.search(data)
    if match is None:
        raise ManifestError(f"{what} has no digest")
    if part_digest(_with_digits(data, _ZEROS.encode())).hex().encode() != match[1]:
        raise ManifestError(f"{what} does not match its own digest")


def _with_digits(data: bytes, digits: bytes) -> bytes:
    # Sorted keys put ours before every text that is not of our own choosing.
    match = _OWN.search(data)
    assert match is not None
    return data[: match.start(1)] + digits + data[match.end(1) :]


def strict_object(data: bytes, *, what: str, bytes_max: int) -> dict[str, object]:
    """Return the JSON object in ``data``.

    Raises:
        ManifestError: too long, not JSON, not an object, a key twice, nested deeper than
            ``DEPTH_MAX``, or a number that is none.
    """
    if len(data) > bytes_max:
        raise ManifestError(f"{what} of {len(data)} bytes exceeds {bytes_max}")

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        table = dict(pairs)
        if len(table) != len(pairs):
            twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
            raise ManifestError(f"key {twice[:80]!r} stands twice in the {what}")
        return table

    def constant(text: str) -> NoReturn:
        raise ManifestError(f"{what} holds {text[:40]}, which is not a number of JSON")

    def number(text: str) -> float:
        value = float(text)
        return value if math.isfinite(value) else constant(text)

    try:
        value = json.loads(
            data.decode(), object_pairs_hook=unique, parse_constant=constant, parse_float=number
        )
    except (ValueError, RecursionError) as cause:
        raise ManifestError(f"{what} is not JSON: {cause}") from cause
    if not isinstance(value, dict):
        raise ManifestError(f"{what} is not a JSON object")
    if _is_deep(value):
        raise ManifestError(f"{what} is nested deeper than {DEPTH_MAX}")
    return value


def _is_deep(value: object) -> bool:
    level = [value]
    for _ in range(DEPTH_MAX):
        level = [
            item
            for outer in level
            for item in (outer.values() if isinstance(outer, dict) else outer)  # type: ignore[attr-defined]
            if isinstance(item, dict | list)
        ]
        if not level:
            return False
    return True


def text_of(raw: Mapping[str, object], key: str) -> str:
    """Return the text at ``key``, or raise ManifestError."""
    value = raw.get(key)
    if not isinstance(value, str):
        raise ManifestError(f"{key} is not a text")
    return value


def number_of(raw: Mapping[str, object], key: str, most: int) -> int:
    """Return the whole number in 0..``most`` at ``key``, or raise ManifestError."""
    value = raw.get(key)
    if type(value) is not int or not 0 <= value <= most:
        raise ManifestError(f"{key} is not a number in 0..{most}")
    return value


def hex_of(value: object, what: str) -> bytes:
    """Return the bytes that ``value`` spells in lower-case hex, or raise ManifestError."""
    if not isinstance(value, str) or len(value) % 2 or not _HEX.fullmatch(value):
        raise ManifestError(f"{what} is not hex")
    return bytes.fromhex(value)
