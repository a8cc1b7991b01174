"""Which shards the ranks of one node need of the checkpoint that is being restored.

Ranks that need all of it say nothing; others name their shards once it is proposed, and until
they have, nothing is fetched for them. What is named is a few shards of maybe 10^4, so a node is
told of those alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.inventory import RankStatus
from holdfast.core.shard import Shard
from holdfast_services.metadata.domain.model import Node, Run


def needed(run: Run, host: str, node: Node | None) -> Sequence[Shard]:
    """Return the shards of the restored checkpoint that live ranks on ``host`` have yet to load.

    ``node`` is the host as it last reported itself; None: it has not. One that was killed needs
    nothing; should it come back, it says anew what it needs.
    """
    attempt, decision = run.current, run.decision
    if attempt is None or decision is None or decision.checkpoint is None:
        return ()
    if all(rank.loaded for rank in run.ranks if rank.node == host):
        return ()
    mine = _loading(run, node)
    named = [s.needs for s in mine if s.needs and s.needs.checkpoint == decision.checkpoint]
    if not all(status.names_needs for status in mine) or any(needs.whole for needs in named):
        return decision.shards
    places = {(need.rank, need.volume) for needs in named for need in needs.shards}
    return tuple(shard for shard in decision.shards if (shard.id.rank, shard.id.volume) in places)


def have_to_name(run: Run, host: str, node: Node | None) -> bool:
    """Tell whether ranks on ``host`` name what they need, and have yet to load it."""
    seated = any(rank.node == host and not rank.loaded for rank in run.ranks)
    return seated and any(status.names_needs for status in _loading(run, node))


def _loading(run: Run, node: Node | None) -> Sequence[RankStatus]:
    return [
        status
        for status in (node.inventory.ranks if node else ())
        if status.live and _is_of(status, run) and not status.report.loaded
    ]


def _is_of(status: RankStatus, run: Run) -> bool:
    """Tell whether a rank is of the attempt; its nonce tells it from one of a lost catalogue."""
    attempt = run.current
    return (
        attempt is not None
        and (status.run, status.generation) == (run.id, attempt.generation)
        and status.nonce in (b"", attempt.spec.nonce)
    )
