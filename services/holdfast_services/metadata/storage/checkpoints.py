"""Rows of checkpoints, and their drains: what is on its way to the object store.

A run has a bounded number of rows of what is in memory, and any number of durable ones, of which
a change of the run reads the few that can matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from sqlalchemy import (
    ColumnElement,
    RowMapping,
    Select,
    and_,
    bindparam,
    case,
    delete,
    exists,
    func,
    select,
    update,
)

from holdfast.core.ids import CheckpointId, Rank, ShardId
from holdfast.core.node_view import SupersedeRule
from holdfast.core.shard import Shard
from holdfast_services.kit.db import upsert
from holdfast_services.metadata import tables as t
from holdfast_services.metadata.domain.model import Checkpoint, Drain, Parent, Run, read_parent
from holdfast_services.metadata.storage.base import checkpoint_id, is_named, is_of, key_of
from holdfast_services.metadata.storage.objects import ObjectStatements, same_checkpoint

DURABLE_ROWS_IN_RUN_MAX = 8
STEPS_PER_READ_MAX = 500
CHOICES_KEPT_MAX = 256

NEWEST_FIRST = (t.checkpoints.c.step.desc(), t.checkpoints.c.generation.desc())


# Made once: a report reads a run by several of these, and making one costs more than running it.
_ROWS = (
    select(t.checkpoints, t.objects.c.expired_at_s, t.objects.c.bad)
    .select_from(t.checkpoints.outerjoin(t.objects, same_checkpoint(t.objects)))
    .order_by(*NEWEST_FIRST)
)
_IN_MEMORY = _ROWS.where(
    t.checkpoints.c.run == bindparam("run"), t.checkpoints.c.durable_at_s.is_(None)
)
_NAMED = _ROWS.where(is_named(t.checkpoints))
_OF_STEPS = _ROWS.where(
    t.checkpoints.c.run == bindparam("run"),
    t.checkpoints.c.step.in_(bindparam("steps", expanding=True)),
)
_FORGET = delete(t.checkpoints).where(
    t.checkpoints.c.run == bindparam("run"),
    t.checkpoints.c.step == bindparam("step"),
    t.checkpoints.c.generation == bindparam("generation"),
    t.checkpoints.c.durable_at_s.is_(None),
    t.checkpoints.c.drain_at_s.is_(None),
    ~exists().where(same_checkpoint(t.pins)).correlate(t.checkpoints),
    ~exists().where(same_checkpoint(t.user_pins)).correlate(t.checkpoints),
)
_OWN_DURABLE = _ROWS.where(
    t.checkpoints.c.run == bindparam("run"),
    t.checkpoints.c.durable_at_s.is_not(None),
    t.checkpoints.c.generation == bindparam("generation"),
).limit(DURABLE_ROWS_IN_RUN_MAX)
_D = t.drains.c
_DRAINING_RUNS = select(_D.run).distinct()
_OF_DRAIN = is_named(t.drains)
_END_DRAIN = delete(t.drains).where(_OF_DRAIN)
_OF_SHARD = and_(_OF_DRAIN, _D.rank == bindparam("rank"), _D.volume == bindparam("volume"))
_DRAIN = select(t.drains).where(_OF_DRAIN).order_by(_D.rank, _D.volume)
_DRAIN_SHARD = select(t.drains).where(_OF_SHARD)
_DRAIN_AWAITS = select(_D.rank, _D.volume).where(_OF_DRAIN, _D.done_at_s.is_(None))
_DRAIN_COUNTS = select(func.count(_D.done_at_s), func.count()).where(_OF_DRAIN)
_DRAIN_OF = select(t.runs.c.job, t.checkpoints.c.world_size).where(
    t.checkpoints.c.run == bindparam("run"),
    t.checkpoints.c.step == bindparam("step"),
    t.checkpoints.c.generation == bindparam("generation"),
    t.runs.c.run == t.checkpoints.c.run,
)
_NEWEST = (
    select(t.checkpoints.c.step, t.checkpoints.c.generation)
    .where(t.checkpoints.c.run == bindparam("run"))
    .order_by(*NEWEST_FIRST)
    .limit(1)
)
_WHOLE = and_(t.objects.c.expired_at_s.is_(None), t.objects.c.bad == "[]")
_DAMAGED = and_(t.objects.c.expired_at_s.is_(None), t.objects.c.bad != "[]")


def _added(new: Any) -> dict[str, ColumnElement[Any]]:
    """Return the new row's values for the columns that are NULL in the stored row."""
    c = t.checkpoints.c
    levels = ("copied_at_s", "replicated_at_s", "durable_at_s")
    return {
        **{name: func.coalesce(c[name], new[name]) for name in levels},
        "notes": func.coalesce(func.nullif(c.notes, ""), new.notes),
        "drain_at_s": new.drain_at_s,
    }


_PUT_CHECKPOINT = upsert(t.checkpoints, ["run", "step", "generation"], _added)


class CheckpointStatements(ObjectStatements):
    """Statements about checkpoints: levels are only added; drains have rows while they last."""

    def checkpoints(self, run: str) -> tuple[Checkpoint, ...]:
        """Return all rows of the run, newest first; a plain read."""
        return self._rows(t.checkpoints.c.run == run)

    def newest_key(self, run: str) -> CheckpointId | None:
        """Return the newest row's key, in any state; None: there is no row; a plain read."""
        row = self._db.execute(_NEWEST, {"run": run}).first()
        return checkpoint_id(run, *row) if row else None

    def stored_keys(self, run: str) -> Sequence[CheckpointId]:
        """Return all durable checkpoints, bad and expired ones too; a plain read."""
        c = t.checkpoints.c
        there = c.durable_at_s.is_not(None)
        rows = self._db.execute(select(c.step, c.generation).where(c.run == run, there))
        return [checkpoint_id(run, *row) for row in rows]

    def checkpoint(self, key: CheckpointId) -> Checkpoint | None:
        """Return one row; a plain read."""
        return next(iter(self._read(_NAMED, **key_of(key))), None)

    def durable(
        self, run: str, *conditions: ColumnElement[bool], limit: int
    ) -> Sequence[Checkpoint]:
        """Return the newest durable rows, neither expired nor bad; a plain read."""
        return self._durable(run, _WHOLE, *conditions, limit=limit)

    def _durable(
        self, run: str, *conditions: ColumnElement[bool], limit: int
    ) -> tuple[Checkpoint, ...]:
        c = t.checkpoints.c
        return self._rows(c.run == run, c.durable_at_s.is_not(None), *conditions, limit=limit)

    def _rows(
        self, *conditions: ColumnElement[bool], limit: int | None = None
    ) -> tuple[Checkpoint, ...]:
        return self._read(_ROWS.where(*conditions).limit(limit))

    def _read(self, sql: Select[Any], **values: object) -> tuple[Checkpoint, ...]:
        return tuple(map(checkpoint_of, self._db.execute(sql, values).mappings()))

    def _with_checkpoints(self, run: Run) -> Run:
        """Return the run with the rows, drains and objects that its invariants name."""
        c = t.checkpoints.c
        memory = self._read(_IN_MEMORY, run=run.id)
        mine = self._read(_OWN_DURABLE, run=run.id, generation=run.generation)
        whole, damaged = _choosable(run.rules, run.rejected)
        valid = self._read(whole, run=run.id)
        # A job of which only damaged objects are left is lost, not new.
        hurt = self._read(damaged, run=run.id) if run.deciding else ()
        chosen = run.decision.checkpoint if run.decision else None
        # Nor is one of which all was tried in vain.
        keys = dict.fromkeys((*((chosen,) if chosen else ()), *run.rejected))
        named = tuple(row for key in keys for row in self._read(_NAMED, **key_of(key)))
        start = run.attempt.spec.start if run.attempt and run.attempt.start_due else None
        if start and run.deciding:  # however old it is
            named += self._durable(run.id, c.step == start.step, limit=DURABLE_ROWS_IN_RUN_MAX)
        rows = {row.id: row for row in (*memory, *mine, *valid, *hurt, *named)}
        # Of a damaged one the rest is there: with what is in memory it may be whole.
        there = (row.id for row in (*valid, *hurt, *named) if row.durable_at_s and not row.expired)
        return replace(
            run,
            checkpoints=tuple(rows[key] for key in sorted(rows, reverse=True)),
            drains=tuple(self._drain(row) for row in memory if row.draining),
            stored=self._stored(there) if run.deciding or run.loading else (),
        )

    def with_rows(self, run: Run, keys: Iterable[CheckpointId]) -> Run:
        """Return the run with the rows of ``keys`` too, as far as there are any; a plain read."""
        known = {row.id for row in run.checkpoints}
        wanted = {key for key in keys if key.run == run.id} - known
        if not wanted:
            return run
        steps = sorted({key.step for key in wanted})
        found = list(run.checkpoints)
        for begin in range(0, len(steps), STEPS_PER_READ_MAX):
            some = steps[begin : begin + STEPS_PER_READ_MAX]
            rows = self._read(_OF_STEPS, run=run.id, steps=some)
            found += [row for row in rows if row.id in wanted]
        found.sort(key=lambda row: row.id, reverse=True)
        return replace(run, checkpoints=tuple(found))

    def _save_checkpoints(self, before: Run, after: Run) -> None:
        """Add rows and levels, begin and end drains; never overwrite the time of a level."""
        known = set(before.checkpoints)
        changed = [row for row in after.checkpoints if row not in known]
        self.put_checkpoints(changed)
        kept = {row.id for row in after.checkpoints}
        for row in before.checkpoints:
            if row.id not in kept:
                self.forget_checkpoint(row.id)
        draining = {drain.checkpoint for drain in after.drains}
        for drain in before.drains:
            if drain.checkpoint not in draining:
                self._db.execute(_END_DRAIN, key_of(drain.checkpoint))
        begun = {drain.checkpoint for drain in before.drains}
        for drain in after.drains:
            if drain.checkpoint not in begun:
                self._db.execute(self._insert(t.drains), _drain_rows(drain))

    def put_checkpoints(self, rows: Iterable[Checkpoint]) -> None:
        """Insert rows; on conflict fill in NULL columns and begin or end the drain."""
        values = [_checkpoint_row(row) for row in rows]
        if values:
            self._put(_PUT_CHECKPOINT, values)

    def forget_checkpoint(self, key: CheckpointId) -> bool:
        """Delete a memory row unless something holds it: the statement itself asks (4.7)."""
        return self._db.execute(_FORGET, key_of(key)).rowcount == 1

    # -- drains --------------------------------------------------------------------------------

    def draining(self) -> Sequence[CheckpointId]:
        """Return the draining checkpoints of all runs; a plain read."""
        d = t.drains.c
        sql = select(d.run, d.step, d.generation).distinct()
        return sorted(checkpoint_id(*row) for row in self._db.execute(sql))

    def drain_shard(self, key: ShardId) -> tuple[Shard, bool] | None:
        """Return the shard to be stored and whether it is stored; None: no such drain."""
        values = {**key_of(key.checkpoint), "rank": key.rank, "volume": key.volume}
        rows = self._db.execute(_DRAIN_SHARD, values).mappings().all()
        shards = self._drain_shards(rows, key.checkpoint)
        return (shards[0], rows[0]["done_at_s"] is not None) if shards else None

    def draining_runs(self) -> Sequence[str]:
        """Return the runs that have a draining checkpoint; a plain read."""
        return sorted(self._db.execute(_DRAINING_RUNS).scalars())

    def drained_shards(self, key: CheckpointId) -> tuple[Shard, ...]:
        """Return all shards of a draining checkpoint, uploaded or not, sorted; a plain read."""
        return self._drain_shards(self._db.execute(_DRAIN, key_of(key)).mappings().all(), key)

    def drain_done(self, shard: Shard, now_s: float) -> bool:
        """Mark this shard as uploaded; False: no drain waits for it, or its digest differs."""
        sql = update(t.drains).where(_is_shard(shard.id), t.drains.c.done_at_s.is_(None))
        sql = sql.where(t.drains.c.root_digest == shard.root_digest).values(done_at_s=now_s)
        return self._db.execute(sql).rowcount == 1

    def drain_again(self, key: ShardId) -> bool:
        """Mark a shard of a drain as not uploaded; False: it was not marked as uploaded."""
        sql = update(t.drains).where(_is_shard(key), t.drains.c.done_at_s.is_not(None))
        return self._db.execute(sql.values(done_at_s=None)).rowcount == 1

    def drain_counts(self, key: CheckpointId) -> tuple[int, int]:
        """Return (shards uploaded, shards not uploaded yet); (0, 0): nothing drains."""
        done, total = self._db.execute(_DRAIN_COUNTS, key_of(key)).one()
        return done, total - done

    def _drain(self, row: Checkpoint) -> Drain:
        """Return the row's drain; its shards never change, so only what is missing is read."""
        began = f"drain {row.drain_at_s!r}".encode()
        shards = self._cache.shards(row.id, began)
        if shards is None:
            shards = self.drained_shards(row.id)
            self._cache.put_shards(row.id, began, shards)
        awaited = self._db.execute(_DRAIN_AWAITS, key_of(row.id))
        missing = {(rank, volume) for rank, volume in awaited}
        return Drain(
            checkpoint=row.id,
            missing=tuple(s for s in shards if (s.id.rank, s.id.volume) in missing),
        )

    def _drain_shards(self, rows: Sequence[RowMapping], key: CheckpointId) -> tuple[Shard, ...]:
        one = self._db.execute(_DRAIN_OF, key_of(key)).one_or_none()
        if one is None:
            return ()
        return tuple(
            Shard(
                id=ShardId(key.run, key.step, key.generation, Rank(row["rank"]), row["volume"]),
                job=one.job,
                world_size=one.world_size,
                plan_hash=row["plan_hash"],
                length_bytes=row["length_bytes"],
                root_digest=row["root_digest"],
            )
            for row in rows
        )

    def forget_memory(self) -> None:
        """Delete all that is in memory only, drains and pins with it; durable rows stay."""
        c = t.checkpoints.c
        self._db.execute(delete(t.drains))
        self._db.execute(delete(t.pins))
        self._db.execute(delete(t.checkpoints).where(c.durable_at_s.is_(None)))
        lost = exists().where(same_checkpoint(t.user_pins)).correlate(t.user_pins)
        self._db.execute(delete(t.user_pins).where(~lost))


@lru_cache(CHOICES_KEPT_MAX)
def _choosable(
    rules: tuple[SupersedeRule, ...], rejected: tuple[CheckpointId, ...]
) -> tuple[Select[Any], Select[Any]]:
    """Return the statements for what a restore may choose and is whole, and for what is not.

    They change with an attempt, not with a save.
    """
    mine = (t.checkpoints.c.run == bindparam("run"), t.checkpoints.c.durable_at_s.is_not(None))
    vain = [~is_of(t.checkpoints, key) for key in rejected]
    durable = _ROWS.where(*mine, *_not_left_behind(rules), *vain)
    return durable.where(_WHOLE).limit(DURABLE_ROWS_IN_RUN_MAX), durable.where(_DAMAGED).limit(1)


def _not_left_behind(rules: Sequence[SupersedeRule]) -> Sequence[ColumnElement[bool]]:
    """Return the condition that no rule covers a row.

    By rising generations (see ``lines``) the first that speaks of a generation is the strictest.
    One CASE of any length: a chain of ANDs is as deep as it is long, and SQLite has a limit for
    that.
    """
    c = t.checkpoints.c
    limits = [
        (
            and_(c.generation >= rule.from_generation, c.generation < rule.below_generation),
            rule.after_step,
        )
        for rule in rules
    ]
    return [c.step <= case(*limits, else_=c.step)] if limits else []


def _is_shard(key: ShardId) -> ColumnElement[bool]:
    d = t.drains.c
    return and_(is_of(t.drains, key.checkpoint), d.rank == key.rank, d.volume == key.volume)


def checkpoint_of(row: RowMapping) -> Checkpoint:
    """Return the checkpoint that a row of ``checkpoints``, beside that of ``objects``, holds."""
    key = checkpoint_id(row["run"], row["step"], row["generation"])
    return Checkpoint(
        id=key,
        world_size=row["world_size"],
        plan_hash=row["plan_hash"],
        length_bytes=row["length_bytes"],
        local_at_s=row["local_at_s"],
        copied_at_s=row["copied_at_s"],
        replicated_at_s=row["replicated_at_s"],
        durable_at_s=row["durable_at_s"],
        drain_at_s=row["drain_at_s"],
        notes=row["notes"],
        parent=_parent(key, row["parent_step"], row["parent_generation"]),
        expired=row["expired_at_s"] is not None,
        bad=row["bad"] not in (None, "[]"),
    )


def _parent(key: CheckpointId, step: int | None, generation: int) -> Parent:
    written = None if step is None else checkpoint_id(key.run, step, generation)
    return read_parent(key, written)


def _checkpoint_row(row: Checkpoint) -> dict[str, Any]:
    parent = row.written_parent
    return {
        **key_of(row.id),
        "world_size": row.world_size,
        "plan_hash": row.plan_hash,
        "length_bytes": row.length_bytes,
        "local_at_s": row.local_at_s,
        "copied_at_s": row.copied_at_s,
        "replicated_at_s": row.replicated_at_s,
        "durable_at_s": row.durable_at_s,
        "drain_at_s": row.drain_at_s,
        "notes": row.notes,
        "parent_step": parent.step if parent else None,
        "parent_generation": parent.generation if parent else None,
    }


def _drain_rows(drain: Drain) -> list[dict[str, Any]]:
    return [
        {
            **key_of(drain.checkpoint),
            "rank": shard.id.rank,
            "volume": shard.id.volume,
            "length_bytes": shard.length_bytes,
            "root_digest": shard.root_digest,
            "plan_hash": shard.plan_hash,
            "done_at_s": None,
        }
        for shard in drain.missing
    ]
