"""A sealed segment as everybody knows it."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.ids import ShardId


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A sealed segment as everybody knows it; the same wherever a copy lies."""

    id: ShardId
    job: str
    world_size: int
    plan_hash: str
    length_bytes: int
    root_digest: bytes
