"""What users and retention do to durable checkpoints: pins, reads, expiry, lists for people.

Whoever pins, reads or expires holds the job's row: of two at once the second sees what the first
has done. The statements ask again, so that no caller who forgets it can delete what is held.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import and_, case, delete, exists, func, select, update

from holdfast.core.ids import CheckpointId
from holdfast_services.metadata import tables as t
from holdfast_services.metadata.domain.holds import Listed
from holdfast_services.metadata.storage.base import checkpoint_id, is_of, key_of
from holdfast_services.metadata.storage.checkpoints import (
    NEWEST_FIRST,
    CheckpointStatements,
    checkpoint_of,
)
from holdfast_services.metadata.storage.objects import bad_shards, same_checkpoint

_ALL = 1 << 31
_C, _R = t.checkpoints.c, t.runs.c
_POLICED = (
    select(_R.job, _R.run, _R.retention, _R.rules, func.count(), func.max(_C.durable_at_s))
    .join(t.checkpoints, _C.run == _R.run)
    .where(_R.retention.is_not(None), _C.durable_at_s.is_not(None))
    .group_by(_R.job, _R.run, _R.retention, _R.rules)
)


@dataclass(frozen=True, slots=True)
class Read:
    """A lease on a checkpoint while a reader reads it from the object store."""

    id: str
    checkpoint: CheckpointId
    holder: str
    until_s: float


@dataclass(frozen=True, slots=True)
class Policed:
    """A run with a retention policy; ``state`` changes when the policy's verdicts may have."""

    job: str
    run: str
    state: tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TierCounts:
    """Figures of the object tier.

    ``draining_since_s`` is when the oldest drain began, ``scrubbed_since_s`` when what was read
    back longest ago was; 0 each: nothing drains, something never was.
    """

    durable: int
    durable_bytes: int
    draining: int
    draining_since_s: float
    draining_stored_bytes: int
    draining_bytes: int
    expired: int
    bad: int
    scrub_asked: int
    scrubbed_since_s: float


class HoldStatements(CheckpointStatements):
    """Pins, reads and expiry of what lies in the object store."""

    # -- lists ---------------------------------------------------------------------------------

    def listed(
        self,
        run: str,
        now_s: float,
        *,
        below: tuple[int, int] | None = None,
        step: int | None = None,
        durable: bool = False,
        limit: int = _ALL,
    ) -> Sequence[Listed]:
        """Return rows of a run, newest first, with their pins and readers; a plain read.

        Args:
            run: Whose.
            now_s: Leases that end later hold.
            below: Only those before this (step, generation).
            step: Only those of this step.
            durable: Only those of which something lies, or comes to lie, in the object store.
            limit: At most so many.
        """
        c, o = t.checkpoints.c, t.objects.c
        beside = t.checkpoints.outerjoin(t.objects, same_checkpoint(t.objects))
        sql = select(t.checkpoints, o.expired_at_s, o.bad, o.scrubbed_at_s, o.scrub_asked)
        sql = sql.select_from(beside).where(c.run == run).order_by(*NEWEST_FIRST).limit(limit)
        if below is not None:
            sql = sql.where(
                (c.step < below[0]) | ((c.step == below[0]) & (c.generation < below[1]))
            )
        if step is not None:
            sql = sql.where(c.step == step)
        if durable:
            sql = sql.where(c.durable_at_s.is_not(None) | c.drain_at_s.is_not(None))
        rows = self._db.execute(sql).mappings().all()
        pins, reads, stored = self._pin_notes(run), self._readers(run, now_s), self._progress(run)
        found = []
        for row in rows:
            checkpoint = checkpoint_of(row)
            found.append(
                Listed(
                    row=checkpoint,
                    expired_at_s=row["expired_at_s"],
                    scrubbed_at_s=row["scrubbed_at_s"],
                    scrub_asked=bool(row["scrub_asked"]),
                    bad=bad_shards(row) if checkpoint.bad else (),
                    pin=pins.get(checkpoint.id),
                    readers=tuple(reads.get(checkpoint.id, ())),
                    stored_shards=stored.get(checkpoint.id, 0) if checkpoint.draining else None,
                )
            )
        return found

    def _pin_notes(self, run: str) -> Mapping[CheckpointId, str]:
        p = t.user_pins.c
        rows = self._db.execute(select(p.step, p.generation, p.note).where(p.run == run))
        return {checkpoint_id(run, step, generation): note for step, generation, note in rows}

    def _readers(self, run: str, now_s: float) -> Mapping[CheckpointId, Sequence[str]]:
        r = t.reads.c
        sql = select(r.step, r.generation, r.holder).where(r.run == run, r.until_s > now_s)
        found: dict[CheckpointId, list[str]] = {}
        for step, generation, holder in self._db.execute(sql.order_by(r.holder)):
            found.setdefault(checkpoint_id(run, step, generation), []).append(holder)
        return found

    def _progress(self, run: str) -> Mapping[CheckpointId, int]:
        d = t.drains.c
        sql = select(d.step, d.generation, func.count(d.done_at_s)).where(d.run == run)
        rows = self._db.execute(sql.group_by(d.step, d.generation))
        return {checkpoint_id(run, step, generation): done for step, generation, done in rows}

    def policed(self) -> Sequence[Policed]:
        """Return the runs with a policy; a plain read."""
        rows = self._db.execute(_POLICED)
        return [Policed(job, run, tuple(state)) for job, run, *state in rows]

    # -- pins and reads ------------------------------------------------------------------------

    def put_pin(self, key: CheckpointId, note: str, now_s: float) -> None:
        """Pin a checkpoint, or change the note of its pin. Under the job's lock."""
        row = {**key_of(key), "note": note, "at_s": now_s}
        sql = self._insert(t.user_pins).values(row)
        same = ["run", "step", "generation"]
        self._db.execute(sql.on_conflict_do_update(index_elements=same, set_={"note": note}))

    def drop_pin(self, key: CheckpointId) -> bool:
        """Take a user's pin away; False: there was none."""
        return self._db.execute(delete(t.user_pins).where(is_of(t.user_pins, key))).rowcount == 1

    def put_read(self, read: Read) -> None:
        """Begin a lease. Under the job's lock."""
        row = {"id": read.id, "holder": read.holder, "until_s": read.until_s}
        self._db.execute(self._insert(t.reads).values({**row, **key_of(read.checkpoint)}))

    def read_lease(self, number: str) -> Read | None:
        """Return a lease, over or not; a plain read."""
        row = self._db.execute(select(t.reads).where(t.reads.c.id == number)).mappings().first()
        if row is None:
            return None
        key = checkpoint_id(row["run"], row["step"], row["generation"])
        return Read(number, key, row["holder"], row["until_s"])

    def renew_read(self, number: str, now_s: float, until_s: float) -> bool:
        """Extend a lease; False: it has ended, and its checkpoint may be deleted."""
        r = t.reads.c
        sql = update(t.reads).where(r.id == number, r.until_s > now_s).values(until_s=until_s)
        return self._db.execute(sql).rowcount == 1

    def drop_read(self, number: str) -> bool:
        """End a lease; False: there is none."""
        return self._db.execute(delete(t.reads).where(t.reads.c.id == number)).rowcount == 1

    def reads_count(self, run: str, now_s: float) -> int:
        """Return how many leases on the run's checkpoints hold; those that are over are deleted."""
        self._db.execute(delete(t.reads).where(t.reads.c.until_s <= now_s))
        sql = select(func.count()).select_from(t.reads).where(t.reads.c.run == run)
        return int(self._db.execute(sql).scalar_one())

    # -- expiry --------------------------------------------------------------------------------

    def expire(self, key: CheckpointId, now_s: float) -> bool:
        """Mark a durable checkpoint for deletion; False: it is pinned or being read.

        Pins, reads, restores and drains are asked in the statement itself (4.7). From here on no
        restore chooses it, and nobody can pin or read it any more.
        """
        held = [exists().where(is_of(table, key)) for table in (t.pins, t.user_pins, t.drains)]
        held.append(exists().where(is_of(t.reads, key), t.reads.c.until_s > now_s))
        row = and_(is_of(t.objects, key), t.objects.c.expired_at_s.is_(None))
        sql = update(t.objects).where(row, *(~one for one in held)).values(expired_at_s=now_s)
        return self._db.execute(sql).rowcount == 1

    def ask_scrubs(self, run: str) -> int:
        """Ask for a scrub of all checkpoints of a run that are not expired; return how many."""
        o = t.objects.c
        sql = update(t.objects).where(o.run == run, o.expired_at_s.is_(None))
        return self._db.execute(sql.values(scrub_asked=True)).rowcount

    def tier_counts(self) -> TierCounts:
        """Return figures of the whole object tier; a plain read."""
        c, o, d = t.checkpoints.c, t.objects.c, t.drains.c
        rows = self._db.execute(
            select(
                func.count(c.durable_at_s),
                func.sum(case((c.durable_at_s.is_not(None), c.length_bytes), else_=0)),
                func.count(c.drain_at_s),
                func.min(c.drain_at_s),
            )
        ).one()
        stored = case((d.done_at_s.is_not(None), d.length_bytes), else_=0)
        drains = self._db.execute(select(func.sum(stored), func.sum(d.length_bytes))).one()
        objects = self._db.execute(
            select(
                func.count(o.expired_at_s),
                func.sum(case((o.bad != "[]", 1), else_=0)),
                func.sum(case((o.scrub_asked.is_(True), 1), else_=0)),
                func.min(func.coalesce(o.scrubbed_at_s, 0.0)),
            )
        ).one()
        return TierCounts(
            durable=rows[0],
            durable_bytes=int(rows[1] or 0),
            draining=rows[2],
            draining_since_s=rows[3] or 0.0,
            draining_stored_bytes=int(drains[0] or 0),
            draining_bytes=int(drains[1] or 0),
            expired=objects[0],
            bad=int(objects[1] or 0),
            scrub_asked=int(objects[2] or 0),
            scrubbed_since_s=objects[3] or 0.0,
        )
