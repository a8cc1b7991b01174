"""Drains (G10): which checkpoint goes to the object store, and when one that is going is given up.

One checkpoint of a run is on its way at a time. While it is, another that becomes due is
*postponed*: memory-tier saves never wait, the object tier gets the next committed one instead.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from holdfast.core.ids import CheckpointId, ShardId
from holdfast.core.persistence_rules import PersistRule
from holdfast.core.shard import Shard
from holdfast.core.user_events import Event
from holdfast_services.metadata.domain import drain_interval
from holdfast_services.metadata.domain.believed_copies import (
    Evidence,
    ShardCopies,
    shards_of,
    whole,
)
from holdfast_services.metadata.domain.model import Checkpoint, Drain, Node, Outcome, Run
from holdfast_services.metadata.domain.shortage import awaited

HOLDER_AWAY_S_MAX = 600.0
"""How long a drain waits for a holder that was lost: its node may be only cut off.

If a later step is there to go instead it waits ``NODE_AWAITED_S``.
"""

LEFT_BEHIND = "a restore of an older step left it behind"

Drained = Mapping[str, Collection[ShardId]]
"""Node -> the shards that it keeps on their way to the object store."""


def persist(
    run: Run,
    committed: Sequence[Checkpoint],
    evidence: Evidence,
    nodes: Mapping[str, Node],
    now_s: float,
) -> Outcome:
    """Return the run with drains begun and given up as the facts ask, and the news.

    Args:
        run: As the commit rule has left it.
        committed: Its rows that were not there before, in any order.
        evidence: Where copies lie.
        nodes: Who reported them, by name.
        now_s: The database's clock; it may have stepped back since the last call.
    """
    outcome = _give_up(_on_this_clock(run, now_s), evidence, nodes, now_s)
    run, events = outcome.run, list(outcome.events)
    rule = run.current.spec.persist if run.current else PersistRule()
    if not rule.on:
        return Outcome(run=replace(run, persist_owed=False), events=tuple(events))
    for row in _candidates(run, committed, evidence):
        if not (run.persist_owed or due(rule, run, row.id.step, now_s)):
            continue
        if not run.drains:
            run = begin(run, row, shards_of(evidence.live[row.id]), now_s)
        elif not run.persist_owed:
            run = replace(run, persist_owed=True)
            events.append(_postponed(run, row))
    return Outcome(run=run, events=tuple(events))


def persist_off(run: Run) -> Outcome:
    """Return the run without drains: there is no object store any more, so none of them ends."""
    events = []
    for drain in run.drains:
        run = _end(run, drain.checkpoint, None)
        events.append(_lost(run, drain, "the metadata service has no HOLDFAST_STORE"))
    return Outcome(run=run, events=tuple(events))


def stop(run: Run, key: CheckpointId) -> Outcome:
    """Return the run without the drain of ``key``, as a user asked; the next due step goes."""
    events = [
        _lost(run, drain, "it was removed by hand")
        for drain in run.drains
        if drain.checkpoint == key
    ]
    return Outcome(run=_end(run, key, None), events=tuple(events))


def without_left(run: Run) -> Outcome:
    """Return the run without drains of what was left behind, which no worker may end (M6)."""
    left = [drain for drain in run.drains if not run.usable(drain.checkpoint)]
    for drain in left:
        run = _end(run, drain.checkpoint, None)
    return Outcome(run=run, events=tuple(_lost(run, drain, LEFT_BEHIND) for drain in left))


def drained(run: Run, evidence: Evidence) -> Drained:
    """Return who keeps which shards on their way: of each shard one live holder does.

    Its owner, if that has it: its rank has a slot for what drains. Else the first holder by name,
    as long as nobody there wants the room.
    """
    found: dict[str, list[ShardId]] = {}
    for drain in run.drains:
        for key, item in sorted(evidence.live.get(drain.checkpoint, {}).items()):
            keeper = item.owner if item.owner in item.nodes else min(item.nodes)
            found.setdefault(keeper, []).append(key)
    return found


def due(rule: PersistRule, run: Run, step: int, now_s: float) -> bool:
    """Tell whether ``step``, just committed, is one that goes to the object store.

    It is the first at or after a multiple of ``steps``, ``seconds`` have gone by, or it pays off.
    """
    by_step = rule.steps > 0 and run.persisted_step // rule.steps < step // rule.steps
    by_time = 0 < rule.seconds <= now_s - run.persisted_at_s
    return by_step or by_time or drain_interval.due(rule, run, now_s)


def begin(run: Run, row: Checkpoint, shards: Sequence[Shard], now_s: float) -> Run:
    """Return the run with ``row`` draining: every one of ``shards`` is to go."""
    changed = replace(row, drain_at_s=now_s)
    return replace(
        run,
        checkpoints=tuple(changed if one.id == row.id else one for one in run.checkpoints),
        drains=(*run.drains, Drain(checkpoint=row.id, missing=tuple(shards))),
        persisted_step=max(run.persisted_step, row.id.step),
        persisted_at_s=now_s,
        persist_owed=False,
    )


def finish(run: Run, key: CheckpointId, now_s: float) -> Run:
    """Return the run with ``key`` durable and no longer draining."""
    return _end(run, key, now_s)


def rewind(run: Run, step: int) -> Run:
    """Return the run after a restore of ``step``: later steps become due again."""
    return replace(run, persisted_step=min(run.persisted_step, step))


def _end(run: Run, key: CheckpointId, durable_at_s: float | None) -> Run:
    return replace(
        run,
        checkpoints=tuple(
            replace(row, drain_at_s=None, durable_at_s=row.durable_at_s or durable_at_s)
            if row.id == key
            else row
            for row in run.checkpoints
        ),
        drains=tuple(drain for drain in run.drains if drain.checkpoint != key),
    )


def _on_this_clock(run: Run, now_s: float) -> Run:
    """Return the run without a time of the future: a clock that stepped back stops nothing."""
    return replace(run, persisted_at_s=min(run.persisted_at_s, now_s))


def _candidates(
    run: Run, committed: Sequence[Checkpoint], evidence: Evidence
) -> Sequence[Checkpoint]:
    """Return what may begin to drain, oldest first: the newly committed, or the one postponed.

    That one is the newest there is, so that a run's last step goes too. A copy that comes back
    may make a row of a step older than the last one that went: that is none of them.
    """
    mine = [
        row
        for row in run.checkpoints
        if row.id.generation == run.generation
        and row.durable_at_s is None
        and not row.draining
        and run.usable(row.id)
        and whole(evidence.live.get(row.id, {}))
    ]
    new = {row.id for row in committed}
    later = (row for row in mine if row.id in new and row.id.step > run.persisted_step)
    fresh = sorted(later, key=lambda row: row.id)
    if fresh or not run.persist_owed or run.drains:
        return fresh
    newest = max((row.id for row in run.checkpoints if run.usable(row.id)), default=None)
    return [row for row in mine if row.id == newest]


def _give_up(run: Run, evidence: Evidence, nodes: Mapping[str, Node], now_s: float) -> Outcome:
    """Return the run without drains that cannot end; a lost one is postponed again."""
    if not run.drains:
        return Outcome(run=run)
    events = []
    for drain in run.drains:
        left_behind = not run.usable(drain.checkpoint)
        held = evidence.known.get(drain.checkpoint, {})
        another = _is_owed_a_later_one(run, drain.checkpoint, evidence)
        there = {
            node.name
            for node in nodes.values()
            if (awaited(node, now_s) if another else _awaited_long(node, now_s))
        }
        gone = [shard for shard in drain.missing if not _held(held.get(shard.id), shard, there)]
        if left_behind or gone:
            run = replace(_end(run, drain.checkpoint, None), persist_owed=not left_behind)
            why = LEFT_BEHIND
            if not left_behind:
                why = f"no node that is there holds {gone[0].id.key} any more"
            events.append(_lost(run, drain, why))
    return Outcome(run=run, events=tuple(events))


def _is_owed_a_later_one(run: Run, key: CheckpointId, evidence: Evidence) -> bool:
    """Tell whether a step after ``key`` was to go as well, and one is whole and there to go."""
    later = (row.id for row in run.checkpoints if row.id > key and run.usable(row.id))
    return run.persist_owed and any(whole(evidence.live.get(one, {})) for one in later)


def _awaited_long(node: Node, now_s: float) -> bool:
    """Tell whether the node lives or was lost less than ``HOLDER_AWAY_S_MAX`` ago."""
    return max(node.lease_until_s, node.reported_at_s) + HOLDER_AWAY_S_MAX > now_s


def _held(copies: ShardCopies | None, shard: Shard, there: set[str]) -> bool:
    return copies is not None and copies.shard == shard and not there.isdisjoint(copies.nodes)


def _postponed(run: Run, row: Checkpoint) -> Event:
    return Event(
        kind="persist_postponed",
        severity="warning",
        message=f"step {row.id.step} of {run.job} should go to the object store, but step "
        f"{run.drains[0].checkpoint.step} is still being uploaded: a later step goes instead",
        job=run.job,
        context={"run": run.id, "step": str(row.id.step), "attempt": str(row.id.generation)},
    )


def _lost(run: Run, drain: Drain, why: str) -> Event:
    key = drain.checkpoint
    return Event(
        kind="persist_lost",
        severity="warning",
        message=f"step {key.step} of {run.job} will not become durable: {why}",
        job=run.job,
        context={"run": run.id, "step": str(key.step), "attempt": str(key.generation)},
    )
