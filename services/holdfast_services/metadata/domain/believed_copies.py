"""What inventories prove: which copies of which shards lie where, and what is whole.

A holder testifies only for itself; a verified copy is proof of its shard. Copies that disagree
about a shard's digest are different things: those that agree with the owner count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from holdfast.core.ids import CheckpointId, ShardId
from holdfast.core.inventory import HeldShard, HeldState
from holdfast.core.shard import Shard
from holdfast.core.sources import Memory, Object, Rebuilt, Source
from holdfast_services.metadata.domain.held_stripes import HeldStripe, held_stripes
from holdfast_services.metadata.domain.model import Node, Stored


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCopies:
    """One shard, the node whose trainer wrote it and the nodes that hold it, sorted.

    ``object``: the object store has it too; ``rebuilt``: it follows from the rest of its stripe.
    Then there may be no node, and no owner is known.
    """

    shard: Shard
    owner: str
    nodes: tuple[str, ...]
    object: bool = False
    rebuilt: Rebuilt | None = None

    @property
    def sources(self) -> tuple[Source, ...]:
        """The sources that can serve the shard, the object store last.

        A stripe is named without what there is of it, as it is blamed.
        """
        found: list[Source] = [*map(Memory, self.nodes)]
        if self.rebuilt is not None:
            found.append(Rebuilt(self.rebuilt.stripe))
        if self.object:
            found.append(Object())
        return tuple(found)


CheckpointCopies = Mapping[ShardId, ShardCopies]


@dataclass(frozen=True, slots=True)
class Evidence:
    """Sealed copies of one run's shards by checkpoint.

    ``live`` counts nodes with a lease only, ``known`` the last word of every node. ``sources``
    is ``live``, what the object store has and what follows from ``stripes``: those of which
    nodes with a lease have elements.
    """

    live: Mapping[CheckpointId, CheckpointCopies]
    known: Mapping[CheckpointId, CheckpointCopies]
    sources: Mapping[CheckpointId, CheckpointCopies]
    generation_max: int
    stripes: Mapping[CheckpointId, Sequence[HeldStripe]] = field(default_factory=dict)


def gather(
    run: str, nodes: Sequence[Node], now_s: float, stored: Sequence[Stored] = ()
) -> Evidence:
    """Return what the nodes' last inventories prove about ``run``, and what ``stored`` adds."""
    held = [(node, item) for node in nodes for item in _held(node, run)]
    live = [(node, item) for node, item in held if node.live(now_s)]
    seen = max((item.shard.id.generation for _, item in held), default=0)
    known = _copies(held)
    served = known if len(live) == len(held) else _copies(live)
    stripes = held_stripes(run, [node for node in nodes if node.live(now_s)])
    seen = max([seen, *(key.generation for key in stripes)])
    sources = _with_rebuilt(_with_stored(served, stored), stripes)
    return Evidence(served, known, sources, seen, stripes)


def _with_rebuilt(
    sources: Mapping[CheckpointId, CheckpointCopies],
    stripes: Mapping[CheckpointId, Sequence[HeldStripe]],
) -> Mapping[CheckpointId, CheckpointCopies]:
    """Return ``sources`` with what the rest of a stripe is enough for; with one that has most."""
    if not stripes:
        return sources
    merged = dict(sources)
    for key, held in stripes.items():
        merged[key] = with_rebuilt(merged.get(key, {}), held)
    return merged


def with_rebuilt(copies: CheckpointCopies, stripes: Iterable[HeldStripe]) -> CheckpointCopies:
    """Return the copies of a checkpoint with what the rest of one of its ``stripes`` gives."""
    found = dict(copies)
    for held in stripes:
        for shard in held.stripe.members:
            item = found.get(shard.id) or ShardCopies(shard=shard, owner="", nodes=())
            rebuilt = held.rebuilds(shard, holders_in(copies))
            if rebuilt is None or item.shard != shard:
                continue
            if item.rebuilt is None or len(rebuilt.pieces) > len(item.rebuilt.pieces):
                found[shard.id] = replace(item, rebuilt=rebuilt)
    return found


def holders_in(copies: CheckpointCopies) -> Callable[[Shard], tuple[str, ...]]:
    """Return what says which nodes have exactly a shard."""

    def holders(shard: Shard) -> tuple[str, ...]:
        item = copies.get(shard.id)
        return item.nodes if item is not None and item.shard == shard else ()

    return holders


def _with_stored(
    live: Mapping[CheckpointId, CheckpointCopies], stored: Sequence[Stored]
) -> Mapping[CheckpointId, CheckpointCopies]:
    """Return ``live`` with the object store as one more source.

    A durable checkpoint is what its manifest says: copies in memory that disagree are another.
    """
    if not stored:
        return live
    merged = dict(live)
    for item in stored:
        held = live.get(item.checkpoint, {})
        merged[item.checkpoint] = {
            shard.id: replace(
                held[shard.id]
                if shard.id in held and held[shard.id].shard == shard
                else ShardCopies(shard=shard, owner="", nodes=()),
                object=shard.id not in item.bad,
            )
            for shard in item.shards
        }
    return merged


def whole(copies: CheckpointCopies) -> bool:
    """Tell whether every rank's shard of the checkpoint is there, all of one world size.

    No header says how many volumes a rank has, so the last might be missing: only a manifest,
    which lists them, makes a checkpoint with more than volume 0 whole (P1).
    """
    if not all(item.nodes or item.rebuilt or item.object for item in copies.values()):
        return False
    if any(key.volume > 0 and not item.object for key, item in copies.items()):
        return False
    sizes = {item.shard.world_size for item in copies.values()}
    return len(sizes) == 1 and len(ranks_of(copies)) == sizes.pop()


def ranks_of(copies: CheckpointCopies) -> frozenset[int]:
    """Return the ranks that have a shard among ``copies``, within the world size."""
    return frozenset(
        item.shard.id.rank for item in copies.values() if item.shard.id.rank < item.shard.world_size
    )


def shards_of(copies: CheckpointCopies) -> tuple[Shard, ...]:
    """Return the shards in the order of their ids."""
    return tuple(copies[key].shard for key in sorted(copies))


def _held(node: Node, run: str) -> Iterable[HeldShard]:
    return (
        item
        for item in node.inventory.shards
        if item.shard.id.run == run and item.state is HeldState.SEALED
    )


def _copies(
    held: Sequence[tuple[Node, HeldShard]],
) -> Mapping[CheckpointId, CheckpointCopies]:
    variants: dict[ShardId, dict[Shard, list[tuple[str, str]]]] = defaultdict(dict)
    for node, item in held:
        variants[item.shard.id].setdefault(item.shard, []).append((node.name, item.owner))
    checkpoints: dict[CheckpointId, dict[ShardId, ShardCopies]] = defaultdict(dict)
    for key, options in variants.items():
        checkpoints[key.checkpoint][key] = _believed(options)
    return checkpoints


def _believed(options: Mapping[Shard, Sequence[tuple[str, str]]]) -> ShardCopies:
    """Return the variant the owner has, else the one most nodes have, else the lowest digest."""

    def weight(shard: Shard) -> tuple[bool, int, bytes]:
        holders = options[shard]
        return (any(node == owner for node, owner in holders), len(holders), shard.root_digest)

    shard = next(iter(options)) if len(options) == 1 else max(options, key=weight)
    holders = options[shard]
    owner = next((owner for node, owner in holders if node == owner), min(o for _, o in holders))
    return ShardCopies(shard=shard, owner=owner, nodes=tuple(sorted({node for node, _ in holders})))
