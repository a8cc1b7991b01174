"""A job as users of another framework's checkpoint calls have it."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from holdfast.integrations.planned_job import PlannedJob
from holdfast.policy import Parity, Policy, Replicas, Retention
from holdfast.training.ending import CLOSE_S_MAX
from holdfast.training.restore import Decided
from holdfast.training.save_handle import SaveHandle


class FrameworkJob:
    """Keeps what a framework saves in memory, as a Checkpointer does; a context manager.

    Make it on all ranks, after ``init_process_group``. Making it chooses the newest whole
    checkpoint of the job; ``restores`` says which, None: training begins at step 0. Load it before
    the first save.

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
        self._serve(self._job)

    def _serve(self, job: PlannedJob) -> None:
        """Make what goes into the framework's calls."""
        raise NotImplementedError

    @property
    def restores(self) -> Decided | None:
        """The checkpoint that is loaded; None: the job has none, or starts over."""
        return self._job.decided

    @property
    def newest(self) -> SaveHandle | None:
        """The progress of the newest save, to ``wait("replicated")``; None: there is none yet."""
        return self._job.handle

    def close(self, timeout_s: float = CLOSE_S_MAX) -> None:
        """Wait until the newest save is safe, as ``Checkpointer.close`` does; end the session.

        Raises:
            CheckpointError: the newest save is not safe.
        """
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
