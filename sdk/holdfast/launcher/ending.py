"""The last word of a launcher to whoever has started it: a file, written by rename.

A launcher outlives the process that has started it, so an exit code may reach nobody. In a pod the
file is there from the start, mounted, and is read when the container has ended: it is written in
place, and short.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from holdfast.core.executions import REASON_LENGTH_MAX, LastWord, Outcome
from holdfast.core.records import from_record, to_record
from holdfast.core.rounds import Ending
from holdfast.errors import CheckpointError

TERMINATION_BYTES_MAX = 4_096
"""Kubernetes keeps no more of a container's termination message."""


def of_launch(ending: Ending) -> LastWord:
    """Return what a launcher says when its launch has ended."""
    if ending.released:
        outcome = Outcome.RELEASED
    elif not ending.code:
        outcome = Outcome.ENDED
    else:
        outcome = Outcome.OUTSIDE if ending.outside else Outcome.FAILED
    return LastWord(outcome=outcome, code=ending.code, reason=ending.reason)


def write(path: Path | None, word: LastWord) -> None:
    """Leave word; with no path nobody wants one, and a folder that has gone has no reader."""
    if path is None:
        return
    reason = word.reason.replace("\0", "")[-REASON_LENGTH_MAX:]
    with suppress(OSError):
        if path.exists():
            path.write_bytes(_short(word, reason))
            return
        draft = path.with_suffix(".tmp")
        draft.write_text(_text(word, reason), encoding="utf-8")
        draft.replace(path)


def _text(word: LastWord, reason: str) -> str:
    return json.dumps({**to_record(word), "reason": reason})


def _short(word: LastWord, reason: str) -> bytes:
    """Return as much of a word as Kubernetes keeps: of the reason the end."""
    while len(text := _text(word, reason).encode()) > TERMINATION_BYTES_MAX:
        reason = reason[len(reason) // 8 + 1 :]
    return text


def read(path: Path) -> LastWord | None:
    """Return the word that was left; None: there is none."""
    try:
        return from_record(LastWord, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, CheckpointError):
        return None
