"""Reads what DCP loads from the memory of the agents: the checkpoint chosen for the job."""

from __future__ import annotations

import os
from typing import Any, NoReturn

from torch.distributed.checkpoint import metadata as of_dcp
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from holdfast.errors import InvalidRequestError, NotFoundError
from holdfast.integrations.dcp.contents import Contents
from holdfast.integrations.dcp.places import Path
from holdfast.integrations.planned_job import PlannedJob, step_in


class JobReader(StorageReader):
    """The ``storage_reader`` of a job; any number of loads before the first save.

    Each rank has its agent fetch the byte ranges that its plan names; what is on the node already
    is not fetched.
    """

    def __init__(self, job: PlannedJob) -> None:
        super().__init__()
        self.checkpoint_id: str | None = None
        self._job = job
        self._contents: Contents | None = None

    def __getstate__(self) -> NoReturn:
        raise InvalidRequestError("a job belongs to one process: its reader cannot be pickled")

    def reset(self, checkpoint_id: Path | None = None) -> None:
        """Take the id of the next load."""
        self.checkpoint_id = None if checkpoint_id is None else os.fspath(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path) -> bool:
        """Tell that any id will do: of it the number at its end counts."""
        del checkpoint_id
        return True

    def read_metadata(self, *args: Any, **named: Any) -> of_dcp.Metadata:
        """Return what is in the checkpoint: each tensor as one chunk, since any box can be read.

        Not called ``kwargs``: torch would try again, without the other ranks, after an error.

        Raises:
            NotFoundError: the job has no checkpoint, or another one was chosen.
            PreconditionError: training has begun.
        """
        del args, named
        self._job.check_before_training()
        asked, self.checkpoint_id = step_in(self.checkpoint_id), None
        decided = self._job.decided
        if decided is None:
            raise NotFoundError(
                f"job {self._job.job} has no checkpoint: ask job.restores before you load"
            )
        if asked not in (None, decided.step):
            raise NotFoundError(
                f"this launch of job {self._job.job} goes on from step {decided.step}, not "
                f"{asked}: for another one make the job with step={asked}"
            )
        restore = self._job.restore
        source = self._job.place.rank % restore.decision.world_size
        self._contents = Contents(restore.specs(), restore.texts(), source)
        return self._contents.metadata(str(decided.step))

    def set_up_storage_reader(
        self, metadata: of_dcp.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: ``read_metadata`` has found the checkpoint."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all that the plan asks for, once it is on this node and verified.

        Raises:
            NotReadyError: pieces of a tensor are missing.
            UnavailableError: the bytes did not come in time.
        """
        if self._contents is None:
            raise NotFoundError("read_metadata finds the checkpoint: call it first")
        self._contents.load(plan, planner, self._job.restore.read)
        self._job.loaded()
        done: Future[None] = Future()
        done.set_result(None)
        return done
