"""One rank's saves: the thin shell around the save machine, which has all the rules.

Three threads come here: training (``save``, ``note_step``), copy (a copy has ended) and watch (the
agent's news). One lock guards the machine's state, and what is told with each change of it; what
may take time is done after the lock is let go, by the thread that came.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.copying.cuda import CUDA
from holdfast.copying.port import Devices
from holdfast.core.announcements import Announcement
from holdfast.core.attempts import AttemptSpec, Seat
from holdfast.core.reports import RankReport, StepNote
from holdfast.core.session import SessionView
from holdfast.errors import CheckpointError, InvalidRequestError, NonFiniteError
from holdfast.format.notes import step_note
from holdfast.guards import RefuseNonFinite
from holdfast.said import is_first_to_say
from holdfast.snapshot.plan import Source
from holdfast.training.handles_by_step import Handles
from holdfast.training.plan_doubts import PlanDoubts
from holdfast.training.save_handle import SaveHandle
from holdfast.training.save_machine import events as ev
from holdfast.training.save_machine.rules import handle
from holdfast.training.save_machine.state import Author, SaveState
from holdfast.training.save_performer import SavePerformer
from holdfast.training.session import AgentSession
from holdfast.training.unsaved_steps import reason_text

PASSED_COUNT_MAX = 1024
"""Steps that are remembered, for news of them that comes too late."""
UNSEEN = (
    "an optimizer was not seen to step, or is replayed by a CUDA graph, which nobody is told of: "
    "the state may be that of another step"
)


class Saver:
    """Saves the state of one rank; the module says which threads call it, and under which lock.

    ``stall_s`` is what the newest save has cost the training thread, ``stalled_s`` what all have;
    ``arena`` is the slots' folder, ``record`` what became of the attempts before. ``passed_by``: at
    its close the newest save had been given up, and training had gone on since.
    """

    def __init__(
        self,
        *,
        capture: Source,
        session: AgentSession,
        spec: AttemptSpec,
        seat: Seat,
        arena: Path,
        devices: Devices = CUDA,
        guard: RefuseNonFinite | None = None,
        at_exit: bool = False,
    ) -> None:
        self.stall_s = 0.0
        self.stalled_s = 0.0
        self.passed_by = False
        self._guard = guard
        self.arena = arena
        self.record = seat.record
        self._capture = capture
        self._session = session
        self._rank = spec.rank
        self._state = SaveState(Author(spec.job, seat.run, seat.generation, spec.rank))
        self._lock = threading.RLock()
        self._handles = Handles(spec.persist)
        self._performer = SavePerformer(
            capture=capture,
            session=session,
            spec=spec,
            seat=seat,
            arena=arena,
            on_end=self._handle,
            devices=devices,
            guard=guard,
        )
        self._doubts = _doubts(spec, session) if spec.rank == 0 else None
        self._done = (-1, 0)
        self._saved_at = 0
        self._passed: deque[int] = deque(maxlen=PASSED_COUNT_MAX)
        self._left = -1
        self._heard: Announcement | None = None
        self._at_exit = at_exit
        self._last_notes: Mapping[str, object] | None = None
        self._waited_s = 0.0
        self._steps_seen = 0
        self._warned_idle = self._warned_behind = False
        self._tellings: dict[type, Callable[[Any], None]] = {
            ev.Post: self._post,
            ev.Stage: lambda action: self._handles.stage(action.step),
            ev.Fail: lambda action: self._handles.fail(action.step, action.error),
            ev.FailAll: lambda action: self._handles.fail_all(action.error),
            ev.Learn: lambda action: self._handles.learn(action.steps),
            ev.LackCopies: lambda action: self._handles.lack_copies(action.reason),
        }
        if at_exit:
            self._performer.engine.start()  # while a thread can: from 3.12 on none does at exit

    @property
    def stretch(self) -> float:
        """Factor on a time trigger's interval while steps are abandoned one after another."""
        return self._state.stretch

    @property
    def abandoned_count(self) -> int:
        """How many steps were not saved."""
        return self._state.lapse.lost_count

    def check_refusals(self) -> None:
        """Do nothing unless the guard has refused as many steps in a row as it takes to stop.

        Raises:
            NonFiniteError: it has; names what was not finite.
        """
        count = self._state.refused_count
        if self._guard and 0 < self._guard.stop_after <= count:
            raise NonFiniteError(
                f"{count} saves in a row were refused: NaN or infinity in "
                f"{', '.join(self._state.refused_names)}; the newest step that was saved is older"
            )

    def _handle(self, event: ev.SaveEvent | None) -> None:
        """Have the machine handle ``event`` and what answers its actions, until nothing is left."""
        while event is not None:
            with self._lock:
                self._state, actions = handle(self._state, event, now_s=time.monotonic())
                for action in actions:
                    if isinstance(action, ev.Tell):
                        self._tellings[type(action)](action)
            event = None
            for action in actions:
                if isinstance(action, ev.Do):
                    event = self._performer.do(action)

    def _post(self, action: ev.Post) -> None:
        self._session.post(
            saving=action.saving,
            sealed_before=action.sealed_before,
            note=action.note,
            wants_slot=action.wants_slot,
            abandoned=action.abandoned,
            closed_slot=action.closed_slot,
            event=action.event,
        )

    def restored(self, step: int, generation: int) -> None:
        """Record that training begins with this checkpoint: the parent of all later ones."""
        self._passed.append(step)
        self._handle(ev.Loaded(step, generation))

    def save(self, step: int, notes: Mapping[str, object] | None = None) -> SaveHandle:
        """Snapshot the state as that of ``step``; the handle shows the progress of the save.

        ``notes`` go with it; those that cannot are left out, loudly: they never cost a save.
        """
        known = self._handles.get(step)
        if known is not None:
            return known
        if not self._passed or self._passed[-1] < step:
            self._passed.append(step)
        self._settle_stall()
        self._look_around()
        self._saved_at = self._performer.gate.updates_count
        started_s = time.perf_counter()
        note = self._note(step, notes)
        with self._lock:  # the watch thread tells the handles what is new
            made = self._handles.make(step)
        suspects: tuple[str, ...] = ()
        if self._guard is not None and (bad := self._guard.bad_notes(notes)):
            named = tuple(f"notes[{name!r}]" for name in bad)
            if self._guard.keep is None:
                self._handle(ev.NonFinite(step, named))
                return made
            self._performer.suspect(step, named)
            suspects = named
        made.on_wait = partial(self._pay, step)
        self._try(step, ev.Due(step, note, bool(self._session.lost_agent), suspects))
        if self._doubts is not None:
            self._doubts.begun(step, self._state.author.run, self._state.author.generation)
        self._cost(made, time.perf_counter() - started_s)
        return made

    def _try(self, step: int, event: ev.SaveEvent) -> None:
        """Handle ``event`` on the training thread: what is raised costs that save, not the run.

        What ends a process (Ctrl-C) goes on to the caller, once the slot is free again and nobody
        waits for the step.
        """
        try:
            self._performer.let_go()  # what a second Ctrl-C may have left
            self._handle(event)
        except BaseException as cause:
            if not self._performer.let_go():
                error = cause if isinstance(cause, CheckpointError) else None
                self._handle(ev.Failed(step, reason_text(cause), error))
            if not isinstance(cause, Exception):
                raise

    def _look_around(self) -> None:
        """Look for a copy that the gate gave up and for a closed slot that disappeared."""
        latest = self._performer.latest
        if latest is not None and latest.abandoned:
            self._handle(ev.CopyGivenUp(latest.step, latest.reason))
        self._look_for_slots()

    def _look_for_slots(self) -> None:
        """Look for a closed slot that disappeared, with the memory of an agent, say."""
        lost = self._performer.lost(self._state.saving)
        if lost:
            self._handle(ev.SlotsLost(lost))

    def _pay(self, step: int, deadline: float) -> None:
        """Save ``step``, if it is owed, as it was, now that its caller waits for it.

        If what it was is gone, it is given up.
        """
        moment = self._performer.owed
        if self._state.owed != step or moment is None or moment.thread != threading.get_ident():
            return
        self._look_around()
        awaited = ev.Awaited(
            left_s=max(0.0, deadline - time.monotonic()),
            changed=self._performer.has_changed(moment),
            agent_lost=bool(self._session.lost_agent),
        )
        self._try(step, awaited)

    def give_up(self, step: int, error: CheckpointError) -> None:
        """Have all ranks give ``step`` up, because this one does not save it."""
        self._handle(ev.Failed(step, reason_text(error), error))

    def before_update(self) -> None:
        """Wait until nothing is being copied; the explicit gate."""
        self._performer.gate.before_update()

    def note_step(
        self,
        step: int,
        announced: Announcement | None = None,
        notes: Mapping[str, object] | None = None,
    ) -> bool:
        """Record that ``step`` is done; tell whether it is the one to save for ``announced``.

        That is the first one at or after the step announced to all ranks: they count alike, but not
        by ones if a script tells of each tenth step only. ``notes`` are what is said of ``step``,
        should it be the last one, to be saved at exit.

        Warns, once, when steps are counted and no optimizer moves.
        """
        state = self._state
        newest = announced.step if announced else 0
        is_asked = False
        if state.owed is not None or newest > state.answered:  # else there is nothing to settle
            reached = self._reached(newest, step)
            lost, known = bool(self._session.lost_agent), reached in self._handles
            is_asked = state.answered < newest and reached == step
            self._handle(ev.Stepped(step, announced, reached, known=known, agent_lost=lost))
        self._passed.append(step)
        gate = self._performer.gate
        counts = self._performer.latest is not None and not gate.blind
        idle = counts and gate.steps_count == self._steps_seen
        self._steps_seen = gate.steps_count
        self._done = (step, gate.updates_count)
        if self._at_exit:
            self._last_notes = dict(notes) if isinstance(notes, dict) else notes
        if idle and self._capture.optimizers and not self._warned_idle:
            self._warned_idle = True
            _warn(
                f"step({step}): no captured optimizer has stepped since the last call; step counts "
                f"optimizer steps, not micro-batches",
                stacklevel=4,
            )
        return is_asked

    def _reached(self, announced: int, step: int) -> int:
        """Return the first step at or after ``announced`` that training has told of.

        ``announced`` itself if it is still to come, or was passed too long ago to know.
        """
        forgotten = len(self._passed) == PASSED_COUNT_MAX and self._passed[0] >= announced
        if announced > step or forgotten:
            return announced
        passed = tuple(self._passed)  # the watch thread asks, too
        return next((one for one in passed if one >= announced), step)

    def leave(self, step: int) -> None:
        """Note that all was done for ``step``: what is announced of it from now on comes late."""
        self._left = step
        self._decline()

    def _decline(self) -> None:
        """Give up at once what was announced for a step that this rank has left without a save.

        Ranks that have saved it may wait at it, and this one for them inside its next step: whoever
        said so only with that would have all wait for nothing. Called on both threads.
        """
        heard, left = self._heard, self._left
        if heard is None or not self._state.answered < heard.step <= left:
            return
        reached = self._reached(heard.step, left)
        if reached not in self._handles or self._state.owed == reached:
            self._handle(ev.HeardLate(left, heard, reached))

    def note_behind(self, step: int, newest: int) -> None:
        """Warn, once, if an optimizer has stepped and ``step`` is counted as before ``newest``."""
        if self._performer.gate.steps_count == self._steps_seen or self._warned_behind:
            return
        self._warned_behind = True
        _warn(
            f"step({step}) does nothing after step {newest}, but an optimizer has stepped since: n "
            f"counts completed optimizer steps, over all epochs and restarts; go on from "
            f"restored.step, and call step(n) after the n-th",
            stacklevel=4,
        )

    def take_failure(self) -> CheckpointError | None:
        """Return what went wrong since the last call, once."""
        if self._state.failure is None:
            return None
        with self._lock:
            failure = self._state.failure
            self._handle(ev.FailureTaken())
        return failure

    def on_view(self, view: SessionView) -> None:
        """Take a new view of the agent; called on the watch thread."""
        self._performer.twins.offer(view.twins)  # first: a slot of its own begins the next save
        self._heard = view.announcement
        self._handle(ev.View(view))
        self._decline()
        self._look_for_slots()  # training may wait for that very step
        if self._doubts is not None:
            self._doubts.hear(view)

    def await_kept(self, timeout_s: float) -> None:
        """Wait, bounded, until what was refused is written for people, if something is."""
        if self._performer.refused_parts is not None:
            self._performer.refused_parts.wait(timeout_s)

    def close(self, timeout_s: float, *, save_last: bool = False) -> CheckpointError | None:
        """Wait, bounded, until the newest save is as safe as it can be; return why it is not.

        A step that found no slot is saved now, unless something has been updated since. So is, with
        ``save_last``, the last step that was done; that takes the time of any first save.
        """
        state = self._state
        idle = self._done[0] < 0 and not state.saves_count and state.parent is None
        if idle and self._performer.gate.steps_count and self._capture.optimizers:
            _warn(
                "nothing was saved: step() was never called, and optimizers have stepped; call "
                "step(n) after the n-th optimizer step",
                stacklevel=5,
            )
        if save_last:
            self._save_last()
        deadline = time.monotonic() + max(timeout_s, 0.0)

        def left_s() -> float:
            return 0.0 if self._hangs() else max(0.0, deadline - time.monotonic())

        performer = self._performer
        performer.engine.wait(left_s())
        if self._state.owed is not None:
            self._pay(self._state.owed, deadline)
        lost = bool(self._session.lost_agent)
        self._handle(ev.Stepped(self._state.newest, agent_lost=lost))
        performer.engine.wait(left_s())
        performer.gate.uninstall()
        error: CheckpointError | None = None
        newest = self._handles.newest
        if newest is not None:
            self.passed_by = newest.abandoned and performer.gate.updates_count != self._saved_at
            try:
                newest.wait_copies(max(0.0, deadline - time.monotonic()))
            except CheckpointError as cause:
                why = f" ({self._session.view.degraded})" if self._session.view.degraded else ""
                error = type(cause)(f"training ends, but {cause.message}{why}", step=newest.step)
        performer.engine.close(left_s())
        if performer.refused_parts is not None:
            performer.refused_parts.close(left_s())
        self._settle_stall()
        self._session.report(self._with_stall)
        self._handle(ev.Closing())
        performer.pool.close()
        performer.twins.close()
        return error

    def _save_last(self) -> None:
        """Save the step that was done last, unless it is saved or another one has begun."""
        step, updates = self._done
        if step <= self._state.newest:
            return
        if self._performer.may_differ(updates):
            stepped = updates != self._performer.gate.updates_count
            _warn(
                f"step {step} is not saved at exit, as an optimizer has stepped since "
                f"step({step}): the state is another one; call step() before you end"
                if stepped
                else f"step {step} is not saved at exit, as {UNSEEN}; call save({step}) at the end",
                stacklevel=5,
            )
            return
        self._doubts = None  # a look at other ranks would take a thread, and none starts at exit
        self.save(step, self._last_notes)

    def _hangs(self) -> bool:
        """Tell whether a copy was given up that may never end: it has been waited for enough."""
        latest = self._performer.latest
        return latest is not None and latest.abandoned

    def _note(self, step: int, notes: Mapping[str, object] | None) -> StepNote | None:
        """Return what the user says of ``step``; rank 0 says it for all."""
        if notes is None or self._rank:
            return None
        try:
            return step_note(step, notes)
        except InvalidRequestError as error:
            refused = error
        except Exception as cause:  # noqa: BLE001 - values of the user's raise what they like
            refused = InvalidRequestError(f"notes cannot be read: {reason_text(cause)}")
        self._handle(ev.NoteRefused(step, refused))
        return None

    def _settle_stall(self) -> None:
        """Add to the newest save what the gate has waited for it since."""
        gate = self._performer.gate
        waited_s, self._waited_s = gate.waited_s - self._waited_s, gate.waited_s
        newest = self._handles.latest
        if newest is not None:
            self._cost(newest, waited_s)
            self.stall_s = newest.stall_s

    def _with_stall(self, report: RankReport) -> RankReport:
        """Return the report with the last save's cost: no step follows that would tell it."""
        costs = replace(report.costs, stall_s=self.stall_s, stalled_s=self.stalled_s)
        return replace(report, costs=costs)

    def _cost(self, save: SaveHandle, waited_s: float) -> None:
        save.stall_s += waited_s
        self.stalled_s += waited_s


def _doubts(spec: AttemptSpec, session: AgentSession) -> PlanDoubts:
    return PlanDoubts(
        spec.job,
        spec.world_size,
        session.heads,
        lambda event: session.post(event=event),
        lambda look: session.spawn("plan", look),
    )


def _warn(text: str, *, stacklevel: int) -> None:
    if is_first_to_say(text):
        warnings.warn(text, stacklevel=stacklevel)
