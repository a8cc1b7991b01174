"""What a node that took the place of a lost one fetches and keeps room for, by size of the job.

No time is measured: a run of n nodes is made up, one of them comes back empty, and what the
catalogue tells it to fetch is summed up.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.bench.harness import Record

from holdfast.core.attempts import AttemptSpec
from holdfast.core.budget import memory_need
from holdfast.core.decision import Decision, DecisionState
from holdfast.core.ids import CheckpointId, Generation, Rank, RunId, ShardId, Step
from holdfast.core.inventory import HeldShard, HeldState, Inventory, Peer, RankStatus
from holdfast.core.needs import Needs, ShardNeed
from holdfast.core.node_view import WantReason
from holdfast.core.protection import Copies
from holdfast.core.shard import Shard
from holdfast_services.metadata.domain.model import Attempt, Node, RankFacts, Run
from holdfast_services.metadata.domain.node_view import node_view, world

NODES = (4, 64, 1250)
RANKS_PER_NODE = 8
STATE_BYTES = 16 << 30
"""Of one replica of the state (DDP), or of the part of one node (sharded)."""
GIB = 1 << 30
KEY = CheckpointId(RunId("0123456789ab"), Step(100), Generation(1))
NAMES = tuple(f"needs/{what}_{kind}_{count}" for count in NODES for kind in ("ddp", "sharded")
              for what in ("fetched", "reserved"))  # fmt: skip


def measure(*, quick: bool) -> Iterator[Record]:
    """Yield bytes fetched and reserved by one node; with all nodes but one and their copies."""
    for nodes_count in NODES[:2] if quick else NODES:
        for sharded in (False, True):
            yield from _measure(nodes_count, sharded=sharded)


def _measure(nodes_count: int, *, sharded: bool) -> Iterator[Record]:
    kind = "sharded" if sharded else "ddp"
    world_size = nodes_count * RANKS_PER_NODE
    total_bytes = STATE_BYTES * (nodes_count if sharded else 1)
    length_bytes = total_bytes // world_size
    shards = tuple(_shard(rank, world_size, length_bytes) for rank in range(world_size))
    run, nodes = _lost_node(nodes_count, shards, sharded=sharded)
    view = node_view(world(nodes, (run,), 1.0), "n0")
    fetched = sum(w.shard.length_bytes for w in view.wants if w.reason is WantReason.RESTORE)
    own = length_bytes * RANKS_PER_NODE
    need = memory_need(
        own_bytes=own,
        restored_bytes=min(3 * own, total_bytes) if sharded else total_bytes,
        protection=Copies(1),
        nodes_count=nodes_count,
    )
    note = (
        f"{nodes_count} nodes of {RANKS_PER_NODE} ranks, "
        f"{'16 GiB of state per node' if sharded else '16 GiB of state in all'}, one node replaced"
    )
    yield _record(f"fetched_{kind}_{nodes_count}", fetched, total_bytes, note)
    whole = memory_need(
        own_bytes=own, restored_bytes=total_bytes, protection=Copies(1), nodes_count=nodes_count
    )
    yield _record(f"reserved_{kind}_{nodes_count}", need.total_bytes, whole.total_bytes, note)


def _record(name: str, value: int, whole: int, note: str) -> Record:
    return Record(
        name=f"needs/{name}",
        value=value / GIB,
        unit="GiB",
        peer="if each node had all of it",
        peer_value=whole / GIB,
        ratio=whole / value,
        bytes=value,
        note=note,
        target="",
        met=True,
    )


def _shard(rank: int, world_size: int, length_bytes: int) -> Shard:
    return Shard(
        id=ShardId(KEY.run, KEY.step, KEY.generation, Rank(rank)),
        job="job",
        world_size=world_size,
        plan_hash=f"{rank:x}",
        length_bytes=length_bytes,
        root_digest=bytes(16),
    )


def _lost_node(
    nodes_count: int, shards: tuple[Shard, ...], *, sharded: bool
) -> tuple[Run, dict[str, Node]]:
    """Return a restore that is proposed while ``n0`` has nothing; ``n1`` has copies of its own."""
    spec = AttemptSpec(
        job="job", nonce=b"n", launcher="l", holder="h", rank=0, world_size=len(shards),
        local_world_size=RANKS_PER_NODE, replicas=1,
    )  # fmt: skip
    attempt = Attempt(
        generation=2, spec=spec, started_at_s=0.0, lease_until_s=100.0, allowed=Copies(1)
    )
    nodes = {f"n{i}": _node(i, nodes_count, shards, sharded=sharded) for i in range(nodes_count)}
    ranks = tuple(
        RankFacts(rank=rank, node=f"n{rank // RANKS_PER_NODE}", registered_at_s=0.0)
        for rank in range(len(shards))
    )
    decision = Decision(
        number=1, state=DecisionState.PROPOSED, generation=2, checkpoint=KEY, shards=shards
    )
    run = Run(
        id=KEY.run, job="job", generation=2, attempt=attempt, ranks=ranks, decision=decision,
        pins=(KEY,),
    )  # fmt: skip
    return run, nodes


def _node(index: int, nodes_count: int, shards: tuple[Shard, ...], *, sharded: bool) -> Node:
    mine = shards[index * RANKS_PER_NODE : (index + 1) * RANKS_PER_NODE]
    before = (index - 1) % nodes_count
    copies = shards[before * RANKS_PER_NODE : (before + 1) * RANKS_PER_NODE]
    held = tuple(
        HeldShard(shard=shard, state=HeldState.SEALED, owner=f"n{owner}", slot_incarnation=1)
        for owner, part in ((index, mine), (before, copies))
        for shard in part
    )
    statuses = tuple(
        RankStatus(
            job="job", run=KEY.run, generation=2, rank=int(shard.id.rank), nonce=b"n",
            names_needs=sharded,
            needs=Needs(checkpoint=KEY, shards=(ShardNeed(rank=int(shard.id.rank)),))
            if sharded
            else None,
        )
        for shard in mine
    )  # fmt: skip
    name = f"n{index}"
    inventory = Inventory(
        node=Peer(node=name, rpc_address=f"{name}:1", endpoints=()),
        incarnation=1,
        sequence=1,
        shards=held if index else (),
        ranks=statuses,
    )
    return Node(inventory=inventory, reported_at_s=0.5, lease_until_s=100.0)
