"""Canonical JSON: one value, one text; and a strict reader of what others wrote.

Keys sorted, no spaces, ASCII, no NaN. The reader refuses duplicate keys, depth and size beyond
limits, before anything is believed.
"""

from __future__ import annotations

import json
from collections import Counter

from holdfast.errors import ManifestError


def canonical(value: object) -> bytes:
    """Return the one text of ``value``, ended by a newline.

    Raises:
        ValueError: it holds NaN or an infinity, which JSON cannot say.
    """
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )
    return text.encode() + b"\n"


def strict_object(data: bytes, *, what: str, bytes_max: int) -> dict[str, object]:
    """Return the JSON object in ``data``.

    Raises:
        ManifestError: too long, not JSON, not an object, a key twice, nested too deep.
    """
    if len(data) > bytes_max:
        raise ManifestError(f"{what} of {len(data)} bytes exceeds {bytes_max}")

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        table = dict(pairs)
        if len(table) != len(pairs):
            twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
            raise ManifestError(f"key {twice[:80]!r} stands twice in the {what}")
        return table

    def constant(text: str) -> object:
        raise ManifestError(f"{what} holds {text}, which is not JSON")

    try:
        value = json.loads(data.decode(), object_pairs_hook=unique, parse_constant=constant)
    except (ValueError, RecursionError) as cause:
        raise ManifestError(f"{what} is not JSON: {cause}") from cause
    if not isinstance(value, dict):
        raise ManifestError(f"{what} is not a JSON object")
    return value
