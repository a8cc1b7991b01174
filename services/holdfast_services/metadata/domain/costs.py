"""What saves and the restore of an attempt cost: gathered from its ranks, kept with the attempt.

Ranks measure anew with each save. A row that followed each of them would be written with each
report, so it follows at once only when a figure becomes known, and when the attempt ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

from holdfast.core.inventory import RankStatus
from holdfast.core.reports import RankCosts, together
from holdfast_services.metadata.domain.model import Attempt

COSTS_REST_S = 10.0
"""How old the figures in an attempt's row may be while it trains."""


def gathered(statuses: Mapping[int, RankStatus]) -> RankCosts:
    """Return what the ranks together have cost by their last reports."""
    return together(status.report.costs for status in statuses.values())


def kept(attempt: Attempt, statuses: Mapping[int, RankStatus], heard_s: float) -> Attempt:
    """Return the attempt with the figures that its row is to have; ``heard_s``: the last report."""
    now = gathered(statuses)
    if len(statuses) < attempt.spec.world_size or now == attempt.costs:
        return attempt  # of some ranks only, as while their agents forget them one after another
    ended = not any(status.live for status in statuses.values())
    rested = abs(heard_s - attempt.costs_at_s) >= COSTS_REST_S
    if not (ended or rested or _is_new(now, attempt.costs)):
        return attempt
    return replace(attempt, costs=now, costs_at_s=heard_s)


def shown(attempt: Attempt, statuses: Mapping[int, RankStatus]) -> RankCosts:
    """Return the newest figures of all ranks: those of the last reports, else those kept."""
    return gathered(statuses) if len(statuses) == attempt.spec.world_size else attempt.costs


def _is_new(now: RankCosts, before: RankCosts) -> bool:
    """Tell whether something is known that was not."""
    names = (spec.name for spec in fields(RankCosts))
    return any(getattr(now, name) and not getattr(before, name) for name in names)
