"""Announcing a step that all ranks save: the one way a time or a wish becomes a step number.

A rank that hears too late reports the step abandoned, so either all ranks save it or none does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from holdfast.core.announcements import Announcement, SaveReason
from holdfast.core.decision import DecisionState
from holdfast.core.inventory import RankStatus
from holdfast.core.user_events import Event
from holdfast_services.metadata.domain.attempts import status_by_rank
from holdfast_services.metadata.domain.model import Node, Outcome, Run

STEPS_AHEAD_MIN = 2
STEPS_AHEAD_MAX = 1000
NEWS_TRAVEL_S = 1.0
STEP_S_UNKNOWN = 0.1

# A rank trains after LOST when its user said to start over.
_TRAINING = (DecisionState.CONFIRMED, DecisionState.LOST)

# Of several reasons at once the first of these is announced: the one that leaves least time.
_URGENCY = (
    SaveReason.PREEMPTION,
    SaveReason.RESCALE,
    SaveReason.OPERATOR,
    SaveReason.USER,
    SaveReason.AUTO,
    SaveReason.INTERVAL,
)
_BY_CLOCK = (SaveReason.AUTO, SaveReason.INTERVAL)
"""They come again and again, and are no news."""


def announce(run: Run, nodes: Mapping[str, Node], now_s: float) -> Outcome:
    """Return the run with a step announced, when one is due and none is open, and the news.

    An announcement is open until every rank has passed it. All ranks must have said where they
    are: a step that one has passed already could not be saved by all.
    """
    attempt, decision = run.current, run.decision
    if attempt is None or decision is None or decision.state not in _TRAINING:
        return Outcome(run=run)
    statuses = status_by_rank(run, nodes)
    if len(statuses) < attempt.spec.world_size or not all(s.live for s in statuses.values()):
        return Outcome(run=run)
    open_step = run.announcement.step if run.announcement else 0
    if any(status.report.step < open_step for status in statuses.values()):
        return Outcome(run=run)
    since_s = now_s - (run.announced_at_s or attempt.started_at_s)
    reasons = {rank: _due(status, since_s) for rank, status in sorted(statuses.items())}
    reason = next((why for why in _URGENCY if why in reasons.values()), None)
    if reason is None:
        return Outcome(run=run)
    announcement = Announcement(step=_ahead(statuses), reason=reason)
    changed = replace(run, announcement=announcement, announced_at_s=now_s)
    asking = next(rank for rank, why in reasons.items() if why is reason)
    events = () if reason in _BY_CLOCK else (_announced(run, announcement, asking),)
    return Outcome(run=changed, events=events)


def _due(status: RankStatus, since_s: float) -> SaveReason | None:
    """Return why this rank is due for a save, None: it is not."""
    report = status.report
    if report.wants_save:
        return report.wants_save
    if 0 < report.save_interval_s <= since_s:
        return SaveReason.AUTO if report.interval_reason is SaveReason.AUTO else SaveReason.INTERVAL
    return None


def _ahead(statuses: Mapping[int, RankStatus]) -> int:
    """Return the step by which the news will have reached every rank."""
    newest = max(status.report.step for status in statuses.values())
    known = [s.report.step_s for s in statuses.values() if s.report.step_s > 0]
    step_s = min(known, default=STEP_S_UNKNOWN)
    # Compared, not divided: nothing that a rank says can overflow here.
    short = step_s * STEPS_AHEAD_MAX <= NEWS_TRAVEL_S
    steps = STEPS_AHEAD_MAX if short else math.ceil(NEWS_TRAVEL_S / step_s)
    return newest + STEPS_AHEAD_MIN + steps


def _announced(run: Run, announcement: Announcement, rank: int) -> Event:
    return Event(
        kind="save_announced",
        severity="info",
        message=f"all ranks of {run.job} save step {announcement.step}: "
        f"{announcement.reason.text} (rank {rank})",
        job=run.job,
        context={
            "run": run.id,
            "step": str(announcement.step),
            "reason": announcement.reason.name.lower(),
            "rank": str(rank),
        },
    )
