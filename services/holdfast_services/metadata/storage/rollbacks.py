"""Rollbacks that users asked for, one row each, and whether the object store has their record."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import RowMapping, bindparam, select, update

from holdfast.core.ids import CheckpointId
from holdfast_services.metadata import tables as t
from holdfast_services.metadata.domain.rollback import Rollback
from holdfast_services.metadata.storage.base import Statements, checkpoint_id

ROLLBACKS_PER_READ_MAX = 1000

_R = t.rollbacks.c
_ONE = select(t.rollbacks).where(_R.run == bindparam("run"), _R.generation == bindparam("of"))
_ALL = (
    select(t.rollbacks)
    .where(_R.run == bindparam("run"))
    .order_by(_R.generation.desc())
    .limit(ROLLBACKS_PER_READ_MAX)
)
_OWED = _ALL.where(_R.recorded.is_(False))
_RECORDED = update(t.rollbacks).where(
    _R.run == bindparam("of_run"), _R.generation == bindparam("under")
)


class RollbackStatements(Statements):
    """Statements about rollbacks: a row never changes, but for where it is recorded."""

    def put_rollback(self, rollback: Rollback) -> None:
        """Add a rollback; one of this generation that is known stays as it is."""
        row = {
            "run": rollback.to.run,
            "generation": rollback.generation,
            "step": rollback.to.step,
            "of_generation": rollback.to.generation,
            "at_s": rollback.at_s,
            "holder": rollback.holder,
            "reason": rollback.reason,
            "recorded": rollback.recorded,
        }
        self._db.execute(self._insert(t.rollbacks).values(row).on_conflict_do_nothing())

    def rollback(self, run: str, generation: int) -> Rollback | None:
        """Return the rollback that has this generation, or None; a plain read."""
        values = {"run": run, "of": generation}
        row = self._db.execute(_ONE, values).mappings().one_or_none()
        return _rollback(row) if row else None

    def rollbacks(self, run: str) -> Sequence[Rollback]:
        """Return the newest rollbacks of a run, newest first; a plain read."""
        return [_rollback(row) for row in self._db.execute(_ALL, {"run": run}).mappings()]

    def unrecorded_rollbacks(self, run: str) -> Sequence[Rollback]:
        """Return those of which the object store has no record yet; a plain read."""
        return [_rollback(row) for row in self._db.execute(_OWED, {"run": run}).mappings()]

    def note_recorded(self, run: str, generation: int) -> None:
        """Note that the object store has the record of a rollback."""
        which = {"of_run": run, "under": generation}
        self._db.execute(_RECORDED, {**which, "recorded": True})


def _rollback(row: RowMapping) -> Rollback:
    to: CheckpointId = checkpoint_id(row["run"], row["step"], row["of_generation"])
    return Rollback(
        to=to,
        generation=row["generation"],
        at_s=row["at_s"],
        holder=row["holder"],
        reason=row["reason"],
        recorded=row["recorded"],
    )
