"""How long a rank wishes to wait between two announced saves, and why.

A policy answers anew after each save; what it answers is told on, to metadata, only when it differs
by more than measurements do. Times are the caller's; seconds.
"""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Callable, Iterable

from holdfast.core.failure_record import FailureRecord
from holdfast.core.save_interval import Observed, Wish

NEWS_SHARE_MIN = 0.1
"""An interval that differs by less stays as it is."""
STALLS_COUNT_MAX = 5
"""So many of the newest saves are looked at. The first of a process copies all at once and stalls
much longer than others; a mean would remember it for an hour."""
LOOK_S = 60.0
"""Training without a failure lengthens the interval: so often it is reckoned again."""

log = logging.getLogger(__name__)


class SavePace:
    """The wish of one rank, as ``reckon`` has it; rank 0 tells people why."""

    def __init__(self, reckon: Callable[[Observed], Wish], job: str, rank: int) -> None:
        self._chosen = reckon
        self._job = job
        self._tells = rank == 0
        self._record = FailureRecord()
        self._restore_s = 0.0
        self._began_s = 0.0
        self._stalls_s: deque[float] = deque(maxlen=STALLS_COUNT_MAX)
        self._newest_s = 0.0
        self._looked_s = -LOOK_S
        self._wish = Wish()

    def begin(self, record: FailureRecord, took_s: Iterable[float], now_s: float) -> None:
        """Note that training begins: what became of attempts before, and what the restore took."""
        self._record, self._restore_s, self._began_s = record, sum(took_s), now_s
        self._looked_s = now_s - LOOK_S

    def wish(self, stall_s: float, now_s: float, *, stretch: float = 1.0) -> Wish:
        """Return the wish as of ``now_s``.

        Args:
            stall_s: What the newest save has cost training, 0: not known yet.
            now_s: Of the clock that ``begin`` was told.
            stretch: Factor on the interval, while saves fail.
        """
        measured = stall_s != self._newest_s
        if measured:
            self._newest_s = stall_s
            self._stalls_s.append(stall_s)
        if measured or now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            self._reckon(now_s)
        wish = self._wish
        return wish if stretch == 1.0 else wish._replace(interval_s=wish.interval_s * stretch)

    def _reckon(self, now_s: float) -> None:
        observed = Observed(
            stall_s=statistics.median_low(self._stalls_s or (0.0,)),
            restore_s=self._restore_s,
            training_s=now_s - self._began_s,
            record=self._record,
        )
        wish, before_s = self._chosen(observed), self._wish.interval_s
        if before_s and abs(wish.interval_s - before_s) < NEWS_SHARE_MIN * before_s:
            return
        self._wish = wish if self._tells else wish._replace(why="")
        if self._wish.why:
            log.info("job %s saves %s", self._job, wish.why)
