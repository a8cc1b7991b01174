"""What a rank needs of a checkpoint to begin: which shards, and which bytes of them.

A rank of plain DDP needs all of it, and says nothing. Where the state is cut over the ranks, each
names what it needs once a checkpoint is proposed: its agent fetches and verifies that, and no node
fetches or keeps room for what none of its ranks has named. Units: bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.core.ids import CheckpointId
from holdfast.errors import InvalidRequestError

SHARDS_COUNT_MAX = 100_000
RANGES_COUNT_MAX = 10_000
"""Over all shards that one rank names; its agent looks at them at each turn."""
HEADS_BYTES_MAX = 60 << 20
"""Of the heads in one answer; who wants more asks for the others again.

As much as a message holds: a head that is longer is never told, and a rank of a mesh fetches all.
"""
HEADS_COUNT_MAX = 512
"""A rank asks for the heads of so many ranks at most; where it needs more, all is fetched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteRange:
    """Bytes ``[begin, end)`` of a segment."""

    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardNeed:
    """A shard of which a rank needs ``ranges``, sorted and apart; none: all of it."""

    rank: int
    volume: int = 0
    ranges: tuple[ByteRange, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """All that a rank needs of ``checkpoint``; no shard: it begins without any of its bytes.

    ``whole``: all of it, whatever ``shards`` says. ``number`` counts what the rank has said of its
    needs, so that an answer to what it said before is not taken for one to this.
    """

    checkpoint: CheckpointId
    shards: tuple[ShardNeed, ...] = ()
    number: int = 1
    whole: bool = False

    @property
    def in_parts(self) -> bool:
        """Whether there is a shard that is not needed whole."""
        return not self.whole and any(need.ranges for need in self.shards)

    def in_whole_shards(self) -> Needs:
        """Return the same without byte ranges: which bytes are read is between rank and agent."""
        return replace(self, shards=tuple(replace(need, ranges=()) for need in self.shards))


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The first bytes of a segment of ``rank``, up to its first tensor; of ``length_bytes`` in all.

    Nothing has verified them: who reads tensors takes the header from the verified bytes (P3).
    """

    rank: int
    length_bytes: int
    data: bytes


def checked(needs: Needs) -> Needs:
    """Return what a rank named, if it is something that a rank can need.

    Raises:
        InvalidRequestError: names the limit, or the shard that is no shard.
    """
    if len(needs.shards) > SHARDS_COUNT_MAX:
        raise InvalidRequestError(f"needs: {len(needs.shards)} shards, at most {SHARDS_COUNT_MAX}")
    ranges_count = sum(len(need.ranges) for need in needs.shards)
    if ranges_count > RANGES_COUNT_MAX:
        raise InvalidRequestError(f"needs: {ranges_count} ranges, at most {RANGES_COUNT_MAX}")
    places = {(need.rank, need.volume) for need in needs.shards}
    if len(places) != len(needs.shards):
        raise InvalidRequestError("needs: a shard is named twice")
    for need in needs.shards:
        edges = [edge for part in need.ranges for edge in (part.begin, part.end)]
        if min(need.rank, need.volume, *edges) < 0 or edges != sorted(set(edges)):
            raise InvalidRequestError(
                f"needs: rank {need.rank}, volume {need.volume}: byte ranges must be sorted, apart "
                f"and not empty"
            )
    return needs
