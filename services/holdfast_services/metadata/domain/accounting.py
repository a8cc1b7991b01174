"""What the changes of a run mean for its ledger. Pure."""

from __future__ import annotations

from collections.abc import Collection

from holdfast.core.announcements import SaveReason
from holdfast_services.metadata.domain.ledger import Cause, Ledger
from holdfast_services.metadata.domain.model import Attempt, Limits, RankFacts, Run

ENDING = (SaveReason.PREEMPTION, SaveReason.RESCALE)
"""Who is told to save for one of these saves last of all: nothing is lost."""


def last_s(run: Run, attempt: Attempt, limits: Limits) -> float:
    """Return when the newest attempt was last heard; one that fell silent: at its last renewal."""
    return run.ended.at_s if run.ended else attempt.lease_until_s - limits.node_lease_s


def why_ended(run: Run) -> Cause | None:
    """Return how the newest attempt has ended, if another one begins now; None: in order."""
    if run.announcement is not None and run.announcement.reason in ENDING:
        return Cause.NOTICE
    if run.ended is None:
        return Cause.NODE
    return None if run.ended.in_order else Cause.PROCESS


def followed(run: Run, limits: Limits) -> Ledger:
    """Return the ledger as another attempt is about to follow the newest one."""
    if run.attempt is None:
        return run.ledger
    end_s = last_s(run, run.attempt, limits)
    return run.ledger.ended(end_s, why_ended(run), run.attempt.costs.stalled_s)


def heard(run: Run, attempt: Attempt, ranks: Collection[RankFacts], heard_s: float) -> Ledger:
    """Return the ledger with the beginning of training, once all ranks have restored.

    Args:
        run: As it was before its ranks were heard.
        attempt: Its newest.
        ranks: What is known of them now.
        heard_s: When.
    """
    if run.ledger.since_s is not None or len(ranks) != attempt.spec.world_size:
        return run.ledger
    if not all(rank.loaded for rank in ranks):
        return run.ledger
    restored = run.decision.checkpoint if run.decision else None
    saved = (row.local_at_s for row in run.checkpoints if row.id == restored)
    return run.ledger.begun(heard_s or attempt.started_at_s, next(saved, None))


def shown(run: Run, now_s: float, limits: Limits) -> Ledger:
    """Return the ledger as people see it: as if the newest attempt ended now, if it trains.

    A job that is down is counted so once it is back: it may be over for good.
    """
    attempt = run.attempt
    if attempt is None:
        return run.ledger
    ends_s = now_s if attempt.lease_until_s > now_s else last_s(run, attempt, limits)
    return run.ledger.ended(ends_s, None, attempt.costs.stalled_s)
