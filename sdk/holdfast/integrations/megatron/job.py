"""Megatron's saves in the memory of the agents: one job and its two strategies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

from holdfast.errors import (
    InvalidRequestError,
    NotFoundError,
)
from holdfast.format.segment import TensorSpec
from holdfast.format.tree import Json
from holdfast.integrations.framework_job import FrameworkJob
from holdfast.integrations.megatron.contents import Saved
from holdfast.integrations.megatron.strategies import (
    BACKEND,
    VERSION,
    HoldfastLoadStrategy,
    HoldfastSaveStrategy,
    Opened,
)
from holdfast.integrations.planned_job import PlannedJob, check_grows, step_in
from holdfast.oneshot.world import Agreement, World
from holdfast.reading.reader import Want


class HoldfastJob(FrameworkJob):
    """Keeps the sharded part of Megatron's checkpoints in memory; see ``FrameworkJob``.

    ``save_strategy`` and ``load_strategy`` go into Megatron's calls. The number at the end of the
    folder's name is the step; iterations only grow. ``restores`` is loaded from Megatron's folder
    of that iteration.
    """

    def _serve(self, job: PlannedJob) -> None:
        self._memory = _Memory(job)
        self.save_strategy = HoldfastSaveStrategy(self._memory)
        self.load_strategy = HoldfastLoadStrategy(self._memory)


class _Memory:
    """Storage in the memory of the agents; Megatron's folder has its own two files alone."""

    def __init__(self, job: PlannedJob) -> None:
        self._job = job

    def save(self, folder: str, world: World, saved: Saved, tree: Mapping[str, Json]) -> None:
        with Agreement(world):
            step = _step(folder)
            self._job.begin()
            check_grows(step, self._job.newest)
            if world.rank == 0:
                # Before the commit: a launch that was killed between the two goes on from here,
                # and what was not committed is not chosen.
                save_config(CheckpointingConfig(BACKEND, VERSION), folder)
        with Agreement(world):
            tensors = [*saved.tensors.values()]
            self._job.save(step, tensors, tree, held_bytes=saved.held_bytes)
        with Agreement(world):  # who hears of the commit does not wait for one who does not
            self._job.await_commit()

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
