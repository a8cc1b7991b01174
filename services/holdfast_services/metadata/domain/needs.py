"""Which shards of the checkpoint that is restored the ranks of one node need.

Ranks that need all of it say nothing; others name their shards once it is proposed, and until
they have, nothing is fetched for them. What is named is a few shards of maybe 10^4, so a node is
told of those alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.facts import RankStatus, Shard
from holdfast_services.metadata.domain.model import Node, Run


def needed(run: Run, host: str, node: Node | None) -> Sequence[Shard]:
    """Return what ranks on ``host`` that have yet to load need of the decision's checkpoint.

    ``node`` is the host as it last reported itself; None: it has not.
    """
    attempt, decision = run.current, run.decision
    if attempt is None or decision is None or decision.checkpoint is None:
        return ()
    if all(rank.loaded for rank in run.ranks if rank.node == host):
        return ()
    if not attempt.spec.names_needs:
        return decision.shards
    statuses = node.inventory.ranks if node else ()
    said = (s.needs for s in statuses if _is_of(s, run) and not s.report.loaded)
    named = {
        (need.rank, need.volume)
        for needs in said
        if needs is not None and needs.checkpoint == decision.checkpoint
        for need in needs.shards
    }
    return tuple(shard for shard in decision.shards if (shard.id.rank, shard.id.volume) in named)


def _is_of(status: RankStatus, run: Run) -> bool:
    """Tell whether a rank is of the attempt; its nonce tells it from one of a lost catalogue."""
    attempt = run.current
    return (
        attempt is not None
        and (status.run, status.generation) == (run.id, attempt.generation)
        and status.nonce in (b"", attempt.spec.nonce)
    )
