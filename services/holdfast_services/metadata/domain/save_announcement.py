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
from holdfast.errors import PreconditionError
from holdfast_services.metadata.domain.attempts import status_by_rank
from holdfast_services.metadata.domain.model import Node, Outcome, Run

STEPS_AHEAD_MIN = 2
STEPS_AHEAD_MAX = 1000
NEWS_TRAVEL_S = 1.0
LATE_NEWS_TRAVEL_S = 0.4
"""For another reason of a step that ranks know of; less than what a tick leaves of a second."""
STEP_S_UNKNOWN = 0.1
PACE_S_MAX = 10.0
"""From the attempt's start on: whoever has done no step by then does few, or calls ``save()``."""
LAST_NEWS_TRAVEL_S = 0.5
"""For the last step of a round, since a rescale waits for it; who hears too late has longer the
next time."""
LAST_NEWS_TRAVEL_S_MAX = 10.0
LAST_AGAIN_S = 120.0
"""Much more than a rank waits for its round to end: where no save succeeds, training goes on."""

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
_ENDING = (SaveReason.PREEMPTION, SaveReason.RESCALE)


def announce(run: Run, nodes: Mapping[str, Node], now_s: float) -> Outcome:
    """Return the run with a step announced, when one is due and none is open, and the news.

    An announcement is open until every rank has passed it. All ranks must have said where they
    are: a step that one has passed already could not be saved by all.
    """
    statuses = training(run, nodes)
    if statuses is None or run.attempt is None or _open(run, statuses):
        return Outcome(run=run)
    since_s = now_s - (run.announced_at_s or run.attempt.started_at_s)
    reasons = {rank: _due(status, since_s) for rank, status in sorted(statuses.items())}
    reason = next((why for why in _URGENCY if why in reasons.values()), None)
    if reason is None:
        return Outcome(run=run)
    asking = next(rank for rank, why in reasons.items() if why is reason)
    return _announced(run, _ahead(run, statuses), reason, now_s, rank=asking)


def announce_asked(run: Run, nodes: Mapping[str, Node], now_s: float) -> Outcome:
    """Return the run with a step announced since an operator asked; one that is open will do.

    Raises:
        PreconditionError: there are not all ranks that train, so no step could be saved by all.
    """
    statuses = training(run, nodes)
    if statuses is None or run.attempt is None:
        raise PreconditionError(
            f"{run.job} cannot save now: not all ranks of it train, or have said where they are; "
            f"what it has saved is in `holdfast ls {run.job}`",
            job=run.job,
        )
    if _open(run, statuses):
        return Outcome(run=run)
    return _announced(run, _ahead(run, statuses), SaveReason.OPERATOR, now_s, rank=None)


def announce_last(run: Run, nodes: Mapping[str, Node], now_s: float, asked_at_s: float) -> Outcome:
    """Return the run with the step announced that its round ends after, as soon as one can be.

    A step that is announced already, and that no rank is about to do, becomes that one: else where
    time brings one after the other there might never be room for this one. While that step may
    still be committed, another is not announced before ``LAST_AGAIN_S``; one that was given up is
    followed by another after as long as the wish, of ``asked_at_s``, was old when it was announced.
    Nobody guesses how long a step takes: a guess too low would lose steps, and one too high would
    be waited for.
    """
    statuses = training(run, nodes)
    if statuses is None or run.attempt is None:
        return Outcome(run=run)
    paced = any(status.report.step_s > 0 for status in statuses.values())
    begun = any(status.report.step > 0 for status in statuses.values())
    if not paced and (begun or now_s < run.attempt.started_at_s + PACE_S_MAX):
        return Outcome(run=run)
    was = run.announcement
    if was and _open(run, statuses):
        if was.reason in _ENDING or was.step < _ahead(run, statuses, LATE_NEWS_TRAVEL_S):
            return Outcome(run=run)
        last = replace(was, reason=SaveReason.RESCALE)
        return Outcome(run=replace(run, announcement=last, announced_at_s=now_s))
    travel_s = LAST_NEWS_TRAVEL_S
    if was and was.reason.ends_round:
        wait_s = LAST_AGAIN_S
        if _is_given_up(run, was):
            wait_s = min(run.announced_at_s - asked_at_s, LAST_AGAIN_S)
            old_s = now_s - asked_at_s
            travel_s = max(NEWS_TRAVEL_S, min(old_s, LAST_NEWS_TRAVEL_S_MAX))
        if now_s < run.announced_at_s + wait_s:
            return Outcome(run=run)
    step = _soon(run, statuses, travel_s if paced else 0.0)
    return _announced(run, step, SaveReason.RESCALE, now_s, rank=None)


def _is_given_up(run: Run, was: Announcement) -> bool:
    """Tell whether an announced step, or the first after it that ranks count, will not be whole."""
    return any(a.generation == run.generation and a.step >= was.step for a in run.abandoned)


def take_back(run: Run) -> Run:
    """Return the run whose round does not end: what all ranks save they save, and go on."""
    announced = run.announcement
    if announced is None or not announced.reason.ends_round:
        return run
    return replace(run, announcement=replace(announced, reason=SaveReason.OPERATOR))


def training(run: Run, nodes: Mapping[str, Node]) -> Mapping[int, RankStatus] | None:
    """Return where all ranks are; None: one has not said so, or does not train."""
    attempt, decision = run.current, run.decision
    if attempt is None or decision is None or decision.state not in _TRAINING:
        return None
    statuses = status_by_rank(run, nodes)
    whole = len(statuses) == attempt.spec.world_size
    return statuses if whole and all(s.live for s in statuses.values()) else None


def _newest_step(run: Run, statuses: Mapping[int, RankStatus]) -> int:
    """Return the last step that a rank has done: as it says, or as it has restored."""
    restored = run.decision.checkpoint if run.decision else None
    said = max(status.report.step for status in statuses.values())
    return max(said, restored.step if restored else 0)


def _open(run: Run, statuses: Mapping[int, RankStatus]) -> bool:
    """Tell whether what is announced may still be done; who has done the last step is at it."""
    announced = run.announcement
    if announced is None:
        return False
    past = announced.step + announced.reason.ends_round
    return any(status.report.step < past for status in statuses.values())


def _due(status: RankStatus, since_s: float) -> SaveReason | None:
    """Return why this rank is due for a save, None: it is not."""
    report = status.report
    if report.wants_save:
        return report.wants_save
    if 0 < report.save_interval_s <= since_s:
        return SaveReason.AUTO if report.interval_reason is SaveReason.AUTO else SaveReason.INTERVAL
    return None


def _ahead(run: Run, statuses: Mapping[int, RankStatus], travel_s: float = NEWS_TRAVEL_S) -> int:
    """Return the step by which the news will have reached every rank."""
    return _done(run, statuses) + STEPS_AHEAD_MIN + _steps(statuses, travel_s)


def _soon(run: Run, statuses: Mapping[int, RankStatus], travel_s: float) -> int:
    """Return the first step after which news may have come: the one that is being done is none."""
    return _done(run, statuses) + max(STEPS_AHEAD_MIN, 1 + _steps(statuses, travel_s))


def _done(run: Run, statuses: Mapping[int, RankStatus]) -> int:
    """Return the last step that is known to be done: as ranks say it, or as it was committed."""
    done = [row.id.step for row in run.checkpoints if row.id.generation == run.generation]
    return max([_newest_step(run, statuses), *done])


def _steps(statuses: Mapping[int, RankStatus], travel_s: float) -> int:
    """Return how many steps ranks may do in that time, in whole ones."""
    known = [s.report.step_s for s in statuses.values() if s.report.step_s > 0]
    step_s = min(known, default=STEP_S_UNKNOWN)
    # Compared, not divided: nothing that a rank says can overflow here.
    short = step_s * STEPS_AHEAD_MAX <= travel_s
    return STEPS_AHEAD_MAX if short else math.ceil(travel_s / step_s)


def _announced(
    run: Run, step: int, reason: SaveReason, now_s: float, *, rank: int | None
) -> Outcome:
    """Announce it; ``rank`` asked, None: no rank did."""
    announcement = Announcement(step=step, reason=reason)
    changed = replace(run, announcement=announcement, announced_at_s=now_s)
    if reason in _BY_CLOCK:
        return Outcome(run=changed)
    asked = "" if rank is None else f" (rank {rank})"
    context = {"run": run.id, "step": str(step), "reason": reason.name.lower()}
    event = Event(
        kind="save_announced",
        severity="info",
        message=f"all ranks of {run.job} save step {step}: {reason.text}{asked}",
        job=run.job,
        context=context if rank is None else {**context, "rank": str(rank)},
    )
    return Outcome(run=changed, events=(event,))
