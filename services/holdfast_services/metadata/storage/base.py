"""What all statements share: the connection of one transaction, its clock, upserts, decoding."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Connection, Table, and_, bindparam

from holdfast.core.ids import CheckpointId, Generation, RunId, Step
from holdfast.core.inventory import Inventory
from holdfast.core.shard import Shard
from holdfast.errors import ConflictError
from holdfast_services.kit.db import Upsert, insert, now_s
from holdfast_services.metadata.domain.model import Run

INVENTORY_CACHE_NODES_MAX = 4096
SHARDS_CACHE_CHECKPOINTS_MAX = 64


class DecodeCache:
    """What this process has decoded, keyed by what identifies it: a hint that saves time only.

    Bounded: at the bound everything of a kind is forgotten.
    """

    def __init__(self) -> None:
        self._inventories: dict[str, tuple[tuple[int, int], Inventory]] = {}
        self._shards: dict[CheckpointId, tuple[bytes, tuple[Shard, ...]]] = {}

    def inventory(self, name: str, key: tuple[int, int]) -> Inventory | None:
        """Return the node's inventory of exactly this (incarnation, sequence), if it is here."""
        known = self._inventories.get(name)
        return known[1] if known and known[0] == key else None

    def put_inventory(self, name: str, inventory: Inventory) -> None:
        """Keep an inventory in place of the node's last one."""
        if len(self._inventories) >= INVENTORY_CACHE_NODES_MAX:
            self._inventories.clear()
        self._inventories[name] = ((inventory.incarnation, inventory.sequence), inventory)

    def shards(self, checkpoint: CheckpointId, digest: bytes) -> tuple[Shard, ...] | None:
        """Return the shards of a checkpoint, durable by the manifest with ``digest``.

        For one that drains, ``digest`` stands for the drain: any bytes that no other has.
        """
        known = self._shards.get(checkpoint)
        return known[1] if known and known[0] == digest else None

    def put_shards(
        self, checkpoint: CheckpointId, digest: bytes, shards: tuple[Shard, ...]
    ) -> None:
        """Keep the shards of a durable or draining checkpoint."""
        if len(self._shards) >= SHARDS_CACHE_CHECKPOINTS_MAX:
            self._shards.clear()
        self._shards[checkpoint] = (digest, shards)


class Statements:
    """A transaction's connection; its subclasses add the statements of one subject each."""

    def __init__(self, connection: Connection, cache: DecodeCache) -> None:
        self._db = connection
        self._cache = cache
        self.changes: list[tuple[Run, Run]] = []
        """The runs that were saved, as they were before and as they are after."""

    def now_s(self) -> float:
        """Return the database's clock: the only one that leases and decisions know."""
        return now_s(self._db)

    def _insert(self, table: Table) -> Any:
        return insert(table, self._db.dialect.name)

    def _put(self, statement: Upsert, rows: Any) -> int:
        """Insert or change a row, or a list of them; of one, return whether it was written."""
        return int(self._db.execute(statement[self._db.dialect.name], rows).rowcount)

    def _expect_one(self, count: int, run: Run) -> None:
        if count != 1:
            raise ConflictError("run changed under its lock", job=run.job, run=run.id)


def checkpoint_id(run: str, step: int, generation: int) -> CheckpointId:
    """Return the id that columns of a row hold."""
    return CheckpointId(RunId(run), Step(step), Generation(generation))


def key_of(checkpoint: CheckpointId) -> dict[str, Any]:
    """Return the columns that name a checkpoint, to insert."""
    return {
        "run": checkpoint.run,
        "step": checkpoint.step,
        "generation": checkpoint.generation,
    }


def is_named(table: Table) -> ColumnElement[bool]:
    """Return the condition that a row is of the checkpoint whose ``key_of`` the statement gets."""
    c = table.c
    return and_(
        c.run == bindparam("run"),
        c.step == bindparam("step"),
        c.generation == bindparam("generation"),
    )


def is_of(table: Table, checkpoint: CheckpointId) -> ColumnElement[bool]:
    """Return the condition that a row is of ``checkpoint``."""
    c = table.c
    return and_(
        c.run == checkpoint.run,
        c.step == checkpoint.step,
        c.generation == checkpoint.generation,
    )
