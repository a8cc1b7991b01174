"""Where the copies of one checkpoint lie: node by rank, or in blocks of ranks. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from holdfast_services.metadata.domain.believed_copies import CheckpointCopies, ShardCopies
from holdfast_services.metadata.edges.dashboard.texts import counted

RANKS_SHOWN_MAX = 64
NODES_SHOWN_MAX = 64
BLOCKS_COUNT_MAX = 64
SCARCE_SHOWN_MAX = 16


@dataclass(frozen=True, slots=True)
class Block:
    """Ranks ``first`` to ``last``: the fewest and the most copies, and on how many nodes."""

    first: int
    last: int
    copies_min: int
    copies_max: int
    nodes_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMap:
    """A checkpoint's copies in memory.

    Either ``rows``, a node with a cell for each of ``ranks`` (``own``, ``copy`` or empty), or
    ``blocks``. ``scarce`` are the first of the ranks that have fewest copies, ``copies_min``.
    """

    summary: str
    copies_min: int
    ranks: tuple[int, ...] = ()
    rows: tuple[tuple[str, tuple[str, ...]], ...] = ()
    blocks: tuple[Block, ...] = ()
    scarce: tuple[int, ...] = ()
    scarce_count: int = 0


def rank_map(copies: CheckpointCopies, world_size: int) -> RankMap:
    """Return the map of a checkpoint; of more ranks or nodes than fit, blocks."""
    by_rank: dict[int, list[ShardCopies]] = defaultdict(list)
    for key, item in copies.items():
        by_rank[key.rank].append(item)
    counts = [_count(by_rank.get(rank, ())) for rank in range(world_size)]
    nodes = sorted({node for item in copies.values() for node in item.nodes})
    least = min(counts, default=0)
    scarce = [rank for rank, count in enumerate(counts) if count == least]
    small = world_size <= RANKS_SHOWN_MAX and len(nodes) <= NODES_SHOWN_MAX
    return RankMap(
        summary=_summary(counts, least, len(nodes)),
        copies_min=least,
        ranks=tuple(range(world_size)) if small else (),
        rows=tuple(_rows(nodes, by_rank, world_size)) if small else (),
        blocks=() if small else tuple(_blocks(counts, by_rank)),
        scarce=tuple(scarce[:SCARCE_SHOWN_MAX]) if len(scarce) < world_size else (),
        scarce_count=len(scarce) if len(scarce) < world_size else 0,
    )


def _count(items: Sequence[ShardCopies]) -> int:
    """Return how many copies of a rank's whole part there are."""
    return min((len(item.nodes) for item in items), default=0)


def _summary(counts: Sequence[int], least: int, nodes_count: int) -> str:
    if not counts:
        return "Nothing is known of its ranks."
    missing = sum(count == 0 for count in counts)
    where = f"on {counted(nodes_count, 'node')}"
    if missing == len(counts):
        return "No copy lies in memory now."
    if missing:
        return f"{counted(missing, 'rank')} of {len(counts):,} without a copy in memory, {where}."
    each = counted(least, "copy", "copies")
    most = max(counts)
    range_said = each if most == least else f"{least:,} to {counted(most, 'copy', 'copies')}"
    return f"{range_said} of each of {counted(len(counts), 'rank')}, {where}."


def _rows(
    nodes: Sequence[str], by_rank: Mapping[int, Sequence[ShardCopies]], world_size: int
) -> Iterable[tuple[str, tuple[str, ...]]]:
    held: dict[tuple[str, int], str] = {}
    for rank, items in by_rank.items():
        for item in items:
            for node in item.nodes:
                held[node, rank] = "own" if node == item.owner else "copy"
    for node in nodes:
        yield node, tuple(held.get((node, rank), "") for rank in range(world_size))


def _blocks(counts: Sequence[int], by_rank: Mapping[int, Sequence[ShardCopies]]) -> Iterable[Block]:
    size = -(-len(counts) // BLOCKS_COUNT_MAX)
    for first in range(0, len(counts), size):
        some = counts[first : first + size]
        last = first + len(some) - 1
        nodes = {
            node
            for rank in range(first, last + 1)
            for item in by_rank.get(rank, ())
            for node in item.nodes
        }
        yield Block(first, last, min(some), max(some), len(nodes))
