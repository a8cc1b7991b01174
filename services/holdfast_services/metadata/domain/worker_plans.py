"""What persistence workers are told to do (G10, G20): items for the queue, plans for workers.

The queue carries names of items only; what an item stands for now is planned when it is claimed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from holdfast.core import queue_items
from holdfast.core.ids import CheckpointId, ShardId
from holdfast.core.inventory import HeldState, Peer
from holdfast.core.origin import Origin
from holdfast.core.persistence_work import CheckpointWork, ShardWork, SweepWork
from holdfast.core.queue_items import Item, Kind, shard_item
from holdfast.core.shard import Shard
from holdfast_services.metadata.domain.model import Checkpoint, Node, Run

EARLIER_IN_PLAN_MAX = 4
SOURCES_IN_PLAN_MAX = 8


def items(run: Run) -> tuple[str, ...]:
    """Return the names of all that is still to be done for the run's drains."""
    found: list[str] = []
    for drain in run.drains:
        found += [queue_items.text(shard_item(shard.id)) for shard in drain.missing]
        if not drain.missing:
            found.append(queue_items.text(Item(Kind.MANIFEST, drain.checkpoint)))
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemFacts:
    """What the catalogue knows of an item's checkpoint.

    ``shards`` are those that the item is about: the one that is awaited or is bad in the store, or
    all of the checkpoint. ``missing_count`` of a drain's are still to come. ``earlier`` are
    durable rows of the run, newest first. ``origin`` is that of the attempt that saved it.
    """

    job: str
    row: Checkpoint
    shards: tuple[Shard, ...]
    missing_count: int = 0
    repair: bool = False
    earlier: tuple[Checkpoint, ...] = ()
    origin: Origin | None = None


def plan(
    item: Item, known: ItemFacts, nodes: Mapping[str, Node], now_s: float
) -> ShardWork | CheckpointWork | None:
    """Return what a worker does for ``item`` now; None: there is nothing left to do.

    The sources of a shard may be empty: then who holds it is away.
    """
    row = known.row
    if not known.shards:
        return None
    if item.kind is Kind.SHARD:
        earlier = [one.id for one in known.earlier if one.id != row.id]
        return ShardWork(
            shard=known.shards[0],
            sources=holders(known.shards[0], nodes, now_s),
            earlier=tuple(earlier[:EARLIER_IN_PLAN_MAX]),
            repair=known.repair,
        )
    wanted = {
        Kind.MANIFEST: row.draining and known.missing_count == 0,
        Kind.COLLECT: row.expired,
        Kind.SCRUB: relied_on(row),
    }
    if not wanted[item.kind]:
        return None
    return CheckpointWork(
        checkpoint=row.id,
        job=known.job,
        shards=known.shards,
        parent=row.written_parent,
        notes=row.notes,
        created_at_s=row.local_at_s,
        repair=known.repair,
        origin=known.origin if known.origin != Origin() else None,
    )


def relied_on(row: Checkpoint) -> bool:
    """Tell whether the catalogue relies on the checkpoint in the object store, whole or damaged."""
    return row.durable_at_s is not None and not row.expired


def sweep(draining: Iterable[CheckpointId], before_s: float) -> SweepWork:
    """Return what ``ORPHANS`` asks for: all that is older than ``before_s`` and not on its way."""
    return SweepWork(draining=tuple(draining), before_s=max(0.0, before_s))


def holders(shard: Shard, nodes: Mapping[str, Node], now_s: float) -> tuple[Peer, ...]:
    """Return the live nodes that hold exactly ``shard``, a bounded number.

    Its owner first: that keeps it as long as it drains, others may let it go meanwhile.
    """
    found = [
        (held.owner != name, name)
        for name in nodes
        if nodes[name].live(now_s)
        for held in nodes[name].inventory.shards
        if held.shard == shard and held.state is HeldState.SEALED
    ]
    return tuple(nodes[name].inventory.node for _, name in sorted(found)[:SOURCES_IN_PLAN_MAX])


def repairs(bad: Iterable[ShardId], nodes: Mapping[str, Node], now_s: float) -> tuple[str, ...]:
    """Return the names of damaged stored shards that a live node could replace."""
    there = {
        held.shard.id
        for node in nodes.values()
        if node.live(now_s)
        for held in node.inventory.shards
        if held.state is HeldState.SEALED
    }
    return tuple(queue_items.text(shard_item(key)) for key in bad if key in there)
