"""The catalogue in SQL: one named statement per method, with its promise under concurrency.

Every method works on the connection of one transaction (see ``kit.db``). Whoever changes a run
holds its job's row (``lock_job``), so that all decisions about a run are taken one after the
other whichever process takes them; conditions in the statements guard what must never change.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import (
    Connection,
    RowMapping,
    Table,
    and_,
    delete,
    exists,
    func,
    insert,
    select,
    text,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from holdfast.core.facts import (
    AbandonedStep,
    Decision,
    DecisionState,
    Event,
    Inventory,
    SupersedeRule,
)
from holdfast.core.ids import CheckpointId, Generation, RunId, Step
from holdfast.errors import ConflictError
from holdfast.rpc.codec import from_message, to_message
from holdfast.v1 import metadata_pb2 as pb
from holdfast_services.kit.db import is_sqlite
from holdfast_services.metadata import tables as t
from holdfast_services.metadata.domain.model import Attempt, Checkpoint, Node, RankFacts, Run

DECISIONS_PER_RUN_MAX = 16
EVENTS_MAX = 10_000
NODE_SILENT_S_MAX = 7 * 24 * 3600.0
INVENTORY_CACHE_NODES_MAX = 4096

_FINAL = (int(DecisionState.CONFIRMED), int(DecisionState.LOST))
_POSTGRES_NOW = text("SELECT extract(epoch FROM clock_timestamp())::float8")
_SQLITE_NOW = text("SELECT (julianday('now') - 2440587.5) * 86400.0")


class InventoryCache:
    """Decoded inventories by node; a hint that saves decoding, keyed by what identifies one."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[tuple[int, int], Inventory]] = {}

    def get(self, name: str, key: tuple[int, int]) -> Inventory | None:
        """Return the inventory of exactly this (incarnation, sequence), if it is here."""
        known = self._known.get(name)
        return known[1] if known and known[0] == key else None

    def put(self, name: str, inventory: Inventory) -> None:
        """Keep the inventory; at the bound everything is forgotten, which costs time only."""
        if len(self._known) >= INVENTORY_CACHE_NODES_MAX:
            self._known.clear()
        self._known[name] = ((inventory.incarnation, inventory.sequence), inventory)


class Catalogue:
    """The statements of one transaction."""

    def __init__(self, connection: Connection, cache: InventoryCache) -> None:
        self._db = connection
        self._cache = cache

    def now_s(self) -> float:
        """Return the database's clock: the only one that leases and decisions know."""
        sql = _SQLITE_NOW if is_sqlite(self._db) else _POSTGRES_NOW
        return float(self._db.execute(sql).scalar_one())

    # -- pulse ---------------------------------------------------------------------------------

    def pulse_s(self) -> float:
        """Return when a metadata process last said that it can write; 0 at the very first."""
        return float(self._db.execute(select(t.pulse.c.at_s)).scalar_one())

    def beat(self, before_s: float, now_s: float) -> bool:
        """Move the pulse from exactly ``before_s``; of several processes one succeeds."""
        sql = update(t.pulse).where(t.pulse.c.at_s == before_s).values(at_s=now_s)
        return self._db.execute(sql).rowcount == 1

    def extend_node_leases(self, since_s: float, until_s: float) -> None:
        """Give nodes whose lease held at ``since_s`` until ``until_s``; never shortens one."""
        n = t.nodes.c
        held = and_(n.lease_until_s >= since_s, n.lease_until_s < until_s)
        self._db.execute(update(t.nodes).where(held).values(lease_until_s=until_s))

    def extend_attempt_leases(self, since_s: float, until_s: float) -> None:
        """Give attempts whose lease held at ``since_s`` until ``until_s``; never shortens one."""
        a = t.attempts.c
        held = and_(a.lease_until_s >= since_s, a.lease_until_s < until_s)
        self._db.execute(update(t.attempts).where(held).values(lease_until_s=until_s))

    # -- jobs and runs -------------------------------------------------------------------------

    def add_job(self, job: str, run: str, now_s: float) -> None:
        """Create job and run unless there is one; of racing creators the first one wins."""
        row = {"name": job, "run": run, "created_at_s": now_s}
        created = self._db.execute(self._insert(t.jobs).values(row).on_conflict_do_nothing())
        if created.rowcount == 1:
            blank = {"announced_step": 0, "announced_at_s": 0.0, "rules": "[]", "abandoned": "[]"}
            self._db.execute(insert(t.runs).values(run=run, job=job, generation=0, **blank))

    def lock_job(self, job: str) -> str | None:
        """Return the job's run and hold its row to the end: one change of a run at a time."""
        sql = select(t.jobs.c.run).where(t.jobs.c.name == job).with_for_update()
        return self._db.execute(sql).scalar_one_or_none()

    def job_rows(self) -> Sequence[RowMapping]:
        """Return all jobs by name; a plain read."""
        return self._db.execute(select(t.jobs).order_by(t.jobs.c.name)).mappings().all()

    def active_jobs(self, since_s: float) -> Sequence[str]:
        """Return jobs with a lease after ``since_s`` or a restore being decided; a plain read."""
        newest = and_(
            t.attempts.c.run == t.runs.c.run, t.attempts.c.generation == t.runs.c.generation
        )
        deciding = exists().where(
            t.decisions.c.run == t.runs.c.run, t.decisions.c.state.not_in(_FINAL)
        )
        sql = (
            select(t.runs.c.job)
            .join(t.attempts, newest)
            .where((t.attempts.c.lease_until_s > since_s) | deciding)
        )
        return sorted(self._db.execute(sql).scalars())

    def run_of(self, job: str) -> str | None:
        """Return the job's run without a lock; a plain read."""
        return self._db.execute(
            select(t.jobs.c.run).where(t.jobs.c.name == job)
        ).scalar_one_or_none()

    def generation_of(self, job: str, nonce: bytes) -> int | None:
        """Return the generation that a nonce has; (job, nonce) is unique in the table."""
        a = t.attempts.c
        sql = select(a.generation).where(a.job == job, a.nonce == nonce)
        return self._db.execute(sql).scalar_one_or_none()

    def load_run(self, run: str) -> Run | None:
        """Return the run with its newest attempt; stable only while its job is locked."""
        row = self._db.execute(select(t.runs).where(t.runs.c.run == run)).mappings().one_or_none()
        if row is None:
            return None
        attempt = self._attempt(run)
        decision, rejected = self._decision(run)
        return Run(
            id=run,
            job=row["job"],
            generation=row["generation"],
            attempt=attempt,
            ranks=self._ranks(run, attempt.generation) if attempt else (),
            decision=decision,
            rejected=rejected,
            pins=self._pins(run),
            checkpoints=self.checkpoints(run),
            rules=tuple(
                SupersedeRule(after_step=a, below_generation=b) for a, b in json.loads(row["rules"])
            ),
            abandoned=tuple(
                AbandonedStep(run=run, step=step, generation=generation, reason=reason)
                for step, generation, reason in json.loads(row["abandoned"])
            ),
            announced_step=row["announced_step"],
            announced_at_s=row["announced_at_s"],
        )

    def save_run(self, before: Run, after: Run) -> None:
        """Write what differs. Under the job's lock; generation and final decisions never go back.

        Raises:
            ConflictError: somebody wrote without the lock; redo the transaction.
        """
        if before == after:
            return
        self._save_run_row(after)
        if after.attempt and after.attempt != before.attempt:
            self._save_attempt(after, after.attempt)
        if after.attempt and after.ranks != before.ranks:
            self._save_ranks(before, after, after.attempt.generation)
        if after.decision and after.decision != before.decision:
            self._save_decision(after, after.decision)
        self._save_pins(before, after)
        self._save_checkpoints(before, after)

    def _save_run_row(self, run: Run) -> None:
        """Replace the row unless its generation is higher by now."""
        values = {
            "generation": run.generation,
            "announced_step": run.announced_step,
            "announced_at_s": run.announced_at_s,
            "rules": json.dumps([[r.after_step, r.below_generation] for r in run.rules]),
            "abandoned": json.dumps([[s.step, s.generation, s.reason] for s in run.abandoned]),
        }
        r = t.runs.c
        sql = update(t.runs).where(r.run == run.id, r.generation <= run.generation)
        self._expect_one(self._db.execute(sql.values(values)).rowcount, run)

    # -- attempts ------------------------------------------------------------------------------

    def _attempt(self, run: str) -> Attempt | None:
        """Return the newest attempt; a plain read."""
        a = t.attempts.c
        sql = select(t.attempts).where(a.run == run).order_by(a.generation.desc()).limit(1)
        row = self._db.execute(sql).mappings().one_or_none()
        names = Attempt.__dataclass_fields__
        return Attempt(**{name: row[name] for name in names}) if row else None

    def _save_attempt(self, run: Run, attempt: Attempt) -> None:
        """Insert the attempt, or move its lease and cut; (job, nonce) is unique, so one wins."""
        row = {name: getattr(attempt, name) for name in Attempt.__dataclass_fields__}
        moving = {"lease_until_s": attempt.lease_until_s, "replicas_cut": attempt.replicas_cut}
        sql = self._insert(t.attempts).values(run=run.id, job=run.job, **row)
        self._db.execute(
            sql.on_conflict_do_update(index_elements=["run", "generation"], set_=moving)
        )

    def _ranks(self, run: str, generation: int) -> tuple[RankFacts, ...]:
        """Return the registered ranks of one attempt; a plain read."""
        r = t.attempt_ranks.c
        sql = select(t.attempt_ranks).where(r.run == run, r.generation == generation)
        rows = self._db.execute(sql.order_by(r.rank)).mappings()
        names = RankFacts.__dataclass_fields__
        return tuple(RankFacts(**{name: row[name] for name in names}) for row in rows)

    def _save_ranks(self, before: Run, after: Run, generation: int) -> None:
        """Upsert changed ranks and drop those of older attempts; under the job's lock."""
        r = t.attempt_ranks.c
        if before.attempt and before.attempt.generation != generation:
            self._db.execute(
                delete(t.attempt_ranks).where(r.run == after.id, r.generation < generation)
            )
        known = set(before.ranks) if before.generation == after.generation else set()
        changed = [rank for rank in after.ranks if rank not in known]
        if changed:
            sql = self._insert(t.attempt_ranks)
            names = ("node", "registered_at_s", "live", "ready_decision", "loaded")
            sql = sql.on_conflict_do_update(
                index_elements=["run", "generation", "rank"],
                set_={name: sql.excluded[name] for name in names},
            )
            fields = RankFacts.__dataclass_fields__
            rows = [{name: getattr(rank, name) for name in fields} for rank in changed]
            keys = {"run": after.id, "generation": generation}
            self._db.execute(sql, [{**keys, **row} for row in rows])

    # -- decisions and pins --------------------------------------------------------------------

    def _decision(self, run: str) -> tuple[Decision | None, tuple[CheckpointId, ...]]:
        """Return the newest decision and what was tried before it; a plain read."""
        d = t.decisions.c
        sql = select(d.body, d.rejected).where(d.run == run).order_by(d.number.desc()).limit(1)
        row = self._db.execute(sql).one_or_none()
        if row is None:
            return None, ()
        decision = from_message(pb.Decision.FromString(row.body), Decision)
        rejected = tuple(_checkpoint_id(run, *pair) for pair in json.loads(row.rejected))
        return decision, rejected

    def _save_decision(self, run: Run, decision: Decision) -> None:
        """Insert or change the decision of this number, unless it is confirmed or lost."""
        d = t.decisions.c
        values = {
            "state": int(decision.state),
            "body": to_message(decision, pb.Decision).SerializeToString(),
            "rejected": json.dumps([[key.step, key.generation] for key in run.rejected]),
        }
        sql = self._insert(t.decisions).values(run=run.id, number=decision.number, **values)
        changed = self._db.execute(
            sql.on_conflict_do_update(
                index_elements=["run", "number"], set_=values, where=d.state.not_in(_FINAL)
            )
        )
        self._expect_one(changed.rowcount, run)
        # Only the newest decision of a run is ever read; older open ones are closed with it.
        old = and_(d.run == run.id, d.number < decision.number)
        self._db.execute(
            update(t.decisions).where(old, d.state.not_in(_FINAL)).values(state=_FINAL[1])
        )
        self._db.execute(
            delete(t.decisions).where(
                d.run == run.id, d.number <= decision.number - DECISIONS_PER_RUN_MAX
            )
        )

    def _pins(self, run: str) -> tuple[CheckpointId, ...]:
        """Return what a restore holds; a plain read."""
        p = t.pins.c
        rows = self._db.execute(select(p.step, p.generation).where(p.run == run))
        return tuple(sorted(_checkpoint_id(run, *row) for row in rows))

    def _save_pins(self, before: Run, after: Run) -> None:
        """Add and remove pins; in the transaction of the decision that needs them."""
        p = t.pins.c
        for key in set(before.pins) - set(after.pins):
            gone = and_(p.run == key.run, p.step == key.step, p.generation == key.generation)
            self._db.execute(delete(t.pins).where(gone))
        for key in set(after.pins) - set(before.pins):
            row = {"run": key.run, "step": key.step, "generation": key.generation}
            self._db.execute(self._insert(t.pins).values(row).on_conflict_do_nothing())

    # -- checkpoints ---------------------------------------------------------------------------

    def checkpoints(self, run: str) -> tuple[Checkpoint, ...]:
        """Return the run's rows, newest first; a plain read."""
        c = t.checkpoints.c
        sql = select(t.checkpoints).where(c.run == run).order_by(c.step.desc(), c.generation.desc())
        return tuple(
            Checkpoint(
                id=_checkpoint_id(run, row["step"], row["generation"]),
                world_size=row["world_size"],
                plan_hash=row["plan_hash"],
                length_bytes=row["length_bytes"],
                local_at_s=row["local_at_s"],
                replicated_at_s=row["replicated_at_s"],
                durable_at_s=row["durable_at_s"],
            )
            for row in self._db.execute(sql).mappings()
        )

    def _save_checkpoints(self, before: Run, after: Run) -> None:
        """Add rows and levels; a level that is there keeps its time."""
        known = set(before.checkpoints)
        sql = self._insert(t.checkpoints)
        levels = {
            name: func.coalesce(t.checkpoints.c[name], sql.excluded[name])
            for name in ("replicated_at_s", "durable_at_s")
        }
        sql = sql.on_conflict_do_update(index_elements=["run", "step", "generation"], set_=levels)
        changed = [_checkpoint_row(row) for row in after.checkpoints if row not in known]
        if changed:
            self._db.execute(sql, changed)
        kept = {row.id for row in after.checkpoints}
        for row in before.checkpoints:
            if row.id not in kept:
                self.expire(row.id)

    def expire(self, key: CheckpointId) -> bool:
        """Delete a row unless it is pinned: the pin is asked in the statement itself (4.7)."""
        c, p = t.checkpoints.c, t.pins.c
        pinned = exists().where(p.run == c.run, p.step == c.step, p.generation == c.generation)
        row = and_(c.run == key.run, c.step == key.step, c.generation == key.generation)
        return self._db.execute(delete(t.checkpoints).where(row, ~pinned)).rowcount == 1

    # -- nodes ---------------------------------------------------------------------------------

    def nodes(self) -> Mapping[str, Node]:
        """Return every node as it last reported; decodes only what this process has not seen."""
        n = t.nodes.c
        found: dict[str, Node] = {}
        rows = self._db.execute(
            select(n.name, n.incarnation, n.sequence, n.reported_at_s, n.lease_until_s)
        ).all()
        for name, incarnation, sequence, reported_at_s, lease_until_s in rows:
            inventory = self._cache.get(name, (incarnation, sequence)) or self._inventory(name)
            found[name] = Node(
                inventory=inventory, reported_at_s=reported_at_s, lease_until_s=lease_until_s
            )
        return found

    def _inventory(self, name: str) -> Inventory:
        """Return one node's inventory; rows are replaced in place, so it is whole."""
        sql = select(t.nodes.c.inventory).where(t.nodes.c.name == name)
        message = pb.Inventory.FromString(self._db.execute(sql).scalar_one())
        inventory = from_message(message, Inventory)
        self._cache.put(name, inventory)
        return inventory

    def node_key(self, name: str) -> tuple[int, int, float] | None:
        """Return (incarnation, sequence, lease) of a node and hold its row to the end."""
        n = t.nodes.c
        sql = select(n.incarnation, n.sequence, n.lease_until_s).where(n.name == name)
        row = self._db.execute(sql.with_for_update()).one_or_none()
        return (row[0], row[1], row[2]) if row else None

    def put_inventory(self, inventory: Inventory, now_s: float, lease_until_s: float) -> bool:
        """Replace the node's row if (incarnation, sequence) is not lower; False: it was."""
        n, name = t.nodes.c, inventory.node.node
        body = to_message(inventory, pb.Inventory).SerializeToString()
        values = {
            "incarnation": inventory.incarnation,
            "sequence": inventory.sequence,
            "reported_at_s": now_s,
            "lease_until_s": lease_until_s,
            "lost": False,
            "inventory": body,
        }
        newer = (n.incarnation < inventory.incarnation) | (
            (n.incarnation == inventory.incarnation) & (n.sequence <= inventory.sequence)
        )
        sql = self._insert(t.nodes).values(name=name, **values)
        sql = sql.on_conflict_do_update(index_elements=["name"], set_=values, where=newer)
        return self._db.execute(sql).rowcount == 1

    def mark_lost(self, now_s: float) -> Sequence[str]:
        """Return nodes whose lease has run out since the last call; each is returned once."""
        n = t.nodes.c
        sql = update(t.nodes).where(n.lease_until_s <= now_s, n.lost.is_(False)).values(lost=True)
        return sorted(self._db.execute(sql.returning(n.name)).scalars())

    def forget_nodes(self, now_s: float) -> None:
        """Delete nodes silent for ``NODE_SILENT_S_MAX``; one that returns is simply new."""
        silent = t.nodes.c.lease_until_s < now_s - NODE_SILENT_S_MAX
        old = t.nodes.c.reported_at_s < now_s - NODE_SILENT_S_MAX
        self._db.execute(delete(t.nodes).where(silent, old))

    # -- events --------------------------------------------------------------------------------

    def add_events(self, events: Iterable[Event], node: str, now_s: float) -> None:
        """Append news; in the transaction of what they tell, so neither is without the other."""
        rows = [
            {
                "at_s": now_s,
                "kind": event.kind[:64],
                "severity": event.severity[:16],
                "message": event.message,
                "job": event.job[:128],
                "node": node,
                "context": json.dumps(dict(event.context), sort_keys=True),
            }
            for event in events
        ]
        if rows:
            self._db.execute(insert(t.events), rows)

    def events_after(self, number: int, limit: int) -> Sequence[RowMapping]:
        """Return events after ``number``, oldest first; late committers may be missed."""
        e = t.events.c
        sql = select(t.events).where(e.id > number).order_by(e.id).limit(limit)
        return self._db.execute(sql).mappings().all()

    def last_events(self, limit: int) -> Sequence[RowMapping]:
        """Return the newest events, newest first; a plain read."""
        sql = select(t.events).order_by(t.events.c.id.desc()).limit(limit)
        return self._db.execute(sql).mappings().all()

    def forget_events(self) -> None:
        """Delete all but the newest ``EVENTS_MAX``; harmless to repeat."""
        newest = select(func.max(t.events.c.id)).scalar_subquery()
        self._db.execute(delete(t.events).where(t.events.c.id <= newest - EVENTS_MAX))

    # ------------------------------------------------------------------------------------------

    def _insert(self, table: Table) -> Any:
        statement = sqlite.insert(table) if is_sqlite(self._db) else postgresql.insert(table)
        return statement.execution_options(preserve_rowcount=True)

    def _expect_one(self, count: int, run: Run) -> None:
        if count != 1:
            raise ConflictError("run changed under its lock", job=run.job, run=run.id)


def _checkpoint_id(run: str, step: int, generation: int) -> CheckpointId:
    return CheckpointId(RunId(run), Step(step), Generation(generation))


def _checkpoint_row(row: Checkpoint) -> dict[str, Any]:
    return {
        "run": row.id.run,
        "step": row.id.step,
        "generation": row.id.generation,
        "world_size": row.world_size,
        "plan_hash": row.plan_hash,
        "length_bytes": row.length_bytes,
        "local_at_s": row.local_at_s,
        "replicated_at_s": row.replicated_at_s,
        "durable_at_s": row.durable_at_s,
    }
