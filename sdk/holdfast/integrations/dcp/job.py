"""DCP's saves in the memory of the agents: one job, its writer and its reader."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from holdfast.integrations.dcp.job_reader import JobReader
from holdfast.integrations.dcp.job_writer import JobWriter
from holdfast.integrations.planned_job import CLOSE_S_MAX, PlannedJob
from holdfast.policy import Parity, Policy, Replicas, Retention
from holdfast.training.restore import Decided
from holdfast.training.save_handle import SaveHandle


class HoldfastJob:
    """Keeps what ``dcp.save`` and ``dcp.async_save`` save in memory, as a Checkpointer does.

    Make it on all ranks, after ``init_process_group``. Making it chooses the newest whole
    checkpoint of the job; ``restores`` says which, None: training begins at step 0. Load it before
    the first save.

    ``writer`` and ``reader`` go into the calls of DCP. A ``checkpoint_id`` that ends in a number
    has the step; else a save is one step more than the last. Use the thread of ``async_save``: the
    job belongs to this process.

    Args:
        name: Name of the job; after a restart the same name finds its checkpoints again.
        replicas: Number of copies on other nodes.
        persist: Which saved steps also go to the object store, such as ``EverySteps(100)``.
        keep: Which checkpoints of the job the object store keeps; None leaves its policy unchanged.
        takeover: Replace another launch that trains this job now.
        fresh: Start over at step 0; see ``Checkpointer``.
        step: Go back to this step; see ``Checkpointer.restore``.
        slots: Slots of memory that each rank saves into; see ``Checkpointer``.

    Raises:
        CheckpointError: as ``Checkpointer`` and its ``decide`` do.
    """

    def __init__(
        self,
        name: str,
        *,
        replicas: int | Replicas | Parity = 1,
        persist: Policy | None = None,
        keep: Retention | None = None,
        takeover: bool = False,
        fresh: bool | str = False,
        step: int | None = None,
        slots: int | None = None,
    ) -> None:
        self._job = PlannedJob(
            name, replicas=replicas, persist=persist, keep=keep,
            takeover=takeover, fresh=fresh, step=step, slots=slots,
        )  # fmt: skip
        self.writer = JobWriter(self._job)
        self.reader = JobReader(self._job)

    @property
    def restores(self) -> Decided | None:
        """The checkpoint that ``reader`` loads; None: the job has none, or starts over."""
        return self._job.decided

    @property
    def newest(self) -> SaveHandle | None:
        """The progress of the newest save, to ``wait("replicated")``; None: there is none yet."""
        return self.writer.handle

    def close(self, timeout_s: float = CLOSE_S_MAX) -> None:
        """Wait until the newest save is safe, as ``Checkpointer.close`` does; end the session.

        Raises:
            CheckpointError: the newest save is not safe.
        """
        self.writer.give_up_unfinished()
        self._job.close(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._job.end()
