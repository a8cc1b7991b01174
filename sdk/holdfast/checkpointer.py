"""The facade a training script holds: restore once, then ``step`` at the end of every iteration.

Joins the parts and owns none of their rules: *what* is saved is ``state``, *how* it is copied
``snapshot``, *when* ``policy``, *whom we talk to* ``session``. The training thread makes no RPC
here after ``restore()``; what it waits for, and how long at most, stands in the limits below.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from holdfast.core import env
from holdfast.core.announcements import SaveReason
from holdfast.core.attempts import AttemptSpec
from holdfast.core.budget import MemoryWish, slots_per_rank
from holdfast.core.facts import Start
from holdfast.core.ids import job_name, node_name, step_number
from holdfast.errors import (
    CheckpointError,
    ExhaustedError,
    InvalidRequestError,
    PreconditionError,
)
from holdfast.policy import (
    EverySteps,
    Policy,
    Replicas,
    Retention,
    grace_s,
    interval_reason,
    persist_rule,
)
from holdfast.state.capture import Capture
from holdfast.training import launch
from holdfast.training.handle import SaveHandle
from holdfast.training.preemption import Preemption
from holdfast.training.progress import Progress
from holdfast.training.restore import Decided, Part, Restored, decide, restore
from holdfast.training.saving import Saver
from holdfast.training.session import Session

__all__ = ["Checkpointer", "Decided", "Restored", "SaveHandle"]

OPEN_S_MAX = 60.0
RESTORE_S_MAX = 600.0
CLOSE_S_MAX = 30.0
FAILED_CLOSE_S_MAX = 2.0

OnFailure = Literal["degrade", "warn", "raise"]

log = logging.getLogger(__name__)


class Checkpointer:
    """Keeps the state of one training run safe; one per rank and run.

    A process may have several, of different jobs or roles. Each has its own steps, saves and
    restore; what must be of one step belongs into one ``state``.

    Args:
        job: Name of the run; the same name after a restart finds it again.
        state: What to save, by name: modules, optimizers, schedulers, loaders, anything with
            ``state_dict``/``load_state_dict``, tensors, plain data, nested. Kept as ``state``;
            restore fills it in place. Wrap (DDP, compile) and build optimizers before; after
            ``decide``, before ``restore``, if they are built from what was decided.
        save: When to save to memory.
        persist: Which saved steps also go to the object store: ``EverySteps(n)`` takes the first
            one committed at or after each multiple, ``EverySeconds(s)`` the first one so long
            after the last; ``AnyOf`` both. It costs a third slot of memory, never time.
        keep: What the object store keeps of the job; None leaves the job the policy it has.
        replicas: Copies on other nodes beside the owner's.
        on_failure: ``degrade``: refuse before the first step, afterwards log, count and go on;
            ``warn``: never refuse for lack of memory or lost checkpoints; ``raise``: a failed
            save raises at the next call.
        takeover: Replace another launch that trains this job now.
        fresh: Start over: leave all checkpoints of the job behind. Done once per launch, so that
            what it has trained outlives a restart; a text is a name, done once per name.
        role: Which part of the job this is, such as ``actor``: a run of its own, ``job/role``.
        checksum: Where digests are made; ``seal``: by the agent when it seals.
        rng: Capture the random state of Python, NumPy, torch and CUDA.

    Raises:
        InvalidRequestError: the name, a state value or a mesh that is not supported, by name.
        ExhaustedError: the job's shards do not fit the node's budget; the sum is written out.
        UnavailableError: no node agent answers.
    """

    def __init__(  # noqa: PLR0913 - the surface is fixed by interface.md
        self,
        job: str,
        state: MutableMapping[str, object],
        *,
        save: Policy | None = None,
        persist: Policy | None = None,
        keep: Retention | None = None,
        replicas: int | Replicas = 1,
        on_failure: OnFailure = "degrade",
        takeover: bool = False,
        fresh: bool | str = False,
        role: str = "",
        checksum: Literal["seal"] = "seal",
        rng: bool = True,
    ) -> None:
        if on_failure not in ("degrade", "warn", "raise"):
            raise InvalidRequestError(f"on_failure={on_failure!r} is not degrade, warn or raise")
        if checksum != "seal":
            raise InvalidRequestError(f"checksum={checksum!r} is not supported yet, only 'seal'")
        if not isinstance(state, MutableMapping):
            raise InvalidRequestError(
                f'state is a {type(state).__name__}: pass a dict, such as {{"model": model}}'
            )
        if save is not None and not isinstance(save, Policy):
            raise InvalidRequestError(f"save={save!r} is no policy: use holdfast.EverySteps(10)")
        self.state = state
        self._job = job_name(f"{job}/{node_name(role)}" if role else job)
        self._policy = save or EverySteps(1)
        if keep is not None and not isinstance(keep, Retention):
            raise InvalidRequestError(f"keep={keep!r}: use holdfast.Retention(last=5)")
        self._persist = persist_rule(persist)
        self._keep = keep
        self._replicas = replicas if isinstance(replicas, Replicas) else Replicas(replicas)
        self._on_failure = on_failure
        self._takeover = takeover
        self._fresh = fresh
        self._place = launch.place(os.environ)
        self._pid = os.getpid()
        self._capture = Capture(
            state, rank=self._place.rank, world_size=self._place.world_size, rng=rng
        )
        self._session = Session(self._agent_socket())
        self._saver: Saver | None = None
        try:
            self._arena = self._admit()
        except ExhaustedError:
            self._session.close(timeout_s=1.0)
            raise
        self._start: Start | None = None
        self._decided: Decided | None = None
        self._loaded = False
        self._preemption: Preemption | None = None
        self._progress = Progress()
        self._paused = False
        self._save_asked = False
        self._closed = False

    def decide(self, step: int | None = None) -> Decided | None:
        """Return what ``restore`` will load, before the model or the optimizer need exist.

        For who builds the state from the step or its notes: make the Checkpointer with an empty
        mapping, fill ``state`` afterwards, then call ``restore``, which loads it. Waits until
        the choice is confirmed and its bytes are on this node. Collective, as ``restore`` is.

        Args:
            step: As in ``restore``, which then takes none.

        Returns:
            What was chosen, or None: training begins at step 0. ``restore`` comes in any case.

        Raises:
            PreconditionError: it was decided before, or this is closed.
            CheckpointError: as ``restore`` does.
        """
        self._require_open()
        if self._saver is not None:
            raise PreconditionError("it is decided already: call decide() once", job=self._job)
        self._start = launch.start(os.environ, self._place, fresh=self._fresh, step=step)
        timeout_s = self._timeout_s()
        self._saver = self._join(timeout_s, self._start)
        try:
            lost_is_fresh = self._on_failure == "warn"
            self._decided = decide(self._session, timeout_s=timeout_s, lost_is_fresh=lost_is_fresh)
        except CheckpointError:
            self._end(FAILED_CLOSE_S_MAX)
            raise
        return self._decided

    def restore(
        self, step: int | None = None, *, strict: bool = True, only: Collection[str] | None = None
    ) -> Restored | None:
        """Bring the run back to its newest whole checkpoint, in place; call it once, first.

        After ``init_process_group``, after wrapping and building the optimizer, before the first
        iteration and before ``iter(loader)``. Collective: it draws the attempt's name.

        Args:
            step: Go back to this one, the same on all ranks; what is later is left behind. Done
                once per launch: started again by the same launcher, it takes the newest.
            strict: Refuse state that is only here, or only in the checkpoint; else leave the one
                as it is and the other out, and say so.
            only: Names of ``state`` to load; the rest and the random streams stay as they are.

        Returns:
            What was restored, or None: the catalogue answered that the job has no checkpoint, or
            it starts over (``fresh``).

        Raises:
            NotFoundError: ``step`` cannot be restored; the message says why, and which can.
            UnavailableError: the catalogue could not be asked, or did not decide, in time
                (``HOLDFAST_RESTORE_TIMEOUT`` seconds).
            AlreadyExistsError: another launch trains this job now.
            CorruptionError: checkpoints are known, none can be read; the message says why.
        """
        if self._loaded:
            raise PreconditionError(
                "restore() was called already: call it once, before the first step", job=self._job
            )
        self._require_open()
        made_since = self._saver is not None
        if made_since and step is not None:
            raise PreconditionError("say step= to decide(): it has chosen", job=self._job)
        if made_since:
            self._capture.check()
        part = Part.of(self.state, strict=strict, only=only)
        expected = self._decided if made_since else self.decide(step)
        saver = self._saver
        assert saver is not None
        try:
            if made_since:
                self._admit()
            restored = restore(
                self._session,
                self._capture,
                saver.arena,
                timeout_s=self._timeout_s(),
                lost_is_fresh=self._on_failure == "warn",
                part=part,
                expected=expected,
            )
        except CheckpointError:
            self._end(FAILED_CLOSE_S_MAX)
            raise
        self._loaded = True
        start = self._start
        if restored is not None:
            self._progress.step = restored.step
            saver.restored(restored.step, restored.generation)
            if start is not None and (start.fresh or restored.step != start.step):
                log.warning(
                    "job %s: this launch (%s) has begun there already; it goes on from step %d",
                    self._job, start.name, restored.step,
                )  # fmt: skip
        self._preemption = Preemption(self._policy.signals(), grace_s=grace_s(self._policy))
        atexit.register(self._at_exit)
        return restored

    def _join(self, timeout_s: float, start: Start | None) -> Saver:
        """Take part in the attempt; from here on the rpc threads run."""
        spec = AttemptSpec(
            job=self._job,
            nonce=launch.nonce(os.environ, self._place),
            launcher=launch.launcher(os.environ),
            holder=launch.holder(),
            takeover=self._takeover,
            rank=self._place.rank,
            world_size=self._place.world_size,
            local_world_size=self._place.local_world_size,
            replicas=self._replicas.count,
            replica_domain=self._replicas.domain,
            persist=self._persist,
            retention=self._keep,
            start=start,
            names_needs=self._capture.apart,
        )
        seat = self._session.open(spec, self._arena, timeout_s=timeout_s)
        saver = Saver(
            capture=self._capture, session=self._session, spec=spec, seat=seat, arena=self._arena
        )
        self._session.start(saver.on_view)
        return saver

    def step(self, step: int, *, notes: Mapping[str, object] | None = None) -> SaveHandle | None:
        """Say that ``step`` optimizer steps are done; saves when due. Last in the iteration.

        A repeated ``step`` does nothing. ``notes`` are plain values of yours that go with a save,
        such as ``{"loss": 0.3}``; rank 0's count, at most 4 KiB as JSON.

        Returns the handle of a save, None when none was due.

        Raises:
            PreconditionError: ``restore()`` was not called.
            InvalidRequestError: ``step`` is no whole number, or a negative one.
            CheckpointError: with ``on_failure="raise"``, what went wrong in an earlier save.
            SystemExit: after a signal, once the last save is in place (``OnPreemption``).
        """
        saver, step = self._require_saver(), step_number(step)
        if os.getpid() != self._pid or self._closed or step <= self._progress.step:
            return None
        self._raise_failure(saver)
        self._progress.advance(step, time.monotonic())
        announcement = self._session.view.announcement
        announced = announcement.step if announcement else 0
        saver.note_step(step, announcement)
        alone = self._place.world_size == 1
        ending = self._preemption is not None and self._preemption.asked
        due = self._policy.due(step) or step == announced
        due = not self._paused and (due or (alone and (ending or self._save_asked)))
        if due:
            self._save_asked = False  # before the save: what is asked from here on is another one
        self._report(saver, ending=ending)
        if due and announcement and step == announced and self._place.rank == 0:
            log.info(
                "job %s: all ranks save step %d: %s", self._job, step, announcement.reason.text
            )
        handle = self.save(step, notes=notes) if due else None
        if ending:
            self._end_after(handle, saved=step == announced or alone)
        return handle

    def _report(self, saver: Saver, *, ending: bool) -> None:
        """Say where this rank is, what saves cost it, and whether and why it asks for one."""
        asked = SaveReason.USER if self._save_asked else SaveReason.UNSPECIFIED
        wants_save = SaveReason.PREEMPTION if ending else asked
        interval_s = self._policy.interval_s(saver.stall_s) * saver.stretch
        self._session.report(
            lambda before: replace(
                before,
                step=self._progress.step,
                step_s=self._progress.step_s,
                save_interval_s=interval_s,
                interval_reason=interval_reason(self._policy, saver.stall_s),
                wants_save=wants_save,
                costs=replace(before.costs, stall_s=saver.stall_s),
            )
        )

    def request_save(self) -> None:
        """Ask for a save soon, at a step that all ranks agree on; returns at once.

        For any thread and signal handler, on one rank or several. ``step`` makes it, at the next
        step of a single rank, else at one that is announced a few steps ahead. While paused it
        waits for ``resume``.
        """
        self._save_asked = True

    def save(self, step: int, *, notes: Mapping[str, object] | None = None) -> SaveHandle:
        """Save now; on every rank at the same ``step``. Returns at once; see ``SaveHandle``."""
        saver, step = self._require_saver(), step_number(step)
        if os.getpid() != self._pid:
            raise PreconditionError("a forked child must not save", job=self._job)
        if step > self._progress.step:
            self._progress.advance(step, time.monotonic())
        return saver.save(step, notes)

    def before_update(self) -> None:
        """Wait until captured tensors may change: for updates without a torch Optimizer."""
        self._require_saver().before_update()

    def pause(self) -> None:
        """Save nothing on ``step`` until ``resume``; on all ranks alike."""
        self._paused = True

    def resume(self) -> None:
        """Save again when due."""
        self._paused = False

    def close(self, timeout_s: float = CLOSE_S_MAX) -> None:
        """Wait, bounded, for the newest save to be safe; end the session. Repeats do nothing.

        Safe is ``replicated``, or ``local`` where copies are not asked for or have no nodes.

        Raises:
            CheckpointError: the newest save is not safe; names the step and how far it got. It
                may get there later, as far as what lies in memory proves.
        """
        error = self._close(timeout_s)
        if error is not None:
            raise error

    def _close(self, timeout_s: float) -> CheckpointError | None:
        """Close; return what the newest save has not reached."""
        if self._closed or os.getpid() != self._pid:
            return None
        self._closed = True
        atexit.unregister(self._at_exit)
        deadline = time.monotonic() + timeout_s
        if self._preemption is not None:
            self._preemption.uninstall()
        error = self._saver.close(deadline - time.monotonic()) if self._saver else None
        self._session.close(timeout_s=max(1.0, deadline - time.monotonic()))
        self._capture.release()
        return error

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
            self._end(FAILED_CLOSE_S_MAX)

    def _at_exit(self) -> None:
        """Close; after an uncaught exception hardly wait: a launcher waits to start us again."""
        failed = getattr(sys, "last_value", None) is not None
        self._end(FAILED_CLOSE_S_MAX if failed else CLOSE_S_MAX)

    def _end(self, timeout_s: float) -> None:
        """Close where nothing can be raised any more: what is not safe is logged."""
        error = self._close(timeout_s)
        if error is not None:
            log.error("job %s: %s", self._job, error)

    def _agent_socket(self) -> Path:
        """Return the socket of this node's agent; one that is named needs no search."""
        if named := os.environ.get("HOLDFAST_AGENT"):
            return Path(named)
        from holdfast.embedded import agent_socket  # noqa: PLC0415 - 5 ms of a restart

        return agent_socket(
            os.environ,
            world_size=self._place.world_size,
            local_world_size=self._place.local_world_size,
        )

    def _admit(self) -> Path:
        """Return the node's arena, after checking that the job fits its budget (P8)."""
        estimate = self._capture.estimate()
        wish = MemoryWish(
            own_bytes=estimate.own_bytes * self._place.local_world_size,
            restored_bytes=estimate.restored_bytes(
                named=self._saver is None or self._session.names_needs,
                local_world_size=self._place.local_world_size,
                replicas=self._replicas.count,
            ),
            replicas=self._replicas.count,
            nodes_count=self._place.nodes_count,
            slots=slots_per_rank(persist=self._persist.on),
        )
        node = self._session.describe(OPEN_S_MAX, self._job, wish)
        if node.refusal:
            text = f"job {self._job} does not fit the arena of node {node.node}: {node.refusal}"
            error = ExhaustedError(text, job=self._job, node=node.node)
            if self._on_failure != "warn":
                raise error
            log.warning("%s", error)
        return Path(node.arena)

    @staticmethod
    def _timeout_s() -> float:
        return env.seconds(os.environ, "HOLDFAST_RESTORE_TIMEOUT", RESTORE_S_MAX)

    def _require_open(self) -> None:
        """Refuse to restore what no session holds: its bytes could be replaced while read."""
        if self._closed:
            raise PreconditionError("it is closed: make another Checkpointer", job=self._job)

    def _require_saver(self) -> Saver:
        if self._saver is None:
            raise PreconditionError(
                "call restore() before the first step: it finds the run and fences old trainers",
                job=self._job,
            )
        if not self._loaded:
            raise PreconditionError(
                "call restore() before the first step, also if decide() returned None: decide() "
                "only says what will be loaded",
                job=self._job,
            )
        return self._saver

    def _raise_failure(self, saver: Saver) -> None:
        failure = saver.take_failure()
        if failure is not None and self._on_failure == "raise":
            raise failure

    def _end_after(self, handle: SaveHandle | None, *, saved: bool) -> None:
        """After a signal: end once the agreed step is safe, or the grace period is over.

        A Checkpointer that is done goes on while another of this process is not.
        """
        assert self._preemption is not None
        left_s = self._preemption.left_s
        self._preemption.done = self._preemption.done or saved
        if left_s > 0 and (not self._preemption.done or self._preemption.waits_for_others):
            return
        if handle is not None and left_s > 0:
            try:
                handle.wait_copies(left_s)
            except CheckpointError as error:
                log.warning("job %s ends without its last save: %s", self._job, error)
        self._end(max(1.0, self._preemption.left_s))
        self._preemption.finish()
