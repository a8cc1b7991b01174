"""Where the time of a job went, month by month: trained, waited, lost, down (G23). Pure.

Times are the database's clock, seconds since the epoch; months are those of UTC.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from calendar import monthrange
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import accumulate, pairwise
from typing import Any

MONTHS_COUNT_MAX = 24
"""Of a job; older ones go."""


class Cause(StrEnum):
    """How an attempt ended that did not end in order."""

    PROCESS = "process"
    """Ranks died, and their nodes said so."""
    NODE = "node"
    """A node fell silent, or another attempt began while ranks had not said that they end."""
    NOTICE = "notice"
    """The ranks were told to save and end: the node goes, or the job gets others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Month:
    """What became of the time in one month, seconds.

    ``trained_s`` is from when all ranks of an attempt had restored until they were last heard;
    within it lie ``lost_s``, whose steps no checkpoint had when the next attempt went back, and of
    the rest ``stalled_s``, while training waited for saves. ``down_s`` is from when an attempt
    ended until the next one trained; after one that ended in order nobody was down.
    """

    name: str
    trained_s: float = 0.0
    stalled_s: float = 0.0
    lost_s: Mapping[Cause, float] = field(default_factory=dict)
    down_s: Mapping[Cause, float] = field(default_factory=dict)

    @property
    def productive_s(self) -> float:
        """Time that made progress which was kept: with stalled and lost time all that trained."""
        return max(0.0, self.trained_s - self.stalled_s - sum(self.lost_s.values()))

    @property
    def productive_share(self) -> float | None:
        """The part of the time that was productive, 0..1; None: there was none."""
        all_s = self.trained_s + sum(self.down_s.values())
        return self.productive_s / all_s if all_s > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """The last attempt that trained, not in ``months`` yet: what is lost of it nobody knows.

    It trained from ``since_s`` to ``end_s``, and waited ``stalled_s`` of it for saves.
    """

    since_s: float
    end_s: float
    cause: Cause
    stalled_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The months of a job, the newest last, and what is not over yet.

    ``since_s`` is when the newest attempt began to train, None: it has not, and ``heard_s`` about
    when it was last heard; before it ever was, the one before. ``left`` is what it has to make up
    for, None: nothing.
    """

    months: tuple[Month, ...] = ()
    since_s: float | None = None
    heard_s: float = 0.0
    left: Left | None = None

    def heard(self, at_s: float, rest_s: float) -> Ledger:
        """Return the ledger once the newest attempt was heard; as it was if that is no news.

        Where the clock was ahead, training began no later than it goes on.
        """
        if abs(at_s - self.heard_s) < rest_s or not at_s:
            return self
        since_s = self.since_s if self.since_s is None else min(self.since_s, at_s)
        return replace(self, since_s=since_s, heard_s=at_s)

    def begun(self, now_s: float, saved_at_s: float | None) -> Ledger:
        """Return the ledger once an attempt trains, with what the end of the one before cost.

        Args:
            now_s: When its ranks had restored.
            saved_at_s: When what they restored had been saved; None: nobody knows, or nothing.
        """
        left, begun = self.left, replace(self, since_s=now_s, left=None)
        if left is not None:
            # No attempt trains while the next one does: a clock was ahead, and is no more.
            end_s = min(left.end_s, now_s)
            begun = _attempt(begun, replace(left, end_s=end_s), saved_at_s or 0.0)
            begun = _spent(begun, "down_s", end_s, now_s, left.cause)
        return _with_room(begun, now_s)

    def ended(self, end_s: float, cause: Cause | None, stalled_s: float) -> Ledger:
        """Return the ledger once the newest attempt is over; ``cause`` None: it ended in order.

        One that never trained changes nothing: the job is down for as long as it was.
        """
        since_s = self.since_s
        if since_s is None:
            return self
        end_s = max(end_s, since_s)
        # In order: settled at once, with nothing lost by whatever cause.
        known = cause or Cause.PROCESS
        left = Left(since_s=since_s, end_s=end_s, cause=known, stalled_s=stalled_s)
        over = replace(self, since_s=None, left=left)
        return over if cause else over.settled()

    def settled(self) -> Ledger:
        """Return the ledger as if nothing of the last attempt were lost, and nobody down."""
        left = self.left
        return _attempt(replace(self, left=None), left, left.end_s) if left else self


def total(months: Sequence[Month]) -> Month:
    """Return all of them together, under no name."""
    return Month(
        name="",
        trained_s=sum(month.trained_s for month in months),
        stalled_s=sum(month.stalled_s for month in months),
        lost_s=_sums(month.lost_s for month in months),
        down_s=_sums(month.down_s for month in months),
    )


def _sums(parts: Iterable[Mapping[Cause, float]]) -> Mapping[Cause, float]:
    found: dict[Cause, float] = {}
    for part in parts:
        for cause, seconds in part.items():
            found[cause] = found.get(cause, 0.0) + seconds
    return found


def _attempt(ledger: Ledger, left: Left, saved_at_s: float) -> Ledger:
    """Return the ledger with an attempt of which all is lost that was done after ``saved_at_s``.

    When it waited for saves nobody has written down: in equal parts all the time. Of the lost time
    that part is lost, and counts as nothing else.
    """
    since_s, end_s = left.since_s, left.end_s
    kept_s = min(end_s, max(since_s, saved_at_s))
    trained_s = end_s - since_s
    stalled = min(max(0.0, left.stalled_s), trained_s) / trained_s if trained_s else 0.0
    ledger = _spent(ledger, "trained_s", since_s, end_s)
    ledger = _spent(ledger, "lost_s", kept_s, end_s, left.cause)
    return _spent(ledger, "stalled_s", since_s, kept_s, part=stalled)


def _with_room(ledger: Ledger, now_s: float) -> Ledger:
    """Return the ledger with room for this month: a clock that was years ahead may have filled it.

    Later months would else be kept for as long as it was ahead, and none of the true ones.
    """
    if len(ledger.months) < MONTHS_COUNT_MAX:
        return ledger
    now = _name(now_s)
    return replace(ledger, months=tuple(month for month in ledger.months if month.name <= now))


def _spent(
    ledger: Ledger,
    kind: str,
    start_s: float,
    end_s: float,
    cause: Cause | None = None,
    *,
    part: float = 1.0,
) -> Ledger:
    """Return the ledger with a part of a span of time, cut where months begin, of a kind."""
    cuts = _BEGIN_S[bisect_right(_BEGIN_S, start_s) : bisect_left(_BEGIN_S, end_s)]
    for begin_s, until_s in pairwise([start_s, *cuts, end_s]):
        ledger = _with(ledger, begin_s, kind, (until_s - begin_s) * part, cause)
    return ledger


def _with(
    ledger: Ledger, at_s: float, kind: str, seconds: float, cause: Cause | None = None
) -> Ledger:
    """Return the ledger with more seconds of a kind in the month of ``at_s``."""
    if seconds <= 0:
        return ledger
    name = _name(at_s)
    month = next((month for month in ledger.months if month.name == name), Month(name=name))
    before = getattr(month, kind)
    more: Any = before + seconds if cause is None else _sums([before, {cause: seconds}])
    others = (other for other in ledger.months if other.name != name)
    months = sorted((*others, replace(month, **{kind: more})), key=lambda one: one.name)
    return replace(ledger, months=tuple(months[-MONTHS_COUNT_MAX:]))


def _name(at_s: float) -> str:
    """Return the month of a time.

    >>> _name(0), _name(951868799), _name(951868800)
    ('1970-01', '2000-02', '2000-03')
    """
    index = bisect_right(_BEGIN_S, at_s) - 1
    return f"{_YEARS[index // 12]}-{index % 12 + 1:02}"


_YEARS = range(1970, 2200)
_DAYS = (monthrange(year, month)[1] for year in _YEARS for month in range(1, 13))
_BEGIN_S = tuple(accumulate((days * 86400.0 for days in _DAYS), initial=0.0))[:-1]
"""When each month begins."""
