"""Steps that were not saved, as people are told of them: at once, then rarely, then their number.

Counts for good; says each reason at most once in ``NOTICE_S``, whatever the pace of training.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from holdfast.core.text import tellable
from holdfast.errors import CheckpointError

NOTICE_S = 30.0
REASONS_COUNT_MAX = 16


class Lapse:
    """``count`` of all steps lost, ``in_row`` of those since one was committed after them.

    Safe to call from several threads; texts are for the caller to log, empty: nothing to say.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.count = 0
        self.in_row = 0
        self._clock = clock
        self._newest = -1
        self._unsaid = 0
        self._told = False
        self._said_s: dict[str, float] = {}
        self._guard = threading.Lock()

    def lost(self, step: int, reason: str) -> str:
        """Note that ``step`` is not saved; return what to tell."""
        with self._guard:
            self.count += 1
            self.in_row += 1
            self._unsaid += 1
            self._newest = max(self._newest, step)
            now_s = self._clock()
            if now_s - self._said_s.get(reason, -NOTICE_S) < NOTICE_S:
                return ""
            if len(self._said_s) >= REASONS_COUNT_MAX:
                self._said_s.pop(min(self._said_s, key=self._said_s.__getitem__))
            self._said_s[reason] = now_s
            others, self._unsaid, self._told = self._unsaid - 1, 0, True
        more = f"; {others} others before it were not either" if others else ""
        return f"step {step} is not saved: {reason}{more}"

    def saved(self, step: int) -> str:
        """Note that ``step`` is committed; return what to tell when a told lapse is over."""
        with self._guard:
            if step <= self._newest or not self.in_row:
                return ""
            lost, self.in_row = self.in_row, 0
            told, self._told = self._told, False
        return f"step {step} is safe; not saved before it: {lost}" if told else ""


def reason_text(cause: Exception) -> str:
    """Return what went wrong, and of which state value, as logs and messages can hold it."""
    said = str(cause) if isinstance(cause, CheckpointError) else f"{type(cause).__name__}: {cause}"
    return tellable("; ".join((said, *getattr(cause, "__notes__", ()))))
