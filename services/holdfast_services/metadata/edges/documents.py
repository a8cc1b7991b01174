"""What people ask: jobs, checkpoints with the nodes of every copy, nodes. Pure, from a ``World``.

The models are the documents that REST answers with; times are seconds since the epoch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pydantic import BaseModel, Field, TypeAdapter

from holdfast.core.decision import DecisionState
from holdfast.core.ids import CheckpointId, ShardId
from holdfast.core.origin import Tree
from holdfast.core.shard import Shard
from holdfast.format.keys import folder
from holdfast_services.metadata.domain import costs, drain_interval
from holdfast_services.metadata.domain.ancestry import Ancestor
from holdfast_services.metadata.domain.attempts import status_by_rank
from holdfast_services.metadata.domain.believed_copies import ShardCopies
from holdfast_services.metadata.domain.commit_rule import free_before
from holdfast_services.metadata.domain.holds import Listed, holds
from holdfast_services.metadata.domain.model import Checkpoint, Node, Run, Stored
from holdfast_services.metadata.domain.node_view import World
from holdfast_services.metadata.domain.shortage import shortage


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
    attempt: int = Field(description="Higher for each launch of the job; gaps are normal")
    generation: int = Field(description="The same number as `attempt`, by its former name")
    world_size: int
    running: bool
    holder: str
    replicas: int
    replicas_allowed: int = Field(description="Copies that the live nodes have room for")
    protection: str = Field(description="What was asked for against the loss of nodes")
    losses_allowed: int = Field(description="Nodes, or domains, that may be lost as it stands now")
    shortage: str = Field(description="Why steps are not replicated now; empty: they are")
    step: int
    newest_step: int | None
    newest_replicated_step: int | None
    newest_durable_step: int | None
    restore: RestoreDoc | None
    costs: dict[str, float] = Field(
        description="What saves and the restore of the attempt cost, as last measured: seconds "
        "of its slowest rank, bytes of all its ranks; without those that are not known"
    )
    saves_every_s: float | None = Field(
        description="After what time rank 0 wishes an announced save; null: it does not, or nobody "
        "trains"
    )
    saves_why: str = Field(description="How an interval of `Auto()` came about; else empty")
    persists_every_s: float | None = Field(
        description="The interval of `persist=Auto()`; null: that is not the job's rule"
    )
    persists_why: str = Field(description="How that came about; else empty")
    failures: int = Field(
        description="How many attempts before this one had begun to train and ended otherwise than "
        "in order"
    )
    trained_s: float = Field(description="For how long the attempts before this one trained")
    hints: dict[str, Any] | None = Field(
        description="What rank 0 says of how the job scales, as the protocol's JobHints has it"
    )
    hints_age_s: float | None = Field(description="How long ago its node reported that")


class CheckpointDoc(BaseModel):
    """A committed checkpoint: its levels, its uses, the number of its copies in memory now."""

    job: str
    run: str
    step: int
    attempt: int = Field(description="Higher for each launch of the job; gaps are normal")
    generation: int = Field(description="The same number as `attempt`, by its former name")
    level: str = Field(description="local, replicated or durable: the highest it has reached")
    superseded: bool = Field(description="A restore left it behind: never chosen by itself")
    pinned: bool = Field(description="By a user: retention leaves it alone")
    pin_note: str | None
    held: list[str] = Field(description="Who needs it just now: readers, a restore, a drain")
    kept: bool = Field(description="The newest at the policy's level: older slots may be freed")
    world_size: int
    length_bytes: int
    local_at: float
    replicated_at: float | None
    durable_at: float | None
    draining: bool = Field(description="On its way to the object store")
    stored_shards: int | None = Field(description="Of a draining one: shards that lie there")
    expired_at: float | None = Field(description="Its objects are being deleted")
    scrubbed_at: float | None = Field(description="When its objects were last read back")
    bad: bool = Field(description="Objects were read back wrong: not restored from there")
    folder: str | None = Field(description="Its prefix in the object store, relative to the store")
    notes: dict[str, Any]
    copies_min: int = Field(description="Copies on live nodes of the shard that has fewest")
    nodes: list[str]


_CHECKPOINTS = TypeAdapter(list[CheckpointDoc])


class ReplicaDoc(BaseModel):
    """One copy of a shard: on a live node, or in the object store, which has no node."""

    node: str
    tier: str = Field(description="memory, peer or object")


class ShardDoc(BaseModel):
    """One shard and where its copies lie."""

    rank: int
    volume: int
    length_bytes: int
    root_digest: str
    owner: str
    bad: bool = Field(description="Its object was read back wrong")
    replicas: list[ReplicaDoc]


class StepDoc(BaseModel):
    """A step of a job, and the attempt that saved it."""

    step: int
    attempt: int


class RollbackDoc(BaseModel):
    """That a user rolled the job back, which is why an attempt began where it did."""

    at: float
    holder: str
    reason: str


class AncestorDoc(BaseModel):
    """An attempt that led to a checkpoint: when, from where and with what it was started."""

    attempt: int
    began_at: float | None = Field(description="Null where only the bucket knows of it")
    world_size: int = Field(description="0: not known")
    holder: str = Field(description="The process that began it")
    parent: StepDoc | None = Field(description="What it restored; null: it began at step 0")
    rollback: RollbackDoc | None
    commit: str
    dirty: bool | None = Field(description="Files had changed since the commit; null: not known")
    command: str
    user: str


class CheckpointDetailDoc(CheckpointDoc):
    """A checkpoint with all its shards, and the attempts that led to it, the last first."""

    shards: list[ShardDoc]
    line: list[AncestorDoc]


class EndpointDoc(BaseModel):
    """Where a node serves its segments to others, over one kind of transport."""

    kind: str
    address: str


class NodeDoc(BaseModel):
    """A node as it last reported; ``lease_s`` is what is left, below 0 when it is lost."""

    node: str
    live: bool
    lease_s: float
    reported_at: float
    incarnation: int
    rpc_address: str
    endpoints: list[EndpointDoc]
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
    stored = (row.id.step for row in usable if row.stored)
    statuses = (
        status.report.step
        for node in world.live.values()
        for status in node.inventory.ranks
        if (status.run, status.generation) == (run.id, run.generation)
    )
    return JobDoc(
        job=run.job,
        run=run.id,
        attempt=run.generation,
        generation=run.generation,
        world_size=attempt.spec.world_size if attempt else 0,
        running=bool(attempt and attempt.lease_until_s > world.now_s),
        holder=attempt.spec.holder if attempt else "",
        replicas=attempt.protection.copies.n if attempt else 0,
        replicas_allowed=attempt.allowed.copies.n if attempt else 0,
        protection=str(attempt.protection) if attempt else "",
        losses_allowed=attempt.allowed.losses if attempt else 0,
        shortage=shortage(run, world.live.values()),
        step=max(statuses, default=usable[0].id.step if usable else 0),
        newest_step=usable[0].id.step if usable else None,
        newest_replicated_step=next(replicated, None),
        newest_durable_step=next(stored, None),
        restore=_restore_doc(run),
        costs=_costs(run, world),
        failures=run.record.failures_count,
        trained_s=run.record.trained_s,
        **_drains(run, world),
        **_said(run, world),
    )


def _costs(run: Run, world: World) -> dict[str, float]:
    if run.attempt is None:
        return {}
    known = costs.shown(run.attempt, status_by_rank(run, world.nodes))
    return {name: value for name, value in asdict(known).items() if value}


def _drains(run: Run, world: World) -> dict[str, Any]:
    rule = run.attempt.spec.persist if run.attempt else None
    if rule is None or not rule.mtbf_s or not world.limits.object_tier:
        return {"persists_every_s": None, "persists_why": ""}
    return {
        "persists_every_s": drain_interval.interval_s(rule, run, world.now_s),
        "persists_why": drain_interval.why(rule, run, world.now_s),
    }


def _said(run: Run, world: World) -> dict[str, Any]:
    """Return what rank 0 says of its saves, and of how the job scales."""
    said: dict[str, Any] = {"saves_every_s": None, "saves_why": ""}
    said |= {"hints": None, "hints_age_s": None}
    for node in world.live.values():
        for status in node.inventory.ranks:
            mine = (status.run, status.generation, status.rank) == (run.id, run.generation, 0)
            if not mine:
                continue
            report = status.report
            if status.live and report.save_interval_s:
                said |= {"saves_every_s": report.save_interval_s, "saves_why": report.interval_why}
            if report.hints is not None:
                age_s = max(0.0, world.now_s - node.reported_at_s)
                said |= {"hints": asdict(report.hints), "hints_age_s": age_s}
    return said


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


def checkpoints_json(run: Run, listed: Sequence[Listed], world: World) -> bytes:
    """Return what people see of checkpoints, in the same order, as JSON."""
    kept = free_before(run)
    docs = [CheckpointDoc(**_fields(run, item, kept, _copies(run, item, world))) for item in listed]
    return _CHECKPOINTS.dump_json(docs)


def checkpoint_detail_doc(
    run: Run, item: Listed, stored: Stored | None, world: World, line: Sequence[Ancestor]
) -> CheckpointDetailDoc:
    """Return a checkpoint with every shard and all its copies.

    Args:
        run: Whose.
        item: The row.
        stored: What lies in the object store, None: nothing.
        world: Where copies are in memory.
        line: The attempts that led to it.
    """
    copies = _copies(run, item, world)
    shards = {key: found.shard for key, found in copies.items()}
    in_store = {shard.id: shard for shard in stored.shards} if stored else {}
    docs = [
        _shard_doc(shard, copies.get(key), in_store, item)
        for key, shard in sorted({**shards, **in_store}.items())
    ]
    fields = _fields(run, item, free_before(run), copies)
    return CheckpointDetailDoc(**fields, shards=docs, line=[_ancestor_doc(one) for one in line])


def _ancestor_doc(ancestor: Ancestor) -> AncestorDoc:
    began, back = ancestor.beginning, ancestor.rollback
    origin = began.origin
    parent = began.parent
    return AncestorDoc(
        attempt=began.generation,
        began_at=began.at_s,
        world_size=began.world_size,
        holder=began.holder,
        parent=StepDoc(step=parent.step, attempt=parent.generation) if parent else None,
        rollback=RollbackDoc(at=back.at_s, holder=back.holder, reason=back.reason)
        if back
        else None,
        commit=origin.commit,
        dirty=None if origin.tree is Tree.UNKNOWN else origin.tree is Tree.DIRTY,
        command=origin.command,
        user=origin.user,
    )


def _shard_doc(
    shard: Shard, copies: ShardCopies | None, stored: Mapping[ShardId, Shard], item: Listed
) -> ShardDoc:
    same = copies is not None and copies.shard == shard
    owner, nodes = (copies.owner, copies.nodes) if copies is not None and same else ("", ())
    bad = shard.id in item.bad
    replicas = [ReplicaDoc(node=node, tier="memory" if node == owner else "peer") for node in nodes]
    if shard.id in stored and not bad and not item.row.expired:
        replicas.append(ReplicaDoc(node="", tier="object"))
    return ShardDoc(
        rank=shard.id.rank,
        volume=shard.id.volume,
        length_bytes=shard.length_bytes,
        root_digest=shard.root_digest.hex(),
        owner=owner,
        bad=bad,
        replicas=replicas,
    )


def _copies(run: Run, item: Listed, world: World) -> Mapping[ShardId, ShardCopies]:
    evidence = world.evidence.get(run.id)
    return evidence.live.get(item.id, {}) if evidence else {}


def _fields(
    run: Run, item: Listed, kept: CheckpointId | None, copies: Mapping[ShardId, ShardCopies]
) -> dict[str, Any]:
    row = item.row
    complete = len({key.rank for key in copies}) >= row.world_size
    return {
        "job": run.job,
        "run": run.id,
        "step": row.id.step,
        "attempt": row.id.generation,
        "generation": row.id.generation,
        "level": _level(row),
        "superseded": run.superseded(row.id),
        "pinned": item.pin is not None,
        "pin_note": item.pin,
        "held": list(holds(run, item)),
        "kept": row.id == kept,
        "world_size": row.world_size,
        "length_bytes": row.length_bytes,
        "local_at": row.local_at_s,
        "replicated_at": row.replicated_at_s,
        "durable_at": row.durable_at_s,
        "draining": row.draining,
        "stored_shards": item.stored_shards,
        "expired_at": item.expired_at_s,
        "scrubbed_at": item.scrubbed_at_s,
        "bad": row.bad,
        "folder": folder(run.job, row.id) if row.draining or row.durable_at_s else None,
        "notes": json.loads(row.notes) if row.notes else {},
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
        endpoints=[EndpointDoc(**asdict(endpoint)) for endpoint in inventory.node.endpoints],
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
