"""Which steps of a run will never be whole: ranks gave them up, lost them, or have no room left."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from holdfast.core.abandoned_step import AbandonedStep
from holdfast.core.ids import CheckpointId
from holdfast.core.shard import unlike_ranks
from holdfast.core.user_events import Event
from holdfast_services.metadata.domain.attempts import status_by_rank
from holdfast_services.metadata.domain.believed_copies import (
    CheckpointCopies,
    Evidence,
    ranks_of,
    whole,
)
from holdfast_services.metadata.domain.commit_rule import (
    committing,
    firm_copies,
    free_before,
    newest_seen,
)
from holdfast_services.metadata.domain.model import (
    ABANDONED_PER_RUN_MAX,
    Checkpoint,
    Node,
    Outcome,
    Run,
)


def abandon(run: Run, nodes: Mapping[str, Node], evidence: Evidence) -> Outcome:
    """Return the run with the steps that ranks gave up or lost; a safe or chosen one stays.

    Ranks' lists are bounded and their news can be lost with an agent, so a step of which a copy
    lies somewhere is also judged by what is there (see ``_lost``): else it would keep its slots
    for ever. Those are the last to leave the bounded list.

    What ranks say takes no committed step away. What is there does as long as nothing was freed
    for it: a holder that had not heard of the commit has replaced it, and who has heard would
    keep its part of it, and with it the slot for all later steps (ADR 0021). So do those of which
    more were committed than ranks have slots for (see ``_piled``), and those of which some part was
    left to nobody (see ``_unlike``).
    """
    known = {(step.step, step.generation) for step in run.abandoned}
    committed = {row.id for row in run.checkpoints} | set(run.pins)
    safe = {row.id for row in run.checkpoints if _safe(row)} | set(run.pins)
    told = [step for node in nodes.values() for step in node.inventory.abandoned]
    fresh: dict[tuple[int, int], AbandonedStep] = {}
    found = (*_lost(run, nodes, evidence), *_piled(run, nodes, evidence), *_unlike(run, evidence))
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

    Or of which it had one, that was lost with its node's memory: training may wait for such a step.
    A rank and its shards are in one inventory, so what it has begun is always in one of both.
    """
    statuses = status_by_rank(run, nodes)
    kept = free_before(run)
    for key, copies in evidence.known.items():
        if key.generation != committing(run) or (kept is not None and key < kept):
            continue  # older ones are freed anyway, and a node that is away may hold some for long
        missing = sorted(statuses.keys() - ranks_of(copies))
        for rank in missing:
            said = statuses[rank].report
            had = said.sealed_before > key.step
            passed = said.step > key.step
            if (had or passed) and key.step not in said.saving:
                yield AbandonedStep(
                    run=run.id,
                    step=key.step,
                    generation=key.generation,
                    reason=_why_missing(rank, had=had, passed=passed),
                )
                break


def _why_missing(rank: int, *, had: bool, passed: bool) -> str:
    """Return why nothing of a rank is there; one that has sealed a later step may have had it."""
    if not had:
        return f"rank {rank} went on without saving it"
    if not passed:
        return f"the segment of rank {rank} was lost"
    return f"rank {rank} went on without saving it, or its segment was lost"


def _unlike(run: Run, evidence: Evidence) -> Iterable[AbandonedStep]:
    """Return the steps of the running attempt whose ranks did not share out the same tensors."""
    committed = {row.id for row in run.checkpoints}
    for key, copies in evidence.known.items():
        if key.generation != committing(run) or key in committed:
            continue
        reason = unlike_ranks(item.shard for _, item in sorted(copies.items()))
        if reason:
            yield AbandonedStep(run=run.id, step=key.step, generation=key.generation, reason=reason)


def _piled(run: Run, nodes: Mapping[str, Node], evidence: Evidence) -> Iterable[AbandonedStep]:
    """Return committed steps that wait for their copies, beyond what ranks have slots for.

    An outage can leave more of them than one, whose holders have replaced some parts and have no
    room for others: none was ever acknowledged. The oldest go, once a later one is firm; and so do
    those of which an owner has no part any more, since nobody will ask for copies of that.
    """
    if run.attempt is None:
        return
    beside = run.parent is not None or free_before(run) is not None
    room = run.attempt.spec.saving_slots - beside
    waiting = (row.id for row in run.checkpoints if run.usable(row.id) and not _safe(row))
    mine = sorted((key for key in waiting if key.generation == committing(run)), reverse=True)
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
    """Return the newest checkpoint of the attempt that is whole with holders that will keep it.

    Not of one before: this attempt may have begun at an earlier step, and a catalogue from a backup
    not know that it has.
    """
    seen = newest_seen(run, nodes.values())
    firm = (
        row.id for row in run.checkpoints if whole(firm_copies(evidence.live.get(row.id, {}), seen))
    )
    mine = (key for key in firm if run.usable(key) and key.generation == committing(run))
    return max(mine, default=None)


def _abandoned(run: Run, step: AbandonedStep) -> Event:
    return Event(
        kind="step_abandoned",
        severity="warning",
        message=f"step {step.step} of {run.job} was abandoned: {step.reason or 'no reason given'}",
        job=run.job,
        context={"run": run.id, "step": str(step.step), "attempt": str(step.generation)},
    )
