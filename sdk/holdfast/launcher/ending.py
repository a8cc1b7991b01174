"""The last word of a launcher to whoever has started it: a file, written by rename.

A launcher outlives the process that has started it, so an exit code may reach nobody.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.core.executions import REASON_LENGTH_MAX, Outcome
from holdfast.core.records import from_record, to_record
from holdfast.core.rounds import Ending
from holdfast.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class LastWord:
    """How a launcher has ended: its exit code, and why, for people."""

    outcome: Outcome
    code: int = 0
    reason: str = ""


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
    draft = path.with_suffix(".tmp")
    record = to_record(word)
    record["reason"] = word.reason.replace("\0", "")[-REASON_LENGTH_MAX:]
    with suppress(OSError):
        draft.write_text(json.dumps(record), encoding="utf-8")
        draft.replace(path)


def read(path: Path) -> LastWord | None:
    """Return the word that was left; None: there is none."""
    try:
        return from_record(LastWord, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, CheckpointError):
        return None
