"""How long to wait between two saves, so that saves and failures together cost least. Pure.

A save costs ``cost_s`` of training; a failure costs what was done since the last save, half an
interval on average, and the restart. Short intervals pay for many saves, long ones for much lost
work. Units: seconds.

Source: Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
FGCS 2006, its first-order form; Young, "A first order approximation to the optimum checkpoint
interval", CACM 1974.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from holdfast.core.announcements import SaveReason
from holdfast.core.failure_record import FailureRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What a rank knows when it chooses an interval; 0: not known.

    ``stall_s`` is what a save costs training, ``restore_s`` what the restore took, ``training_s``
    for how long this attempt has trained.
    """

    stall_s: float = 0.0
    restore_s: float = 0.0
    training_s: float = 0.0
    record: FailureRecord = field(default_factory=FailureRecord)


class Wish(NamedTuple):
    """After what time a rank wishes the next save, 0: it does not; whose wish that is, and why."""

    interval_s: float = 0.0
    reason: SaveReason = SaveReason.UNSPECIFIED
    why: str = ""


def optimum_s(cost_s: float, mtbf_s: float, restart_s: float = 0.0) -> float:
    """Return the time from one save to the next at which least is lost.

    It is ``sqrt(2 x cost x (mtbf + restart))``, and never more than ``mtbf``: beyond, the formula
    says nothing, and hardly an interval would end before a failure.

    >>> optimum_s(0.5, 3600.0)
    60.0
    >>> optimum_s(0.5, 3600.0, restart_s=625.0)
    65.0
    >>> optimum_s(0.0, 3600.0)
    0.0
    >>> optimum_s(3600.0, 60.0)
    60.0
    """
    return min(math.sqrt(2 * max(cost_s, 0.0) * (mtbf_s + max(restart_s, 0.0))), mtbf_s)


def time_text(seconds: float) -> str:
    """Return a time for people, with two digits that count.

    >>> [time_text(s) for s in (0.0042, 0.31, 42.3, 95.0, 600.0, 5400.0, 36000.0)]
    ['0.0042 s', '0.31 s', '42 s', '95 s', '10 min', '1.5 h', '10 h']
    """
    if seconds < 1:
        return f"{seconds:.2g} s"
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    hours = seconds / 3600
    return f"{hours:.1f} h" if hours < 10 else f"{hours:.0f} h"
