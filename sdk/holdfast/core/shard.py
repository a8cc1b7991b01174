"""A sealed segment as everybody knows it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.core.ids import ShardId

PRIME = (1 << 56) - 5
"""Tallies of ranks count modulo this; see ``format.tally``."""
UNLIKE = "what the ranks save is not all of the state"
"""How each text of ``unlike_ranks`` begins."""
_TALLY = re.compile("[0-9a-f]{14}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A sealed segment as everybody knows it; the same wherever a copy lies.

    ``plan_hash`` is that of the segment's own boxes; behind a hyphen what its rank saves less what
    it answers for (``format.tally``), and behind a dot the hash of the tensors which all ranks
    share out among themselves.
    """

    id: ShardId
    job: str
    world_size: int
    plan_hash: str
    length_bytes: int
    root_digest: bytes


def unlike_ranks(shards: Iterable[Shard]) -> str:
    """Return why shards of one checkpoint do not add up; empty: they do, as far as is known.

    Each rank tells by itself what it saves of the tensors that others have, too. Ranks that know
    others leave some to nobody, or save one twice (F38). Two of them are named, or once all shards
    are there that their boxes do not make up the tensors.
    """
    first: dict[str, int] = {}
    tallies: dict[int, int | None] = {}
    world_size = 0
    for shard in shards:
        own, _, shared = shard.plan_hash.partition(".")
        if shared:
            first.setdefault(shared, shard.id.rank)
            tallies[shard.id.rank] = _tally(own)
        world_size = shard.world_size
    if len(first) > 1:
        one, other, *_ = first.values()
        return (
            f"{UNLIKE}: ranks {one} and {other} do not have the same tensors in common, and some "
            f"are saved by nobody: give all ranks the same models and optimizers"
        )
    known = [number for number in tallies.values() if number is not None]
    if not known or len(known) < world_size or sum(known) % PRIME == 0:
        return ""
    return (
        f"{UNLIKE}: the boxes of some tensor leave a hole, or overlap: give all ranks of a mesh "
        f"the same models and optimizers"
    )


def is_of_plans(reason: str) -> bool:
    """Tell whether a step was given up for a ``reason`` of ``unlike_ranks``."""
    return reason.startswith(UNLIKE)


def _tally(own: str) -> int | None:
    """Return the tally in the part of a plan hash before its dot; None: it has none."""
    digits = own.partition("-")[2]
    return int(digits, 16) if _TALLY.fullmatch(digits) else None
