"""Steps that were not saved, as people are told of them: at once, then rarely, then their number.

Counts for good; says each reason at most once in ``NOTICE_S``, whatever the pace of training. Pure.
"""

from __future__ import annotations

from typing import NamedTuple

from holdfast.core.text import tellable
from holdfast.errors import CheckpointError

NOTICE_S = 30.0
REASONS_COUNT_MAX = 16


class Lapse(NamedTuple):
    """Counts the steps that were not saved: ``lost_count`` in all, ``in_row`` since a commit.

    ``said`` are reasons with when each was told, the oldest first. Texts are for the caller to
    log, empty: nothing to say.
    """

    lost_count: int = 0
    in_row: int = 0
    newest: int = -1
    unsaid: int = 0
    told: bool = False
    said: tuple[tuple[str, float], ...] = ()

    def lost(self, step: int, reason: str, now_s: float) -> tuple[Lapse, str]:
        """Return the lapse with ``step`` counted as not saved, and the text to tell people."""
        counted = self._replace(
            lost_count=self.lost_count + 1,
            in_row=self.in_row + 1,
            newest=max(self.newest, step),
            unsaid=self.unsaid + 1,
        )
        if any(known == reason and now_s - at_s < NOTICE_S for known, at_s in self.said):
            return counted, ""
        others = [(known, at_s) for known, at_s in self.said if known != reason]
        said = (*others, (reason, now_s))[-REASONS_COUNT_MAX:]
        more = f"; {self.unsaid} steps before it were not saved either" if self.unsaid else ""
        text = f"step {step} is not saved: {reason}{more}"
        return counted._replace(unsaid=0, told=True, said=said), text

    def saved(self, step: int) -> tuple[Lapse, str]:
        """Return the lapse after ``step`` was committed, and a text if a reported lapse is over."""
        if step <= self.newest or not self.in_row:
            return self, ""
        text = f"step {step} is safe; {self.in_row} before it were not saved" if self.told else ""
        return self._replace(in_row=0, told=False), text


def reason_text(cause: BaseException) -> str:
    """Return what went wrong, and of which state value, as logs and messages can hold it."""
    said, notes = str(cause), getattr(cause, "__notes__", ())
    if isinstance(cause, CheckpointError):
        notes = notes[1:]  # the first one names the page: for tracebacks
    else:
        said = f"{type(cause).__name__}: {said}" if said else type(cause).__name__
    return tellable("; ".join((said, *notes)))
