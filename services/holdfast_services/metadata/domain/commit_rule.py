"""The commit rule (P1, P2): a level is reached by all shards of one generation, or not at all.

Only the newest generation may commit new steps. A row that exists may gain levels whoever
proves them; nothing ever takes a level away.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from holdfast.core.ids import CheckpointId, ShardId
from holdfast.core.shard import Shard
from holdfast_services.metadata.domain.believed_copies import (
    CheckpointCopies,
    Evidence,
    shards_of,
    whole,
)
from holdfast_services.metadata.domain.held_stripes import HeldStripe
from holdfast_services.metadata.domain.model import (
    MEMORY_ROWS_PER_RUN_MAX,
    Checkpoint,
    Node,
    NoParent,
    Parent,
    Run,
)
from holdfast_services.metadata.domain.shortage import domains_of, spread


def commit(run: Run, evidence: Evidence, live: Sequence[Node], now_s: float) -> Run:
    """Return the run with every level that the evidence proves, and who knows of it."""
    places = domains_of(live)
    seen = newest_seen(run, live)
    rows = {row.id: row for row in run.checkpoints}
    for key, copies in evidence.live.items():
        row = rows.get(key)
        if row is None and key.generation != committing(run):
            continue
        if not run.usable(key) or not whole(copies):
            continue
        row = row or new_row(key, shards_of(copies), now_s, run.parent or NoParent.BEGAN)
        stripes = evidence.stripes.get(key, ())
        row = _proven(run, row, copies, places, stripes, now_s)
        firm = firm_copies(copies, seen)
        rows[key] = _acknowledged(run, row, firm, places, stripes, now_s)
    return replace(run, checkpoints=_kept(run, rows.values()))


def _proven(
    run: Run,
    row: Checkpoint,
    copies: CheckpointCopies,
    places: Mapping[str, str],
    stripes: Sequence[HeldStripe],
    now_s: float,
) -> Checkpoint:
    """Return the row with what its copies prove; times that stand are left."""
    attempt = run.attempt
    if attempt is None:
        return row
    if row.replicated_at_s is None and spread(attempt.protection, copies, places, stripes):
        row = replace(row, replicated_at_s=now_s)
    return row


def _acknowledged(
    run: Run,
    row: Checkpoint,
    firm: CheckpointCopies,
    places: Mapping[str, str],
    stripes: Sequence[HeldStripe],
    now_s: float,
) -> Checkpoint:
    """Return the row as one that older slots may be freed for, if no holder will replace it.

    One that has not heard of the commit may have given its copy up since it reported it (4.7); of
    an element nobody does but by a view.
    """
    if row.copied_at_s is not None or run.attempt is None:
        return row
    if not spread(run.attempt.allowed, firm, places, stripes):
        return row
    return replace(row, copied_at_s=now_s)


def newest_seen(run: Run, nodes: Iterable[Node]) -> Mapping[str, CheckpointId]:
    """Return, by node, the newest committed checkpoint that the node has heard of."""
    return {n.name: key for n in nodes for key in n.inventory.seen if key.run == run.id}


def firm_copies(copies: CheckpointCopies, seen: Mapping[str, CheckpointId]) -> CheckpointCopies:
    """Return the copies, each with only those holders that will not replace it."""
    return {
        key: replace(item, nodes=tuple(n for n in item.nodes if n in seen and _heard(seen[n], key)))
        for key, item in copies.items()
    }


def _heard(seen: CheckpointId, shard: ShardId) -> bool:
    """Tell whether a node that has ``seen`` this keeps ``shard``: it replaces newer ones only."""
    return (shard.generation, shard.step) <= (seen.generation, seen.step)


def committing(run: Run) -> int | None:
    """Return the generation that may commit new steps; None: no attempt may."""
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
    firm = [row for row in usable if row.acknowledged]
    needed |= {row.id for row in (*usable[:1], *firm[:1])}
    memory = (row for row in ordered if row.id not in safe)
    recent = sorted(memory, key=lambda row: (row.local_at_s, row.id), reverse=True)
    needed |= {row.id for row in recent[:MEMORY_ROWS_PER_RUN_MAX]}
    return tuple(row for row in ordered if row.id in needed)


def free_before(run: Run) -> CheckpointId | None:
    """Return the newest acknowledged checkpoint; older slots may be freed.

    All copies of it that could be made are with holders that will not replace them, or the object
    store has it, as far as is known: found bad there it counts no more. None while a
    restore is being decided: until it is confirmed every older step may be needed.
    """
    return None if run.deciding or run.attempt is None else acknowledged(run)


def acknowledged(run: Run) -> CheckpointId | None:
    """Return the newest acknowledged checkpoint that may still be chosen."""
    firm = {row.id for row in run.checkpoints if row.acknowledged}
    newest_first = sorted(firm.difference(run.rejected), reverse=True)
    return next((key for key in newest_first if run.usable(key)), None)
