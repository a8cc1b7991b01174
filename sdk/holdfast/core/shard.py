"""A sealed segment as everybody knows it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.core.ids import ShardId


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A sealed segment as everybody knows it; the same wherever a copy lies.

    ``plan_hash`` is that of the segment's own boxes and, behind a dot, that of the tensors which
    all ranks share out among themselves.
    """

    id: ShardId
    job: str
    world_size: int
    plan_hash: str
    length_bytes: int
    root_digest: bytes


def unlike_ranks(shards: Iterable[Shard]) -> str:
    """Return why shards of one checkpoint do not add up, naming two ranks; empty: they may.

    Each rank tells by itself what it saves of the tensors that all have. Ranks that know others
    leave some to nobody (F38).
    """
    first: dict[str, int] = {}
    for shard in shards:
        shared = shard.plan_hash.partition(".")[2]
        if shared:
            first.setdefault(shared, shard.id.rank)
    if len(first) < 2:
        return ""
    one, other, *_ = first.values()
    return (
        f"ranks {one} and {other} do not have the same tensors in common, and some are saved by "
        f"nobody: give all ranks the same models and optimizers"
    )
