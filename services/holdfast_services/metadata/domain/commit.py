"""The commit rule (P1, P2): a level is reached by all shards of one generation, or not at all.

Only the newest generation may commit new steps. A row that exists may gain levels whoever
proves them; nothing ever takes a level away.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from holdfast.core.budget import slots_per_rank
from holdfast.core.facts import AbandonedStep, Event, Shard
from holdfast.core.ids import CheckpointId, ShardId
from holdfast_services.metadata.domain.attempts import status_by_rank
from holdfast_services.metadata.domain.copies import domains_of, spread
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
    NoParent,
    Outcome,
    Parent,
    Run,
)


def commit(run: Run, evidence: Evidence, live: Sequence[Node], now_s: float) -> Run:
    """Return the run with every level that the evidence proves, and who knows of it."""
    places = domains_of(live)
    seen = _seen(run, live)
    rows = {row.id: row for row in run.checkpoints}
    for key, copies in evidence.live.items():
        row = rows.get(key)
        if row is None and key.generation != _committing(run):
            continue
        if not run.usable(key) or not whole(copies):
            continue
        row = row or new_row(key, shards_of(copies), now_s, run.parent or NoParent.BEGAN)
        row = _proven(run, row, copies, places, now_s)
        rows[key] = _acknowledged(run, row, copies, places, seen, now_s)
    return replace(run, checkpoints=_kept(run, rows.values()))


def _proven(
    run: Run, row: Checkpoint, copies: CheckpointCopies, places: Mapping[str, str], now_s: float
) -> Checkpoint:
    """Return the row with what its copies prove; times that stand are left."""
    attempt = run.attempt
    if attempt is None:
        return row
    if row.replicated_at_s is None and spread(attempt.protection, copies, places):
        row = replace(row, replicated_at_s=now_s)
    return row


def _acknowledged(
    run: Run,
    row: Checkpoint,
    copies: CheckpointCopies,
    places: Mapping[str, str],
    seen: Mapping[str, CheckpointId],
    now_s: float,
) -> Checkpoint:
    """Return the row as one that older slots may be freed for, if no holder will replace it.

    One that has not heard of the commit may have given its copy up since it reported it (4.7).
    """
    if row.copied_at_s is not None or run.attempt is None:
        return row
    if not spread(run.attempt.allowed, _firm(copies, seen), places):
        return row
    return replace(row, copied_at_s=now_s)


def _seen(run: Run, nodes: Iterable[Node]) -> Mapping[str, CheckpointId]:
    """Return node -> the newest committed checkpoint that it has heard of."""
    return {n.name: key for n in nodes for key in n.inventory.seen if key.run == run.id}


def _firm(copies: CheckpointCopies, seen: Mapping[str, CheckpointId]) -> CheckpointCopies:
    """Return the copies with those holders only that will not replace them."""
    return {
        key: replace(item, nodes=tuple(n for n in item.nodes if n in seen and _heard(seen[n], key)))
        for key, item in copies.items()
    }


def _heard(seen: CheckpointId, shard: ShardId) -> bool:
    """Tell whether a node that has ``seen`` this keeps ``shard``: it replaces newer ones only."""
    return (shard.generation, shard.step) <= (seen.generation, seen.step)


def _committing(run: Run) -> int | None:
    return run.current.generation if run.current else None


def new_row(key: CheckpointId, shards: Sequence[Shard], now_s: float, parent: Parent) -> Checkpoint:
    """Return the row of a checkpoint that is whole now: level ``local``."""
    return Checkpoint(
        id=key,
        world_size=shards[0].world_size,
        plan_hash=shards[0].plan_hash,
        length_bytes=sum(shard.length_bytes for shard in shards),
        local_at_s=now_s,
        parent=parent,
    )


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
    copied = [row for row in usable if row.copied_at_s is not None]
    needed |= {row.id for row in (*usable[:1], *copied[:1])}
    memory = (row for row in ordered if row.id not in safe)
    recent = sorted(memory, key=lambda row: (row.local_at_s, row.id), reverse=True)
    needed |= {row.id for row in recent[:MEMORY_ROWS_PER_RUN_MAX]}
    return tuple(row for row in ordered if row.id in needed)


def abandon(run: Run, nodes: Mapping[str, Node], evidence: Evidence) -> Outcome:
    """Return the run with the steps that ranks gave up or lost; a safe or chosen one stays.

    Ranks' lists are bounded and their news can be lost with an agent, so a step of which a copy
    lies somewhere is also judged by what is there (see ``_lost``): else it would keep its slots
    for ever. Those are the last to leave the bounded list.

    What ranks say takes no committed step away. What is there does as long as nothing was freed
    for it: a holder that had not heard of the commit has replaced it, and who has heard would
    keep its part of it, and with it the slot for all later steps (ADR 0021). So do those of which
    more were committed than ranks have slots for (see ``_piled``).
    """
    known = {(step.step, step.generation) for step in run.abandoned}
    committed = {row.id for row in run.checkpoints} | set(run.pins)
    safe = {row.id for row in run.checkpoints if _safe(row)} | set(run.pins)
    told = [step for node in nodes.values() for step in node.inventory.abandoned]
    fresh: dict[tuple[int, int], AbandonedStep] = {}
    found = (*_lost(run, nodes, evidence), *_piled(run, nodes, evidence))
    for steps, spared in ((told, committed), (found, safe)):
        for step in steps:
            key = CheckpointId(run.id, step.step, step.generation)  # type: ignore[arg-type]
            here = (step.step, step.generation)
            if step.run == run.id and key not in spared and here not in known:
                fresh.setdefault(here, step)
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


def _safe(row: Checkpoint) -> bool:
    """Tell whether older slots were freed for the row, or its bytes are not in memory alone."""
    return row.copied_at_s is not None or row.durable_at_s is not None or row.draining


def _lost(run: Run, nodes: Mapping[str, Node], evidence: Evidence) -> Iterable[AbandonedStep]:
    """Return the steps of the running attempt that a rank has passed without a segment.

    A rank and its shards are in one inventory, so what it has begun is always in one of both.
    """
    statuses = status_by_rank(run, nodes)
    kept = free_before(run)
    for key, copies in evidence.known.items():
        if key.generation != _committing(run) or (kept is not None and key < kept):
            continue  # older ones are freed anyway, and a node that is away may hold some for long
        missing = sorted(statuses.keys() - ranks_of(copies))
        for rank in missing:
            said = statuses[rank].report
            if said.step > key.step and key.step not in said.saving:
                reason = f"rank {rank} went on without saving it"
                yield AbandonedStep(
                    run=run.id, step=key.step, generation=key.generation, reason=reason
                )
                break


def _piled(run: Run, nodes: Mapping[str, Node], evidence: Evidence) -> Iterable[AbandonedStep]:
    """Return committed steps that wait for their copies, beyond what ranks have slots for.

    An outage can leave more of them than one, whose holders have replaced some parts and have no
    room for others: none was ever acknowledged. The oldest go, once a later one is firm; and so do
    those of which an owner has no part any more, since nobody will ask for copies of that.
    """
    if run.attempt is None:
        return
    beside = run.parent is not None or free_before(run) is not None
    room = slots_per_rank(persist=run.attempt.spec.persist.on) - beside
    waiting = (row.id for row in run.checkpoints if run.usable(row.id) and not _safe(row))
    mine = sorted((key for key in waiting if key.generation == _committing(run)), reverse=True)
    beyond = [key for key in mine if key in mine[room:] or _unowned(evidence.live.get(key, {}))]
    firm = _firm_from(run, nodes, evidence) if beyond else None
    for key in beyond:
        if firm is not None and key < firm:
            reason = f"step {firm.step} is complete, and its copies need the memory"
            yield AbandonedStep(run=run.id, step=key.step, generation=key.generation, reason=reason)


def _unowned(copies: CheckpointCopies) -> bool:
    """Tell whether a shard lies with others than its owner only."""
    return any(item.owner not in item.nodes for item in copies.values())


def _firm_from(run: Run, nodes: Mapping[str, Node], evidence: Evidence) -> CheckpointId | None:
    """Return the newest committed checkpoint that is whole with holders that will keep it."""
    seen = _seen(run, nodes.values())
    firm = (row.id for row in run.checkpoints if whole(_firm(evidence.live.get(row.id, {}), seen)))
    return max((key for key in firm if run.usable(key)), default=None)


def _abandoned(run: Run, step: AbandonedStep) -> Event:
    return Event(
        kind="step_abandoned",
        severity="warning",
        message=f"step {step.step} of {run.job} was abandoned: {step.reason or 'no reason given'}",
        job=run.job,
        context={"run": run.id, "step": str(step.step), "generation": str(step.generation)},
    )


def free_before(run: Run) -> CheckpointId | None:
    """Return the newest acknowledged checkpoint; older slots may be freed.

    All copies of it that could be made are with holders that will not replace them. None while a
    restore is being decided: until it is confirmed every older step may be needed.
    """
    return None if run.deciding or run.attempt is None else acknowledged(run)


def acknowledged(run: Run) -> CheckpointId | None:
    """Return the newest acknowledged checkpoint that may still be chosen."""
    copied = {row.id for row in run.checkpoints if row.copied_at_s is not None}
    return max((key for key in copied.difference(run.rejected) if run.usable(key)), default=None)
