"""How attempts began, one row each: with which code, from which checkpoint. For people only."""

from __future__ import annotations

from typing import Any

from sqlalchemy import RowMapping, bindparam, select, update

from holdfast.core.ids import CheckpointId
from holdfast.core.origin import Origin
from holdfast.rpc.codec import from_message, to_message
from holdfast.v1 import common_pb2 as common
from holdfast_services.kit.db import upsert
from holdfast_services.metadata import tables as t
from holdfast_services.metadata.domain.ancestry import Beginning
from holdfast_services.metadata.domain.model import Attempt
from holdfast_services.metadata.storage.base import Statements, checkpoint_id

_O = t.origins.c
_ONE = select(t.origins).where(_O.run == bindparam("run"), _O.generation == bindparam("of"))
_PUT = upsert(t.origins, ["run", "generation"], lambda new: {"body": new.body})
_PARENT = update(t.origins).where(
    _O.run == bindparam("of_run"), _O.generation == bindparam("of_attempt")
)


class OriginStatements(Statements):
    """Statements about how attempts began; a row changes when its rank 0, or its restore, is in."""

    def beginning(self, run: str, generation: int) -> Beginning | None:
        """Return how an attempt began, None: nobody knows; a plain read."""
        values = {"run": run, "of": generation}
        row = self._db.execute(_ONE, values).mappings().one_or_none()
        return _beginning(row) if row else None

    def put_attempt(self, run: str, attempt: Attempt) -> None:
        """Add how an attempt began, or what it was started with."""
        self._put_row(
            run,
            attempt.generation,
            attempt.spec.origin or Origin(),
            at_s=attempt.started_at_s,
            holder=attempt.spec.holder,
            world_size=attempt.spec.world_size,
        )

    def put_found(self, key: CheckpointId, origin: Origin, parent: CheckpointId | None) -> None:
        """Add what the bucket says of the attempt that saved ``key``, unless it is known."""
        if self.beginning(key.run, key.generation) is None:
            self._put_row(key.run, key.generation, origin)
            self.note_parent(key.run, key.generation, parent)

    def note_parent(self, run: str, generation: int, parent: CheckpointId | None) -> None:
        """Note what an attempt has restored."""
        values: dict[str, Any] = {
            "parent_step": parent.step if parent else None,
            "parent_generation": parent.generation if parent else None,
            "confirmed": True,
        }
        self._db.execute(_PARENT, {"of_run": run, "of_attempt": generation, **values})

    def _put_row(
        self,
        run: str,
        generation: int,
        origin: Origin,
        *,
        at_s: float | None = None,
        holder: str = "",
        world_size: int = 0,
    ) -> None:
        row = {
            "run": run,
            "generation": generation,
            "at_s": at_s,
            "holder": holder,
            "world_size": world_size,
            "confirmed": False,
            "body": to_message(origin, common.Origin).SerializeToString(),
        }
        self._put(_PUT, row)


def _beginning(row: RowMapping) -> Beginning:
    step, of = row["parent_step"], row["parent_generation"]
    return Beginning(
        generation=row["generation"],
        origin=from_message(common.Origin.FromString(row["body"]), Origin),
        at_s=row["at_s"],
        holder=row["holder"],
        world_size=row["world_size"],
        confirmed=row["confirmed"],
        parent=None if step is None else checkpoint_id(row["run"], step, of),
    )
