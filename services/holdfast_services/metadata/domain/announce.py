"""Announcing a step that all ranks save: the one way a time or a signal becomes a step number.

A rank that hears too late reports the step abandoned, so either all ranks save it or none does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from holdfast.core.facts import DecisionState, RankStatus
from holdfast_services.metadata.domain.attempts import status_by_rank
from holdfast_services.metadata.domain.model import Node, Run

STEPS_AHEAD_MIN = 2
STEPS_AHEAD_MAX = 1000
NEWS_TRAVEL_S = 1.0
STEP_S_UNKNOWN = 0.1

# A rank trains after LOST when its user said to start over.
_TRAINING = (DecisionState.CONFIRMED, DecisionState.LOST)


def announce(run: Run, nodes: Mapping[str, Node], now_s: float) -> Run:
    """Return the run with a step announced, when one is due and none is open.

    An announcement is open until every rank has passed it. All ranks must have said where they
    are: a step that one has passed already could not be saved by all.
    """
    attempt, decision = run.current, run.decision
    if attempt is None or decision is None or decision.state not in _TRAINING:
        return run
    statuses = status_by_rank(run, nodes)
    if len(statuses) < attempt.world_size or not all(s.live for s in statuses.values()):
        return run
    if any(status.step < run.announced_step for status in statuses.values()):
        return run
    since_s = now_s - (run.announced_at_s or attempt.started_at_s)
    if not any(_due(status, since_s) for status in statuses.values()):
        return run
    return replace(run, announced_step=_ahead(statuses), announced_at_s=now_s)


def _due(status: RankStatus, since_s: float) -> bool:
    return status.wants_save or 0 < status.save_interval_s <= since_s


def _ahead(statuses: Mapping[int, RankStatus]) -> int:
    """Return the step by which the news will have reached every rank."""
    newest = max(status.step for status in statuses.values())
    known = [status.step_s for status in statuses.values() if status.step_s > 0]
    steps = math.ceil(NEWS_TRAVEL_S / min(known, default=STEP_S_UNKNOWN))
    return newest + STEPS_AHEAD_MIN + min(STEPS_AHEAD_MAX, steps)
