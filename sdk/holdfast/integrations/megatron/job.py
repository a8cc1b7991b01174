"""Megatron's saves in the memory of the agents: one job and its two strategies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

from holdfast.errors import (
    InvalidRequestError,
    NotFoundError,
    OutcomeUnknownError,
    PreconditionError,
)
from holdfast.format.segment import TensorSpec
from holdfast.format.tree import Json
from holdfast.integrations.dcp.job_writer import COMMIT_S_MAX, step_in
from holdfast.integrations.megatron.contents import Saved
from holdfast.integrations.megatron.strategies import (
    BACKEND,
    VERSION,
    HoldfastLoadStrategy,
    HoldfastSaveStrategy,
    Opened,
)
from holdfast.integrations.planned_job import CLOSE_S_MAX, PlannedJob
from holdfast.logs import steady_logger
from holdfast.oneshot.world import Agreement, World
from holdfast.policy import Parity, Policy, Replicas, Retention
from holdfast.reading.reader import Want
from holdfast.training.restore import Decided
from holdfast.training.save_handle import SaveHandle

log = steady_logger(__name__)


class HoldfastJob:
    """Keeps the sharded part of Megatron's checkpoints in memory, as a Checkpointer does.

    Make it on all ranks, after ``init_process_group``. Making it chooses the newest whole
    checkpoint of the job; ``restores`` says which, None: training begins at iteration 0. Load it
    before the first save, from Megatron's folder of that iteration.

    ``save_strategy`` and ``load_strategy`` go into Megatron's calls. The number at the end of the
    folder's name is the step. Iterations only grow.

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
        self._memory = _Memory(self._job)
        self.save_strategy = HoldfastSaveStrategy(self._memory)
        self.load_strategy = HoldfastLoadStrategy(self._memory)

    @property
    def restores(self) -> Decided | None:
        """The checkpoint that is loaded; None: the job has none, or starts over."""
        return self._job.decided

    @property
    def newest(self) -> SaveHandle | None:
        """The progress of the newest save, to ``wait("replicated")``; None: there is none yet."""
        return self._memory.handle

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


class _Memory:
    """Storage in the memory of the agents; Megatron's folder has its own two files alone."""

    def __init__(self, job: PlannedJob) -> None:
        self.handle: SaveHandle | None = None
        self._job = job

    def save(self, folder: str, world: World, saved: Saved, tree: Mapping[str, Json]) -> None:
        with Agreement(world):
            step = _step(folder)
            self._job.begin()
            if step <= self._job.newest:
                raise PreconditionError(
                    f"step {step} is not after step {self._job.newest}, where this job is: steps "
                    f"only grow",
                    step=step,
                )
            if world.rank == 0:
                # Before the commit: a launch that was killed between the two goes on from here,
                # and what was not committed is not chosen.
                save_config(CheckpointingConfig(BACKEND, VERSION), folder)
        with Agreement(world):
            tensors = [*saved.tensors.values()]
            self.handle = self._job.save(step, tensors, tree, held_bytes=saved.held_bytes)
        with Agreement(world):  # who hears of the commit does not wait for one who does not
            try:
                self.handle.wait("local", COMMIT_S_MAX)
            except OutcomeUnknownError as late:
                # The bytes are sealed on their nodes; training does not end as metadata is out.
                log.warning("job %s: step %d is saved, but: %s", self._job.job, step, late)

    @contextmanager
    def opened(self, folder: str) -> Iterator[Opened]:
        self._job.check_before_training()
        decided, step = self._job.decided, _step(folder)
        if decided is None or decided.step != step:
            goes_on = f"goes on from step {decided.step}" if decided else "has no checkpoint"
            raise NotFoundError(
                f"this launch of job {self._job.job} {goes_on}, and {folder} is of step {step}: "
                f"ask job.restores which one to load"
            )
        yield _InMemory(self._job)


class _InMemory:
    def __init__(self, job: PlannedJob) -> None:
        self._job, self._restore = job, job.restore

    def specs(self) -> Mapping[str, TensorSpec]:
        return self._restore.specs()

    def text(self) -> bytes:
        return self._restore.texts()[0]

    def read(self, wants: Sequence[Want]) -> None:
        self._restore.read(wants)
        self._job.loaded()  # here, not in `opened`: what is in a checkpoint is asked as well


def _step(folder: str) -> int:
    step = step_in(folder)
    if step is None:
        raise InvalidRequestError(
            f"the name of {folder} does not end in a number: a job takes its step from it"
        )
    return step
