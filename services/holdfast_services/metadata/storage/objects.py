"""What lies in the object store for each durable checkpoint: its shards, and what is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import ColumnElement, RowMapping, Table, and_, delete, or_, select, update

from holdfast.core.ids import CheckpointId, Rank, ShardId
from holdfast.core.persistence_work import StoredShards
from holdfast.core.shard import Shard
from holdfast.rpc.codec import from_message, to_message
from holdfast.v1 import persistence_pb2 as pb
from holdfast_services.metadata import tables as t
from holdfast_services.metadata.domain.model import Stored
from holdfast_services.metadata.storage.base import (
    Statements,
    checkpoint_id,
    is_named,
    is_of,
    key_of,
)

TASKS_PER_READ_MAX = 1000

_OBJECT = select(*(column for column in t.objects.c if column.name != "body")).where(
    is_named(t.objects)
)


class ObjectStatements(Statements):
    """Statements about stored objects: one row per durable checkpoint, its shards decoded once."""

    def put_object(
        self, stored: Stored, *, manifest_digest: bytes, verified_at_s: float | None
    ) -> None:
        """Add the stored shards of a checkpoint, unless known; the caller writes its row.

        ``verified_at_s`` is when its bytes were last compared, None: not by this catalogue.
        """
        row: dict[str, Any] = {
            **key_of(stored.checkpoint),
            "manifest_digest": manifest_digest,
            "scrubbed_at_s": verified_at_s,
            "scrub_asked": False,
            "bad": "[]",
            "body": to_message(
                StoredShards(shards=stored.shards), pb.StoredShards
            ).SerializeToString(),
        }
        self._db.execute(self._insert(t.objects).values(row).on_conflict_do_nothing())

    def object_row(self, checkpoint: CheckpointId) -> RowMapping | None:
        """Return the stored object's row without its shards, or None; a plain read."""
        return self._db.execute(_OBJECT, key_of(checkpoint)).mappings().one_or_none()

    def stored(self, checkpoint: CheckpointId) -> Stored | None:
        """Return the stored shards of a checkpoint, or None; a plain read."""
        return next(iter(self._stored([checkpoint])), None)

    def _stored(self, checkpoints: Iterable[CheckpointId]) -> tuple[Stored, ...]:
        found = []
        for key in sorted(set(checkpoints), reverse=True):
            row = self.object_row(key)
            if row is not None:
                shards = self._cache.shards(key, row["manifest_digest"])
                shards = shards or self._shards(key, row["manifest_digest"])
                found.append(Stored(checkpoint=key, shards=shards, bad=bad_shards(row)))
        return tuple(found)

    def _shards(self, key: CheckpointId, digest: bytes) -> tuple[Shard, ...]:
        body = self._db.execute(select(t.objects.c.body).where(is_of(t.objects, key))).scalar_one()
        shards = from_message(pb.StoredShards.FromString(body), StoredShards).shards
        self._cache.put_shards(key, digest, shards)
        return shards

    def set_bad(self, checkpoint: CheckpointId, bad: Iterable[ShardId]) -> None:
        """Record which stored shards are damaged (none: all are intact). Under the job's lock."""
        text = json.dumps(sorted([key.rank, key.volume] for key in set(bad)))
        self._db.execute(update(t.objects).where(is_of(t.objects, checkpoint)).values(bad=text))

    def scrubbed(self, checkpoint: CheckpointId, now_s: float) -> None:
        """Record that the checkpoint was scrubbed and clear the request."""
        values = {"scrubbed_at_s": now_s, "scrub_asked": False}
        self._db.execute(update(t.objects).where(is_of(t.objects, checkpoint)).values(values))

    def ask_scrub(self, checkpoint: CheckpointId) -> bool:
        """Ask for a scrub now; False: the checkpoint is not in the store."""
        sql = update(t.objects).where(is_of(t.objects, checkpoint)).values(scrub_asked=True)
        return self._db.execute(sql).rowcount == 1

    def forget_object(self, checkpoint: CheckpointId, *, keep_row: bool) -> bool:
        """Delete the rows of an expired checkpoint; False: it is not expired.

        With ``keep_row`` it is in memory still, and has lost the level ``durable``.
        """
        gone = and_(is_of(t.objects, checkpoint), t.objects.c.expired_at_s.is_not(None))
        if self._db.execute(delete(t.objects).where(gone)).rowcount == 0:
            return False
        mine = is_of(t.checkpoints, checkpoint)
        if keep_row:
            self._db.execute(update(t.checkpoints).where(mine).values(durable_at_s=None))
        else:
            self._db.execute(delete(t.checkpoints).where(mine))
        return True

    # -- what is due ---------------------------------------------------------------------------

    def expired(self) -> Sequence[CheckpointId]:
        """Return expired checkpoints to collect, at most ``TASKS_PER_READ_MAX``; a plain read."""
        return [key for key, _ in self._tasks(t.objects.c.expired_at_s.is_not(None))]

    def to_scrub(self, before_s: float | None) -> Sequence[CheckpointId]:
        """Return checkpoints to scrub: asked for, or not scrubbed since ``before_s``; bounded."""
        o = t.objects.c
        due: list[ColumnElement[bool]] = [o.scrub_asked.is_(True)]
        if before_s is not None:
            due += [o.scrubbed_at_s.is_(None), o.scrubbed_at_s < before_s]
        return [key for key, _ in self._tasks(o.expired_at_s.is_(None), or_(*due))]

    def bad(self) -> Sequence[tuple[CheckpointId, tuple[ShardId, ...]]]:
        """Return damaged checkpoints that have not expired; bounded; a plain read."""
        return self._tasks(t.objects.c.expired_at_s.is_(None), t.objects.c.bad != "[]")

    def _tasks(
        self, *conditions: ColumnElement[bool]
    ) -> Sequence[tuple[CheckpointId, tuple[ShardId, ...]]]:
        o = t.objects.c
        sql = select(o.run, o.step, o.generation, o.bad).where(*conditions)
        rows = self._db.execute(sql.limit(TASKS_PER_READ_MAX)).mappings()
        return [(checkpoint_id(r["run"], r["step"], r["generation"]), bad_shards(r)) for r in rows]


def bad_shards(row: RowMapping) -> tuple[ShardId, ...]:
    """Return the shards that a row of ``objects`` calls bad."""
    return tuple(
        ShardId(row["run"], row["step"], row["generation"], Rank(rank), volume)
        for rank, volume in json.loads(row["bad"])
    )


def same_checkpoint(table: Table) -> ColumnElement[bool]:
    """Return the condition that a row of ``table`` is of the row of ``checkpoints``."""
    c, o = t.checkpoints.c, table.c
    return and_(o.run == c.run, o.step == c.step, o.generation == c.generation)
