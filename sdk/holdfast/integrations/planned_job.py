"""A job whose state another framework plans: it says which tensors this rank saves, and asks back.

Sits where ``Checkpointer`` sits, for frameworks that share tensors out over the ranks themselves.
What is handed over goes through slot, seal, copies, commit and drain like any other save.
"""

from __future__ import annotations

import atexit
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch

from holdfast.core.ids import job_name, step_number
from holdfast.embedded import agent_socket
from holdfast.errors import CheckpointError, OutcomeUnknownError, PreconditionError
from holdfast.format.segment import TensorSpec
from holdfast.format.tree import Json
from holdfast.logs import steady_logger
from holdfast.oneshot.world import find_world
from holdfast.policy import (
    Parity,
    Policy,
    Replicas,
    Retention,
    kept,
    persist_rule,
    protection_of,
    slots_of,
)
from holdfast.state.given import Given
from holdfast.training import launch
from holdfast.training.ending import CLOSE_S_MAX, FAILED_CLOSE_S_MAX, has_failed
from holdfast.training.job_terms import Terms
from holdfast.training.late_restore import LateRestore
from holdfast.training.restore import Decided, timeout
from holdfast.training.save_handle import SaveHandle
from holdfast.training.saver import Saver
from holdfast.training.session import AgentSession

SLOT_S_MAX = 120.0
"""How long a save may wait for a slot: it runs beside training, or its caller waits for it."""
COMMIT_S_MAX = 60.0
"""How long a save waits for its commit. Later, it may still be committed."""

log = steady_logger(__name__)


class PlannedJob:
    """One rank's part in a job. Making it is collective: a checkpoint is chosen.

    ``decided`` is what ``restore`` reads, None: the job begins at step 0; ``newest`` the step that
    was saved last, ``handle`` its progress, None: nothing was saved yet. Several threads may use
    it, one after the other; it belongs to the process that made it.

    Args:
        job: Name of the job; after a restart the same name finds its checkpoints again.
        replicas: Number of copies on other nodes, or ``Replicas``, or ``Parity`` in place of them.
        persist: Which saved steps also go to the object store.
        keep: Which checkpoints of the job the object store keeps; None leaves its policy unchanged.
        takeover: Replace another launch that trains this job now.
        fresh: Start over at step 0, as ``Checkpointer`` does.
        step: Go back to this step, as ``Checkpointer.restore`` does.
        slots: Slots of memory that each rank saves into, as ``Checkpointer`` has them.

    Raises:
        InvalidRequestError: the process group has other ranks than the launch.
        CheckpointError: as ``Checkpointer.decide`` does.
    """

    def __init__(
        self,
        job: str,
        *,
        replicas: int | Replicas | Parity = 1,
        persist: Policy | None = None,
        keep: Retention | None = None,
        takeover: bool = False,
        fresh: bool | str = False,
        step: int | None = None,
        slots: int | None = None,
    ) -> None:
        self.job = job_name(job)
        self.place = launch.place(os.environ)
        find_world(alone=self.place.world_size == 1)  # raises unless there is a group
        launch.check_group(self.place)
        start = launch.start(os.environ, self.place, fresh=fresh, step=step)
        terms = Terms(
            job=self.job, place=self.place, protection=protection_of(replicas),
            persist=persist_rule(persist), keep=kept(keep), takeover=takeover, must_fit=True,
            slots=slots_of(slots),
        )  # fmt: skip
        self._pid = os.getpid()
        self._closed = False
        self._begun = self._loaded = False
        self._saving = threading.Lock()
        self._given = Given(rank=self.place.rank, world_size=self.place.world_size)
        socket = agent_socket(
            os.environ,
            world_size=self.place.world_size,
            local_world_size=self.place.local_world_size,
        )
        self._session = AgentSession(socket)
        timeout_s = timeout(os.environ)
        with ExitStack() as undo:
            undo.callback(self._session.close, timeout_s=1.0)
            arena = terms.admit(self._session, self._given.estimate(), named=True)
            spec = terms.spec(start, names_needs=self.place.world_size > 1)
            seat = self._session.open(spec, arena, timeout_s=timeout_s)
            self._saver = Saver(
                capture=self._given, session=self._session, spec=spec, seat=seat, arena=arena
            )
            self._session.start(self._saver.on_view)
            self.restore = LateRestore(self._session, arena, timeout_s=timeout_s)
            self.decided: Decided | None = self.restore.decide()
            undo.pop_all()
        self.newest = self.decided.step if self.decided else 0
        self.handle: SaveHandle | None = None
        atexit.register(self._at_exit)

    def loaded(self) -> None:
        """Note that the state here is that of ``decided`` now."""
        self._loaded = True

    def begin(self) -> None:
        """Begin training, unless it has: what was decided is the parent of all saves.

        Raises:
            PreconditionError: the job has a checkpoint that nobody has loaded here, or this is
                another process than that which made the job.
        """
        self.check_usable()
        if self._begun:
            return
        if self.decided is not None and not self._loaded:
            raise PreconditionError(
                f"job {self.job} goes on from step {self.decided.step}, which was not loaded: load "
                f"it before the first save, or start over with fresh=True",
                job=self.job,
            )
        if self.decided is None:
            self._session.begun(None)
        else:
            self._session.begun(self.restore.decision.checkpoint)
            self._saver.restored(self.decided.step, self.decided.attempt)
        self._begun = True

    def check_before_training(self) -> None:
        """Raise PreconditionError if training has begun: then nothing can be loaded any more."""
        self.check_usable()
        if self._begun:
            raise PreconditionError(
                "a checkpoint is loaded before the first save of a launch", job=self.job
            )

    def check_usable(self) -> None:
        """Raise PreconditionError if the job is closed, or this is another process."""
        if os.getpid() != self._pid:
            raise PreconditionError(
                "a job belongs to the process that made it: save from a thread of that process",
                job=self.job,
            )
        if self._closed:
            raise PreconditionError("this job is closed: make another one", job=self.job)

    def save(
        self,
        step: int,
        tensors: Sequence[tuple[TensorSpec, torch.Tensor]],
        tree: Mapping[str, Json],
        *,
        held_bytes: int = 0,
        notes: Mapping[str, object] | None = None,
    ) -> SaveHandle:
        """Return once all that was handed over is in the agent's memory, for it to seal.

        Every rank calls it with the same step, which is higher than all before. The arguments are
        those of ``Given.give``; ``notes`` those of ``Checkpointer.step``.

        Raises:
            CheckpointError: it is not saved, nor will it be on other ranks.
        """
        self.begin()
        with self._saving:
            self._given.give(tensors, tree, held_bytes=held_bytes)
            handle = self._saver.save(step_number(step), notes)
            try:
                handle.wait("staged", SLOT_S_MAX)
            except CheckpointError as error:
                if not handle.abandoned:
                    self._saver.give_up(step, error)
                raise
            finally:
                self._given.give((), {})
        self.newest, self.handle = max(self.newest, step), handle
        self._session.report(lambda report: replace(report, step=max(report.step, step)))
        return handle

    def await_commit(self) -> None:
        """Wait until the newest save is committed, at most ``COMMIT_S_MAX``.

        Raises:
            CheckpointError: it is given up.
        """
        assert self.handle is not None
        try:
            self.handle.wait("local", COMMIT_S_MAX)
        except OutcomeUnknownError as late:
            # The bytes are sealed on their nodes; training is not to end because metadata is out.
            log.warning("job %s: step %d is saved, but: %s", self.job, self.handle.step, late)

    def give_up(self, step: int, error: CheckpointError) -> None:
        """Have all ranks give ``step`` up: it is not saved here, or nobody knows whether it is."""
        self._saver.give_up(step, error)

    def close(self, timeout_s: float = CLOSE_S_MAX) -> None:
        """Wait until the newest save is as safe as it can be, then end the session; idempotent.

        Raises:
            CheckpointError: the newest save is not safe.
        """
        error = self._close(timeout_s)
        if error is not None:
            raise error

    def end(self) -> None:
        """Close where nothing is to be raised any more: hardly wait, and log what is not safe."""
        error = self._close(FAILED_CLOSE_S_MAX)
        if error is not None:
            log.error("job %s: %s", self.job, error)

    def _close(self, timeout_s: float) -> CheckpointError | None:
        if self._closed or os.getpid() != self._pid:
            return None
        self._closed = True
        atexit.unregister(self._at_exit)
        deadline = time.monotonic() + timeout_s
        error = self._saver.close(timeout_s)
        self._session.close(timeout_s=max(1.0, deadline - time.monotonic()))
        return error

    def _at_exit(self) -> None:
        failed = has_failed()
        error = self._close(FAILED_CLOSE_S_MAX if failed else CLOSE_S_MAX)
        if error is not None:
            log.error("job %s: %s", self.job, error)


def check_grows(step: int, newest: int) -> None:
    """Refuse a step that is not after the ``newest`` one.

    Raises:
        PreconditionError: names both.
    """
    if step <= newest:
        raise PreconditionError(
            f"step {step} is not after step {newest}, where this job is: steps only grow",
            step=step,
        )


def step_in(checkpoint_id: str | None) -> int | None:
    """Return the number at the end of an id; None: there is none.

    Raises:
        InvalidRequestError: no step is that high.

    >>> step_in("runs/gpt/step-100"), step_in("runs/gpt2/last"), step_in(None)
    (100, None, None)
    """
    found = re.search(r"([0-9]+)/?$", checkpoint_id or "")
    return step_number(int(found[1])) if found else None
