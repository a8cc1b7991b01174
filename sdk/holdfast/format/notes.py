"""What a user says of a step (its loss, say), as the JSON text that travels with it. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from holdfast.core.ids import Step
from holdfast.core.reports import NOTE_BYTES_MAX, StepNote
from holdfast.errors import InvalidRequestError
from holdfast.format.canonical import canonical

DEPTH_MAX = 8
NOTES_BYTES_MAX = 16 << 10
"""Of a manifest."""


def step_note(step: int, notes: Mapping[str, object]) -> StepNote:
    """Return ``notes`` as the note of ``step``; NaN and infinities, which JSON lacks, as null.

    Raises:
        InvalidRequestError: not a mapping of plain values by name, or too long; says which.
    """
    if not isinstance(notes, Mapping):
        raise InvalidRequestError(f"notes are a {type(notes).__name__}: pass a dict")
    text = canonical(_plain(notes, "notes", DEPTH_MAX))[:-1]
    if len(text) > NOTE_BYTES_MAX:
        raise InvalidRequestError(f"notes of {len(text)} bytes exceed {NOTE_BYTES_MAX}")
    return StepNote(step=Step(step), json=text.decode())


def _plain(value: object, path: str, depth: int) -> object:
    if depth == 0:
        raise InvalidRequestError(f"{path[:80]} is nested deeper than {DEPTH_MAX}")
    if isinstance(value, Mapping):
        strange = [key for key in value if not isinstance(key, str)]
        if strange:
            raise InvalidRequestError(f"{path} has the key {strange[0]!r}, which is no text")
        return {
            _printable(key, path): _plain(item, f"{path}[{key!r}]", depth - 1)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}[{at}]", depth - 1) for at, item in enumerate(value)]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, str):
        return _printable(value, path)
    if value is None or isinstance(value, bool | int):
        return value
    raise InvalidRequestError(
        f"{path} is a {type(value).__name__}: pass numbers, texts, lists and dicts (loss.item())"
    )


def _printable(text: str, path: str) -> str:
    """Return ``text`` unless no file can hold it: half a surrogate pair, as in odd file names."""
    try:
        text.encode()
    except UnicodeEncodeError as cause:
        raise InvalidRequestError(f"{path} has a text that is not Unicode: {text!r}") from cause
    return text
