"""The facade a training script holds: restore once, then ``step`` at the end of every iteration.

Joins the parts and owns none of their rules: *what* is saved is ``state``, *how* it is copied
``snapshot``, *when* ``policy``, *whom we talk to* ``session``. The training thread makes no RPC
here after ``restore()``; what it waits for, and how long at most, stands in the limits below.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Collection, Mapping, MutableMapping
from functools import partial
from pathlib import Path
from typing import Literal, Self

from holdfast.core.announcements import SaveReason
from holdfast.core.decision import Start
from holdfast.core.ids import job_name, node_name, step_number
from holdfast.errors import CheckpointError, ExhaustedError, PreconditionError
from holdfast.guards import RefuseNonFinite, checked_guard
from holdfast.policy import (
    Parity,
    Policy,
    Replicas,
    Retention,
    chosen_interval,
    grace_s,
    kept,
    persist_rule,
    protection_of,
    save_policy,
    slots_of,
)
from holdfast.state.capture import Capture
from holdfast.state.left_out import check_follows
from holdfast.training import launch
from holdfast.training.ending import CLOSE_S_MAX, FAILED_CLOSE_S_MAX, has_failed
from holdfast.training.job_terms import Terms, check_arguments
from holdfast.training.naming import Naming, Scope
from holdfast.training.preemption import Preemption
from holdfast.training.progress import Progress, closed
from holdfast.training.restore import Decided, Restored, decide, restore, timeout
from holdfast.training.round_end import RoundEnd
from holdfast.training.save_handle import SaveHandle
from holdfast.training.save_pace import SavePace
from holdfast.training.saver import Saver
from holdfast.training.session import AgentSession

__all__ = ["Checkpointer", "Decided", "Restored", "SaveHandle"]

OnFailure = Literal["degrade", "warn", "raise"]

log = logging.getLogger(__name__)


class Checkpointer:
    """Saves and restores the state of one training job; each rank makes one.

    A process may have several, with different jobs or roles. Each has its own steps, saves and
    restore; parts that must belong to the same step belong into one ``state``.

    Args:
        job: Name of the job; after a restart the same name finds its checkpoints again.
        state: What to save, by name: modules, optimizers, schedulers, loaders, anything with
            ``state_dict``/``load_state_dict``, tensors, plain data, nested. Kept as ``state``;
            restore fills it in place. Wrap (DDP, compile) and build optimizers before; after
            ``decide``, before ``restore``, if they are built from what was decided.
        save: When to save to memory.
        persist: Which saved steps also go to the object store: ``EverySteps(n)`` takes the first
            one committed at or after each multiple, ``EverySeconds(s)`` the first one so long
            after the last, ``Auto()`` when it pays; ``AnyOf`` all of them. It costs a third
            slot of memory, never time, unless ``slots`` is 2.
        keep: Which checkpoints of the job the object store keeps; None leaves its policy unchanged.
        replicas: Number of copies on other nodes, or ``Replicas``, or ``Parity`` in place of them.
        on_failure: ``degrade`` refuses to start if the configuration cannot work, and later only
            logs failed saves; ``warn`` also starts without enough memory or if all checkpoints
            are lost; ``raise`` makes the next call raise the error of a failed save.
        takeover: Replace another launch that trains this job now.
        fresh: Start over at step 0. True does so once per launch, so that a restart keeps its
            progress; a text does so once per text.
        role: Name of one part of the job, such as ``actor``, with checkpoints under ``job/role``.
        checksum: ``seal``: the agent computes the digests when it takes a shard over.
        rng: Also save the random state of Python, NumPy, torch and CUDA.
        slots: Slots of memory that each rank saves into, 2 to 16: one holds the newest step, the
            others receive later ones while it waits for its copies. None takes 2, and 3 with
            ``persist``.
        guard: What becomes of a save that holds a NaN or an infinity, None: nobody looks.

    Raises:
        InvalidRequestError: the name, a state value or a mesh is not supported, or the process
            group counts ranks otherwise than ``RANK`` says; it is named.
        ExhaustedError: the job does not fit the node's memory; the message shows the calculation.
        UnavailableError: no agent answers on this node.
    """

    def __init__(  # noqa: PLR0913 - the surface is fixed by interface.md
        self,
        job: str,
        state: MutableMapping[str, object],
        *,
        save: Policy | None = None,
        persist: Policy | None = None,
        keep: Retention | None = None,
        replicas: int | Replicas | Parity = 1,
        on_failure: OnFailure = "degrade",
        takeover: bool = False,
        fresh: bool | str = False,
        role: str = "",
        checksum: Literal["seal"] = "seal",
        rng: bool = True,
        slots: int | None = None,
        guard: RefuseNonFinite | None = None,
    ) -> None:
        check_arguments(state, on_failure=on_failure, checksum=checksum)
        self.state = state
        self._job = job_name(f"{job}/{node_name(role)}" if role else job)
        self._policy = save_policy(save)
        self._on_failure = on_failure
        self._guard = checked_guard(guard)
        self._fresh = fresh
        self._place = launch.place(os.environ)
        launch.check_group(self._place)
        self._terms = Terms(
            job=self._job,
            place=self._place,
            protection=protection_of(replicas),
            persist=persist_rule(persist),
            keep=kept(keep),
            takeover=takeover,
            must_fit=on_failure != "warn",
            slots=slots_of(slots),
        )
        self._pid = os.getpid()
        self._capture = Capture(
            state, rank=self._place.rank, world_size=self._place.world_size, rng=rng
        )
        check_follows(state)
        self._session = AgentSession(self._agent_socket())
        self._saver: Saver | None = None
        try:
            self._arena = self._admit()
        except ExhaustedError:
            self._session.close(timeout_s=1.0)
            raise
        self._decided: Decided | None = None
        self._loaded = False
        self._preemption: Preemption | None = None
        self._round_end: RoundEnd | None = None
        self._progress = Progress.of(state)
        self._pace = SavePace(partial(chosen_interval, self._policy), self._job, self._place.rank)
        self._paused = False
        self._save_asked = False
        self._closed = False

    def decide(self, step: int | None = None) -> Decided | None:
        """Return what ``restore`` will load, before the model or the optimizer exist.

        Use it to build the state from the step or its notes: make the Checkpointer with an empty
        mapping, call ``decide``, fill ``state``, then call ``restore``. The call waits until the
        choice is final and its bytes are on this node. It is collective, as ``restore`` is.

        Args:
            step: As in ``restore``; pass it only here.

        Returns:
            The chosen checkpoint, or None if training begins at step 0. Call ``restore`` anyway.

        Raises:
            PreconditionError: ``decide`` was called before, or this Checkpointer is closed.
            CheckpointError: as ``restore`` does.
        """
        self._require_open()
        if self._saver is not None:
            raise PreconditionError(
                "decide() was called already: call it once, before restore()", job=self._job
            )
        return self._decide(step, Scope())

    def _decide(self, step: int | None, scope: Scope) -> Decided | None:
        """Join the attempt and wait for what is chosen, and for what of it ``scope`` names."""
        launch.check_group(self._place)
        start = launch.start(os.environ, self._place, fresh=self._fresh, step=step)
        timeout_s = timeout(os.environ)
        self._capture.check()
        try:
            self._saver = self._join(timeout_s, start)
            self._decided = decide(
                self._session,
                self._saver.arena,
                timeout_s=timeout_s,
                lost_is_fresh=self._on_failure == "warn",
                naming=Naming.of(scope, self._capture.boxes, self._admit_whole),
            )
        except (CheckpointError, KeyboardInterrupt):
            self._end(FAILED_CLOSE_S_MAX)
            raise
        return self._decided

    def restore(
        self, step: int | None = None, *, strict: bool = True, only: Collection[str] | None = None
    ) -> Restored | None:
        """Load the job's newest whole checkpoint into ``state``, in place; call it once, first.

        Call it on all ranks, after ``init_process_group``, after wrapping the model and building
        the optimizer, before the first iteration and before ``iter(loader)``.

        Args:
            step: Go back to this step, the same on all ranks; later checkpoints are left behind.
                This happens once per launch: a restart by the same launcher takes the newest.
            strict: Refuse state that exists only in the script or only in the checkpoint. False
                keeps the former, ignores the latter and logs both.
            only: Names of ``state`` to load; the rest and the random streams keep their values.

        Returns:
            What was restored, or None if the job has no checkpoint or starts over (``fresh``).

        Raises:
            NotFoundError: ``step`` cannot be restored; the message names the steps that can.
            UnavailableError: no checkpoint was chosen within ``HOLDFAST_RESTORE_TIMEOUT`` seconds.
            AlreadyExistsError: another launch trains this job now.
            CorruptionError: the job has checkpoints, but none can be read; the message says why.
        """
        if self._loaded:
            raise PreconditionError(
                "restore() was called already: call it once, before the first step", job=self._job
            )
        self._require_open()
        made_since = self._saver is not None
        if made_since and step is not None:
            raise PreconditionError(
                "decide() has chosen the checkpoint already: pass step= to decide()", job=self._job
            )
        if made_since:
            self._capture.check()
            check_follows(self.state)
        scope = Scope.of(self.state, strict=strict, only=only)
        expected = self._decided if made_since else self._decide(step, scope)
        saver = self._saver
        assert saver is not None
        try:
            if made_since:
                self._admit()
            restored = restore(
                self._session,
                self._capture,
                saver.arena,
                timeout_s=timeout(os.environ),
                lost_is_fresh=self._on_failure == "warn",
                scope=scope,
                expected=expected,
                admit_whole=self._admit_whole,
            )
        except (CheckpointError, KeyboardInterrupt):
            self._end(FAILED_CLOSE_S_MAX)
            raise
        self._capture.forget()
        self._loaded = True
        took_s = restored.seconds.values() if restored else ()
        self._pace.begin(saver.record, took_s, time.monotonic())
        if restored is not None:
            self._progress.step = restored.step
            saver.restored(restored.step, restored.attempt)
        self._preemption = Preemption(self._policy.signals(), grace_s=grace_s(self._policy))
        self._round_end = RoundEnd(self._session, self._preemption)
        atexit.register(self._at_exit)
        return restored

    def _join(self, timeout_s: float, start: Start | None) -> Saver:
        """Take part in the attempt; from here on the rpc threads run."""
        spec = self._terms.spec(start, names_needs=self._capture.names_needs)
        seat = self._session.open(spec, self._arena, timeout_s=timeout_s)
        saver = Saver(
            capture=self._capture,
            session=self._session,
            spec=spec,
            seat=seat,
            arena=self._arena,
            guard=self._guard,
            at_exit=self._policy.at_exit,
        )
        self._session.start(saver.on_view)
        return saver

    def step(self, step: int, *, notes: Mapping[str, object] | None = None) -> SaveHandle | None:
        """Tell that ``step`` optimizer steps are done, and save if a save is due.

        Call it last in the iteration, on all ranks with the same numbers, if not with each of them.
        A repeated or lower ``step`` does nothing; if it shows a wrong count, it warns once.
        ``notes`` of rank 0 are stored with a save: plain values such as ``{"loss": 0.3}``, at most
        4 KiB as JSON.

        Returns the handle of the save, or None if no save was due.

        Raises:
            PreconditionError: ``restore()`` was not called, or this Checkpointer is closed.
            InvalidRequestError: ``step`` is not a whole number from 0.
            CheckpointError: with ``on_failure="raise"``, the error of an earlier save.
            NonFiniteError: the guard has refused as many saves in a row as ``stop_after`` says.
            SystemExit: after a signal, once the last save is safe (``OnPreemption``).
        """
        saver, step = self._require_saver(), step_number(step)
        if os.getpid() != self._pid or self._has_ended():
            return None
        if step <= self._progress.step:
            if self._progress.is_behind(step):
                saver.note_behind(step, self._progress.step)
            return None
        failure = saver.take_failure()
        if failure is not None and self._on_failure == "raise":
            raise failure
        saver.check_refusals()
        self._progress.advance(step, time.monotonic())
        announcement = self._session.view.announcement
        announced = saver.note_step(step, announcement, notes)
        alone = self._place.world_size == 1
        ending = self._preemption is not None and self._preemption.asked
        due = self._policy.due(step) or announced
        due = not self._paused and (due or (alone and (ending or self._save_asked)))
        if due:
            self._save_asked = False  # before the save: what is asked from here on is another one
        self._report(saver, ending=ending)
        handle = self.save(step, notes=notes) if due else None
        saver.leave(step)
        if handle and announcement and announced and self._round_end:
            ending = self._round_end.saved(announcement, handle) or ending
        if ending:
            self._end_after(handle, saved=announced or alone)
        return handle

    def _report(self, saver: Saver, *, ending: bool) -> None:
        """Say where this rank is, what saves cost it, and whether and why it asks for one."""
        asked = SaveReason.USER if self._save_asked else SaveReason.UNSPECIFIED
        told = partial(
            self._progress.told,
            wish=self._pace.wish(saver.stall_s, time.monotonic(), stretch=saver.stretch),
            wants_save=SaveReason.PREEMPTION if ending else asked,
            stall_s=saver.stall_s,
            stalled_s=saver.stalled_s,
        )
        self._session.report(told)

    def request_save(self) -> None:
        """Ask for a save soon, at a step that all ranks agree on; returns at once.

        Any thread or signal handler may call it, on one rank or several. A single rank saves at
        its next ``step``, several at a step that is announced; while paused, after ``resume``.
        """
        self._save_asked = True

    def save(self, step: int, *, notes: Mapping[str, object] | None = None) -> SaveHandle:
        """Save now and return at once; call it on every rank with the same ``step``.

        Raises:
            PreconditionError: ``restore()`` was not called, this Checkpointer is closed, or this
                is a forked child.
        """
        saver, step = self._require_saver(), step_number(step)
        if os.getpid() != self._pid:
            raise PreconditionError("a forked child process cannot save", job=self._job)
        self._has_ended()
        if step > self._progress.step:
            self._progress.advance(step, time.monotonic())
        return saver.save(step, notes)

    def before_update(self) -> None:
        """Wait until captured tensors may change; call it before updates without an Optimizer."""
        self._require_saver().before_update()

    def pause(self) -> None:
        """Let ``step`` save nothing until ``resume``; call it on all ranks alike."""
        self._paused = True

    def resume(self) -> None:
        """Let ``step`` save again when a save is due."""
        self._paused = False

    def close(self, timeout_s: float = CLOSE_S_MAX) -> None:
        """Wait at most ``timeout_s`` until the newest save is safe, then end the session.

        Safe: ``replicated``, or ``local`` without copies or nodes for them. A repeat is harmless.

        Raises:
            CheckpointError: the newest save is not safe; the message has its step and level. A
                whole checkpoint in memory may still be committed later.
        """
        if error := self._close(timeout_s, in_order=True):
            raise error

    def _close(self, timeout_s: float, *, in_order: bool) -> CheckpointError | None:
        """Close; return what the newest save has not reached. ``in_order``: it is no failure."""
        if self._closed or os.getpid() != self._pid:
            return None
        self._closed = True
        atexit.unregister(self._at_exit)
        deadline = time.monotonic() + timeout_s
        if self._round_end is not None:
            self._round_end.close()
        last = in_order and self._policy.at_exit and not self._paused
        error = self._saver.close(timeout_s, save_last=last) if self._saver else None
        if in_order:
            self._session.report(closed)
        self._session.close(timeout_s=max(1.0, deadline - time.monotonic()))
        self._capture.release()
        return error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:
            self._at_exit(error)

    def _at_exit(self, error: BaseException | None = None) -> None:
        """Close; after an uncaught exception hardly wait: a launcher waits to start us again."""
        failed = has_failed(error)
        if failed and self._saver is not None:
            self._saver.await_kept(CLOSE_S_MAX)  # nobody could find out any more what was broken
        self._end(FAILED_CLOSE_S_MAX if failed else CLOSE_S_MAX, in_order=not failed)

    def _end(self, timeout_s: float, *, in_order: bool = False) -> None:
        """Close where nothing can be raised any more: what is not safe is logged."""
        if error := self._close(timeout_s, in_order=in_order):
            # One of many steps: when it was given up it was said, and training went on.
            level = logging.WARNING if self._saver and self._saver.passed_by else logging.ERROR
            log.log(level, "job %s: %s", self._job, error.message)

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
        named = self._saver is None or self._session.spec.names_needs
        return self._terms.admit(self._session, self._capture.estimate(), named=named)

    def _admit_whole(self) -> None:
        """Check that a whole checkpoint fits, as a rank needs it that else names a part (P8).

        Of tensors that ranks hold together the sum is the same whoever saved them; of each rank's
        own it is not known here.
        """
        if self._capture.boxes is not None:
            self._terms.admit(self._session, self._capture.estimate(), named=False)

    def _require_open(self) -> None:
        """Refuse to restore what no session holds: its bytes could be replaced while read."""
        if self._closed:
            raise PreconditionError("this Checkpointer is closed: make another one", job=self._job)

    def _has_ended(self) -> bool:
        """Tell whether a signal has ended the saves; then the script's own handler lets it go on.

        Raises:
            PreconditionError: ``close()`` has ended them.
        """
        if self._closed and not (self._preemption and self._preemption.asked):
            raise PreconditionError(
                "this Checkpointer is closed and saves nothing any more: call close() after the "
                "last step, or make another one",
                job=self._job,
            )
        return self._closed

    def _require_saver(self) -> Saver:
        if self._saver is None:
            raise PreconditionError(
                "call restore() before the first step: it finds the job's newest checkpoint",
                job=self._job,
            )
        if not self._loaded:
            raise PreconditionError(
                "call restore() before the first step, also if decide() returned None: decide() "
                "only says what will be loaded",
                job=self._job,
            )
        return self._saver

    def _end_after(self, handle: SaveHandle | None, *, saved: bool) -> None:
        """After a signal: end once the agreed step is safe, or the grace period is over."""
        assert self._preemption is not None
        if not self._preemption.is_over(saved=saved):
            return
        self._preemption.await_copies(handle, self._job)
        self._end(max(1.0, self._preemption.left_s), in_order=True)
        self._preemption.finish()
