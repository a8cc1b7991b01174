"""Notice that nobody holds a lock any more: whoever had a process run here has gone for good."""

from __future__ import annotations

import time
from pathlib import Path

from holdfast import locks

LOOK_S = 0.5


class HolderGone:
    """A source of notices, see ``launcher.notices``: nobody has held a lock for so long.

    Args:
        path: The lock's file.
        hold_s: Seconds that the holder may be away, as it may be started again.
    """

    interval_s = LOOK_S

    def __init__(self, path: Path, hold_s: float) -> None:
        self._path = path
        self._hold_s = hold_s
        self._seen_s = time.monotonic()

    def notice(self) -> str | None:
        """Return that the holder has gone; None: it is there, or may come back."""
        now_s = time.monotonic()
        if locks.holder_of(self._path) is not None:
            self._seen_s = now_s
        if now_s - self._seen_s <= self._hold_s:
            return None
        return f"nobody has held {self._path} for {self._hold_s:g} s"
