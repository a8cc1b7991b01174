"""Writes what DCP saves into the memory of the node's agent: each rank the segment of its own.

The values of all ranks are known to the coordinator alone, and to it only once all have written.
So it saves its own segment last, in ``finish``, with the text: till then no step can be committed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from torch.distributed import distributed_c10d
from torch.distributed.checkpoint import metadata as of_dcp
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from holdfast.errors import (
    CheckpointError,
    ConflictError,
    InvalidRequestError,
    PreconditionError,
)
from holdfast.format.tree import Json
from holdfast.integrations.dcp.items import Items, check_names, items_of, tree_of, values_of
from holdfast.integrations.dcp.places import Path
from holdfast.integrations.planned_job import PlannedJob, check_grows, step_in

STEP = "holdfast.step"


@dataclass(slots=True)
class _Save:
    """The save that goes on now.

    ``together``: ranks exchange their plans. ``last``: this segment is written in ``finish``.
    ``writes``: the step is a new one, and this rank has begun to write it.
    """

    step: int | None
    together: bool
    last: bool
    items: Items | None = None
    writes: bool = False


class JobWriter(StorageWriter):
    """The ``storage_writer`` of a job: one object for all its saves, one after the other."""

    def __init__(self, job: PlannedJob) -> None:
        super().__init__()
        self.checkpoint_id: str | None = None
        self._job = job
        self._held_bytes = 0
        self._begun = self._told_newest = job.newest
        self._save: _Save | None = None

    def __getstate__(self) -> NoReturn:
        raise InvalidRequestError(
            "a job belongs to one process: save with AsyncCheckpointerType.THREAD, not PROCESS"
        )

    def reset(self, checkpoint_id: Path | None = None) -> None:
        """Take the id of the next save; it counts for that one alone."""
        self.checkpoint_id = None if checkpoint_id is None else os.fspath(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path) -> bool:
        """Tell that any id will do: of it the number at its end counts."""
        del checkpoint_id
        return True

    def storage_meta(self) -> of_dcp.StorageMeta:
        """Return the id of the save that begins."""
        return of_dcp.StorageMeta(checkpoint_id=self.checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a save; give up one that has ended without ``finish``.

        Raises:
            PreconditionError: the job's checkpoint was not loaded, or the step is no new one.
            InvalidRequestError: ranks save without each other and nobody says which step it is.
        """
        del args
        self.give_up_unfinished()
        asked, self.checkpoint_id = step_in(self.checkpoint_id), None
        self._job.begin()
        together = bool(kwargs.get("use_collectives", True))
        if together and is_coordinator != (self._job.place.rank == 0):
            raise InvalidRequestError(
                "a job is saved by all its ranks, over a process group in which they have the "
                "numbers of the launch: leave out no_dist and process_group, or give each rank a "
                "job of its own",
            )
        if not together and asked is None:
            raise InvalidRequestError(
                "use_collectives=False: give the save a checkpoint_id that ends in its step"
            )
        self._save = _Save(asked, together, last=is_coordinator or not together)
        if is_coordinator:
            # Not after what was begun here: another rank may have begun what has failed here.
            step = self._told_newest + 1 if asked is None else asked
            self._save.step, self._told_newest = step, max(self._told_newest, step)
            self._tell(step)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is; an empty one says that all is as at the last save.

        Raises:
            InvalidRequestError: a name that Holdfast needs for itself.
        """
        check_names(plan)
        if plan.usable:
            sizes = [item.tensor_storage_size() or 0 for item in plan.items]
            self._held_bytes = sum(sizes)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans as they are.

        Raises:
            InvalidRequestError: they are not those of all ranks of the job.
        """
        save = self._require_save()
        ranks = self._job.place.world_size
        if save.together and len(plans) != ranks:
            raise InvalidRequestError(f"{len(plans)} of the job's {ranks} ranks save: all must")
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Save this rank's segment, if it is not to be written last.

        Raises:
            CheckpointError: it cannot be saved; then no rank's is.
        """
        save = self._require_save()
        if save.step is None:
            save.step = self._told()
        check_grows(save.step, self._begun)
        self._begun, save.writes = save.step, True
        with self._given_up_by_errors(save.step):
            save.items = items = items_of(plan, planner)
        if not save.last:
            self._write(save, {})
        results = [*items.results, WriteResult(of_dcp.MetadataIndex(STEP), 0, save.step)]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: of_dcp.Metadata, results: list[list[WriteResult]]) -> None:
        """Save the last segment, with the text, and wait for the commit.

        Raises:
            ConflictError: ranks have saved different steps.
            CheckpointError: it cannot be saved, or will not be committed.
        """
        save = self._require_save()
        told = [result for of_rank in results for result in of_rank]
        assert save.step is not None
        with self._given_up_by_errors(save.step):
            self._check_same(save.step, told)
            tree = tree_of(metadata, values_of(told))
        self._write(save, tree)
        self._save = None
        self._job.await_commit()

    def _write(self, save: _Save, tree: dict[str, Json]) -> None:
        assert save.step is not None
        assert save.items is not None
        tensors, save.items = save.items.tensors, None
        self._job.save(save.step, tensors, tree, held_bytes=self._held_bytes)

    @staticmethod
    def _check_same(step: int, told: list[WriteResult]) -> None:
        steps = {result.storage_data for result in told if result.index.fqn == STEP}
        if steps != {step}:
            raise ConflictError(f"ranks have saved different steps: {sorted(steps)}")

    def _require_save(self) -> _Save:
        if self._save is None:
            raise PreconditionError("set_up_storage_writer begins a save: call it first")
        return self._save

    def give_up_unfinished(self) -> None:
        """Give up a save that has ended without ``finish``, because another rank failed."""
        save, self._save = self._save, None
        if save is not None and save.last and save.writes:
            assert save.step is not None
            self._give_up(save.step, PreconditionError("another rank failed"))

    @contextmanager
    def _given_up_by_errors(self, step: int) -> Iterator[None]:
        """Have all ranks give ``step`` up if the block raises, whatever a planner raises."""

        def at_end(_kind: object, error: BaseException | None, _trace: object) -> None:
            if error is not None:
                self._give_up(step, error)

        with ExitStack() as stack:
            stack.push(at_end)
            yield

    def _give_up(self, step: int, error: BaseException) -> None:
        self._save = None
        if not isinstance(error, CheckpointError):
            error = PreconditionError(f"{type(error).__name__}: {error}", step=step)
        self._job.give_up(step, error)

    def _tell(self, step: int) -> None:
        """Tell the other ranks which step it is; they ask after plans were exchanged."""
        if self._job.place.world_size > 1:
            _store().set(self._key, str(step))

    def _told(self) -> int:
        return int(_store().get(self._key))

    @property
    def _key(self) -> str:
        return f"holdfast/{self._job.job}/step"


def _store() -> Any:
    """Return where ranks that share a process group can leave each other a word."""
    return distributed_c10d._get_default_store()  # noqa: SLF001 - there is no public way
