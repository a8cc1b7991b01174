"""The record of a run's failures, by which ``Auto()`` chooses how often to save (G7). Pure.

An attempt has failed if it had begun to train and ended otherwise than in order: before its ranks
closed what they had, and before a last step that all of them were told to save.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast.core.failure_record import FailureRecord
from holdfast.core.inventory import RankStatus
from holdfast_services.metadata.domain import accounting
from holdfast_services.metadata.domain.ledger import Cause
from holdfast_services.metadata.domain.model import Ended, RankFacts, Run


def ended(
    run: Run, ranks: Iterable[RankFacts], statuses: Mapping[int, RankStatus], heard_s: float
) -> Ended | None:
    """Return how the newest attempt has ended, None: it goes on, or nobody has said it yet.

    Args:
        run: As it was before its ranks were heard.
        ranks: What is known of them now.
        statuses: What they said last, by rank.
        heard_s: When.
    """
    attempt = run.attempt
    if attempt is None or any(rank.live for rank in ranks):
        return None
    if run.ended is not None and not attempt.lease_until_s:
        return run.ended  # told already: reports that repeat it are no news
    all_of_them = len(statuses) == attempt.spec.world_size
    in_order = all_of_them and all(status.report.closed for status in statuses.values())
    return Ended(at_s=heard_s or attempt.costs_at_s, in_order=in_order)


def recorded(run: Run) -> FailureRecord:
    """Return the record with the newest attempt, as another one is about to follow it.

    Of one that fell silent the end is when it was last heard.
    """
    attempt = run.attempt
    if attempt is None or not any(rank.loaded for rank in run.ranks):
        return run.record
    last_s = accounting.last_s(run)
    failed = accounting.why_ended(run, last_s) in (Cause.NODE, Cause.PROCESS)
    return FailureRecord(
        failures_count=run.record.failures_count + failed,
        trained_s=run.record.trained_s + max(0.0, last_s - attempt.started_at_s),
    )
