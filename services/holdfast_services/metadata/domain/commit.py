"""The commit rule (P1, P2): a level is reached by all shards of one generation, or not at all.

Only the newest generation may commit new steps. A row that exists may gain levels whoever
proves them; nothing ever takes a level away.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from holdfast.core.facts import AbandonedStep, Event, Shard
from holdfast.core.ids import CheckpointId
from holdfast_services.metadata.domain.attempts import status_by_rank
from holdfast_services.metadata.domain.evidence import (
    CheckpointCopies,
    Evidence,
    ranks_of,
    shards_of,
    whole,
)
from holdfast_services.metadata.domain.model import (
    ABANDONED_PER_RUN_MAX,
    MEMORY_ROWS_PER_RUN_MAX,
    Checkpoint,
    Node,
    Outcome,
    Run,
)


def domains_of(nodes: Iterable[Node]) -> Mapping[str, str]:
    """Return node -> failure domain; a node that names none is one by itself."""
    return {
        node.name: f"domain:{node.inventory.node.domain}"
        if node.inventory.node.domain
        else f"node:{node.name}"
        for node in nodes
    }


def cut(run: Run, live: Iterable[Node]) -> Outcome:
    """Return the run with ``replicas_cut`` as the live nodes allow; a new cut is news (F54)."""
    attempt = run.current
    if attempt is None:
        return Outcome(run=run)
    places = domains_of(live)
    room = len(set(places.values()) if attempt.replica_domain else places)
    allowed = max(0, min(attempt.replicas, room - 1))
    if allowed == attempt.replicas_cut:
        return Outcome(run=run)
    changed = replace(run, attempt=replace(attempt, replicas_cut=allowed))
    if allowed > attempt.replicas_cut:
        return Outcome(run=changed)
    event = Event(
        kind="replication_cut",
        severity="warning",
        message=f"replicas={attempt.replicas} of {run.job} cut to {allowed}: {room} "
        f"{'failure domains' if attempt.replica_domain else 'nodes'} are live",
        job=run.job,
        context={"run": run.id, "replicas": str(allowed)},
    )
    return Outcome(run=changed, events=(event,))


def commit(run: Run, evidence: Evidence, live: Iterable[Node], now_s: float) -> Run:
    """Return the run with every level that the evidence proves."""
    places = domains_of(live)
    rows = {row.id: row for row in run.checkpoints}
    for key, copies in evidence.live.items():
        row = rows.get(key)
        if row is None and key.generation != _committing(run):
            continue
        if not run.usable(key) or not whole(copies):
            continue
        row = row or replace(new_row(key, shards_of(copies), now_s), parent=run.parent)
        if row.replicated_at_s is None and _replicated(run, copies, places):
            row = replace(row, replicated_at_s=now_s)
        rows[key] = row
    return replace(run, checkpoints=_kept(run, rows.values()))


def _committing(run: Run) -> int | None:
    return run.current.generation if run.current else None


def new_row(key: CheckpointId, shards: Sequence[Shard], now_s: float) -> Checkpoint:
    """Return the row of a checkpoint that is whole now: level ``local``."""
    return Checkpoint(
        id=key,
        world_size=shards[0].world_size,
        plan_hash=shards[0].plan_hash,
        length_bytes=sum(shard.length_bytes for shard in shards),
        local_at_s=now_s,
        # What its attempt had restored is said by whoever knows it. Itself claims no more than is
        # certain: what is later and of an older generation was left behind.
        parent=key,
    )


def _replicated(run: Run, copies: CheckpointCopies, places: Mapping[str, str]) -> bool:
    attempt = run.attempt
    if attempt is None:
        return False
    need = 1 + attempt.replicas_cut
    if not attempt.replica_domain:
        return all(len(item.nodes) >= need for item in copies.values())
    return all(len({places[node] for node in item.nodes}) >= need for item in copies.values())


def _kept(run: Run, rows: Iterable[Checkpoint]) -> tuple[Checkpoint, ...]:
    """Return the rows to keep, newest first: the last ones made, and all that something needs.

    Durable and draining ones always are: memory does not push out what lies elsewhere.
    """
    ordered = sorted(rows, key=lambda row: row.id, reverse=True)
    if len(ordered) <= MEMORY_ROWS_PER_RUN_MAX:
        return tuple(ordered)
    safe = {row.id for row in ordered if row.durable_at_s is not None or row.draining}
    needed = {*run.pins, *safe}
    usable = [row for row in ordered if run.usable(row.id)]
    replicated = [row for row in usable if row.replicated_at_s is not None]
    needed |= {row.id for row in (*usable[:1], *replicated[:1])}
    memory = (row for row in ordered if row.id not in safe)
    recent = sorted(memory, key=lambda row: (row.local_at_s, row.id), reverse=True)
    needed |= {row.id for row in recent[:MEMORY_ROWS_PER_RUN_MAX]}
    return tuple(row for row in ordered if row.id in needed)


def abandon(run: Run, nodes: Mapping[str, Node], evidence: Evidence) -> Outcome:
    """Return the run with the steps that ranks gave up or lost; a committed or chosen one stays.

    Ranks' lists are bounded and their news can be lost with an agent, so a step of which a copy
    lies somewhere is also judged by what is there (see ``_lost``): else it would keep its slots
    for ever. Those are the last to leave the bounded list.
    """
    known = {(step.step, step.generation) for step in run.abandoned}
    safe = {row.id for row in run.checkpoints} | set(run.pins)
    fresh: dict[tuple[int, int], AbandonedStep] = {}
    told = [step for node in nodes.values() for step in node.inventory.abandoned]
    for step in (*told, *_lost(run, nodes, evidence)):
        key = CheckpointId(run.id, step.step, step.generation)  # type: ignore[arg-type]
        if step.run == run.id and key not in safe and (step.step, step.generation) not in known:
            fresh.setdefault((step.step, step.generation), step)
    if not fresh:
        return Outcome(run=run)
    held = {(key.step, key.generation) for key in evidence.known}
    merged = sorted(
        (*run.abandoned, *fresh.values()),
        key=lambda s: ((s.step, s.generation) in held, s.generation, s.step),
        reverse=True,
    )[:ABANDONED_PER_RUN_MAX]
    events = tuple(_abandoned(run, step) for step in fresh.values() if step in merged)
    return Outcome(run=replace(run, abandoned=tuple(merged)), events=events)


def _lost(run: Run, nodes: Mapping[str, Node], evidence: Evidence) -> Iterable[AbandonedStep]:
    """Return the steps of the running attempt that a rank has passed without a segment.

    A rank and its shards are in one inventory, so what it has begun is always in one of both.
    """
    statuses = status_by_rank(run, nodes)
    kept = keep_from(run)
    for key, copies in evidence.known.items():
        if key.generation != _committing(run) or (kept is not None and key < kept):
            continue  # older ones are freed anyway, and a node that is away may hold some for long
        missing = sorted(statuses.keys() - ranks_of(copies))
        for rank in missing:
            if statuses[rank].step > key.step and key.step not in statuses[rank].saving:
                reason = f"rank {rank} went on without a segment of it"
                yield AbandonedStep(
                    run=run.id, step=key.step, generation=key.generation, reason=reason
                )
                break


def _abandoned(run: Run, step: AbandonedStep) -> Event:
    return Event(
        kind="step_abandoned",
        severity="warning",
        message=f"step {step.step} of {run.job} was abandoned: {step.reason or 'no reason given'}",
        job=run.job,
        context={"run": run.id, "step": str(step.step), "generation": str(step.generation)},
    )


def keep_from(run: Run) -> CheckpointId | None:
    """Return the newest checkpoint committed at the policy's level; older slots may be freed.

    None while a restore is being decided: until it is confirmed every older step may be needed.
    """
    if run.deciding or run.attempt is None:
        return None
    replicate = run.attempt.replicas_cut > 0
    usable = (
        row.id
        for row in run.checkpoints
        if run.usable(row.id) and (row.replicated_at_s is not None or not replicate)
    )
    return max(usable, default=None)
