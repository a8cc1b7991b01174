"""Nodes on which starts fail while nothing else explains it are set aside for a while.

A node that lies about its GPUs, or lacks a folder that others have, would else take job after job.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast.core.retry import Waits
from holdfast.core.text import tellable
from holdfast_services.scheduler.domain.cluster import Aside
from holdfast_services.scheduler.domain.following import Strike

STRIKES_MAX = 2
"""The second in a row sets a node aside: one may have been the job's own fault."""
ASIDE = Waits(first_s=60.0, wait_s_max=3600.0)


def judged(
    asides: Mapping[str, Aside], strikes: Iterable[Strike], good: Iterable[str], now_s: float
) -> dict[str, Aside]:
    """Return who is set aside, or close to it: one strike more, or none any more."""
    after = dict(asides)
    for node in good:
        after.pop(node, None)
    for strike in strikes:
        before = after.get(strike.node)
        count = (before.count if before else 0) + 1
        over = count - STRIKES_MAX + 1
        until_s = now_s + ASIDE.wait_s(over) if over > 0 else now_s
        after[strike.node] = Aside(until_s=until_s, count=count, why=tellable(strike.why))
    return after
