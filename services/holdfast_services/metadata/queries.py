"""What people ask: jobs, checkpoints with the nodes of every copy, nodes. Pure, from a ``World``.

The models are the documents that REST answers with; times are seconds since the epoch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from holdfast.core.facts import DecisionState
from holdfast_services.metadata.domain.commit import keep_from
from holdfast_services.metadata.domain.evidence import CheckpointCopies
from holdfast_services.metadata.domain.model import Checkpoint, Node, Run
from holdfast_services.metadata.domain.view import World


class RestoreDoc(BaseModel):
    """The newest restore decision of a job."""

    number: int
    state: str
    fresh: bool
    step: int | None
    reason: str


class JobDoc(BaseModel):
    """A job, its current attempt and the newest checkpoint that may be restored."""

    job: str
    run: str
    generation: int
    world_size: int
    running: bool
    holder: str
    replicas: int
    replicas_cut: int
    step: int
    newest_step: int | None
    newest_replicated_step: int | None
    restore: RestoreDoc | None


class CheckpointDoc(BaseModel):
    """A committed checkpoint: the levels it has reached and how many copies are there now."""

    job: str
    run: str
    step: int
    generation: int
    level: str
    superseded: bool
    pinned: bool
    kept: bool
    world_size: int
    length_bytes: int
    local_at: float
    replicated_at: float | None
    durable_at: float | None
    copies_min: int
    nodes: list[str]


class ReplicaDoc(BaseModel):
    """One copy of a shard on a live node."""

    node: str
    tier: str


class ShardDoc(BaseModel):
    """One shard and where its copies lie."""

    rank: int
    volume: int
    length_bytes: int
    root_digest: str
    owner: str
    replicas: list[ReplicaDoc]


class CheckpointDetailDoc(CheckpointDoc):
    """A checkpoint with all its shards."""

    shards: list[ShardDoc]


class NodeDoc(BaseModel):
    """A node as it last reported; ``lease_s`` is what is left, below 0 when it is lost."""

    node: str
    live: bool
    lease_s: float
    reported_at: float
    incarnation: int
    rpc_address: str
    data_address: str
    domain: str
    budget_bytes: int
    used_bytes: int
    shards: int
    ranks: int


class EventDoc(BaseModel):
    """One piece of news."""

    id: int
    at: float
    kind: str
    severity: str
    message: str
    job: str
    node: str
    context: dict[str, str]


def job_doc(run: Run, world: World) -> JobDoc:
    """Return what people see of a job."""
    attempt = run.attempt
    usable = [row for row in run.checkpoints if run.usable(row.id)]
    replicated = (row.id.step for row in usable if row.replicated_at_s is not None)
    statuses = (
        status.step
        for node in world.live.values()
        for status in node.inventory.ranks
        if (status.run, status.generation) == (run.id, run.generation)
    )
    return JobDoc(
        job=run.job,
        run=run.id,
        generation=run.generation,
        world_size=attempt.world_size if attempt else 0,
        running=bool(attempt and attempt.lease_until_s > world.now_s),
        holder=attempt.holder if attempt else "",
        replicas=attempt.replicas if attempt else 0,
        replicas_cut=attempt.replicas_cut if attempt else 0,
        step=max(statuses, default=0),
        newest_step=usable[0].id.step if usable else None,
        newest_replicated_step=next(replicated, None),
        restore=_restore_doc(run),
    )


def _restore_doc(run: Run) -> RestoreDoc | None:
    decision = run.decision
    if decision is None:
        return None
    return RestoreDoc(
        number=decision.number,
        state=DecisionState(decision.state).name.lower(),
        fresh=decision.fresh,
        step=decision.checkpoint.step if decision.checkpoint else None,
        reason=decision.reason,
    )


def checkpoint_doc(run: Run, row: Checkpoint, world: World) -> CheckpointDoc:
    """Return what people see of a checkpoint."""
    return CheckpointDoc(**_checkpoint_fields(run, row, _copies(run, row, world)))


def checkpoint_detail_doc(run: Run, row: Checkpoint, world: World) -> CheckpointDetailDoc:
    """Return a checkpoint with every shard and the node of every copy."""
    copies = _copies(run, row, world)
    shards = [
        ShardDoc(
            rank=key.rank,
            volume=key.volume,
            length_bytes=item.shard.length_bytes,
            root_digest=item.shard.root_digest.hex(),
            owner=item.owner,
            replicas=[
                ReplicaDoc(node=node, tier="memory" if node == item.owner else "peer")
                for node in item.nodes
            ],
        )
        for key, item in sorted(copies.items())
    ]
    return CheckpointDetailDoc(**_checkpoint_fields(run, row, copies), shards=shards)


def _copies(run: Run, row: Checkpoint, world: World) -> CheckpointCopies:
    evidence = world.evidence.get(run.id)
    return evidence.live.get(row.id, {}) if evidence else {}


def _checkpoint_fields(run: Run, row: Checkpoint, copies: CheckpointCopies) -> dict[str, Any]:
    kept = keep_from(run)
    complete = len({key.rank for key in copies}) >= row.world_size
    return {
        "job": run.job,
        "run": run.id,
        "step": row.id.step,
        "generation": row.id.generation,
        "level": _level(row),
        "superseded": run.superseded(row.id),
        "pinned": row.id in run.pins,
        "kept": row.id == kept,
        "world_size": row.world_size,
        "length_bytes": row.length_bytes,
        "local_at": row.local_at_s,
        "replicated_at": row.replicated_at_s,
        "durable_at": row.durable_at_s,
        "copies_min": min((len(i.nodes) for i in copies.values()), default=0) if complete else 0,
        "nodes": sorted({node for item in copies.values() for node in item.nodes}),
    }


def _level(row: Checkpoint) -> str:
    if row.durable_at_s is not None:
        return "durable"
    return "local" if row.replicated_at_s is None else "replicated"


def node_doc(node: Node, world: World) -> NodeDoc:
    """Return what people see of a node."""
    inventory = node.inventory
    return NodeDoc(
        node=node.name,
        live=node.live(world.now_s),
        lease_s=round(node.lease_until_s - world.now_s, 1) if node.lease_until_s else 0.0,
        reported_at=node.reported_at_s,
        incarnation=inventory.incarnation,
        rpc_address=inventory.node.rpc_address,
        data_address=inventory.node.data_address,
        domain=inventory.node.domain,
        budget_bytes=inventory.budget_bytes,
        used_bytes=inventory.used_bytes,
        shards=len(inventory.shards),
        ranks=sum(status.live for status in inventory.ranks),
    )


def event_doc(row: Mapping[Any, Any]) -> EventDoc:
    """Return an event from its row."""
    return EventDoc(
        id=row["id"],
        at=row["at_s"],
        kind=row["kind"],
        severity=row["severity"],
        message=row["message"],
        job=row["job"],
        node=row["node"],
        context=json.loads(row["context"]),
    )
