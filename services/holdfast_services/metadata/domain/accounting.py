"""What the changes of a run mean for its ledger. Pure."""

from __future__ import annotations

from collections.abc import Collection

from holdfast.core.announcements import SaveReason
from holdfast_services.metadata.domain.ledger import Cause, Ledger
from holdfast_services.metadata.domain.model import Attempt, RankFacts, Run

ENDING = (SaveReason.PREEMPTION, SaveReason.RESCALE)
"""Who is told to save for one of these saves last of all: nothing is lost."""
NOTICE_S_MAX = 3600.0
"""Who trains for so long after it was told to end was not ended by that."""


def last_s(run: Run) -> float:
    """Return when the newest attempt was last heard; meaningless of one that never was.

    Not by its lease: that is prolonged after an outage, and taken away, without a word of it.
    """
    return run.ended.at_s if run.ended else run.ledger.heard_s


def why_ended(run: Run, end_s: float) -> Cause | None:
    """Return how the newest attempt has ended, if another one begins now; None: in order.

    ``end_s`` is when it was last heard.
    """
    noticed = run.announcement is not None and run.announcement.reason in ENDING
    if noticed and end_s - run.announced_at_s <= NOTICE_S_MAX:
        return Cause.NOTICE
    if run.ended is None:
        return Cause.NODE
    return None if run.ended.in_order else Cause.PROCESS


def followed(run: Run) -> Ledger:
    """Return the ledger as another attempt is about to follow the newest one."""
    if run.attempt is None:
        return run.ledger
    end_s = last_s(run)
    return run.ledger.ended(end_s, why_ended(run, end_s), run.attempt.costs.stalled_s)


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


def shown(run: Run, now_s: float) -> Ledger:
    """Return the ledger as people see it: as if the newest attempt ended now, if it trains.

    A job that is down is counted so once it is back: it may be over for good.
    """
    attempt = run.attempt
    if attempt is None:
        return run.ledger
    ends_s = now_s if attempt.lease_until_s > now_s else last_s(run)
    return run.ledger.ended(ends_s, None, attempt.costs.stalled_s).settled()
