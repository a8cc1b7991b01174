"""One rank's saves: from "this step is due" to a closed slot, and what became of each.

The training thread waits here for three things only, each bounded: the end of an earlier copy
(``GATE_S_MAX``), a free slot (``BUSY_WAIT_S_MAX``, or ``RETURN_S_MAX`` if one is on its way back;
none at all after a save that found none), and the slots of a new plan (once per plan: its memory
must be made first). Whatever fails, the step is abandoned for the attempt, said so, and training
goes on (P4). A step that found no slot is *owed* until training goes on: ``close`` still saves
it, and so does who waits for its handle.
"""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.core.attempts import AttemptSpec, Seat
from holdfast.core.budget import slots_per_rank
from holdfast.core.facts import AbandonedStep, Event
from holdfast.core.reports import StepNote
from holdfast.core.session import SessionView
from holdfast.core.slots import SlotName, SlotState
from holdfast.errors import (
    CheckpointError,
    ExhaustedError,
    InvalidRequestError,
    PreconditionError,
    StaleGenerationError,
    UnavailableError,
)
from holdfast.format.notes import step_note
from holdfast.snapshot.buffer import SlotBuffer
from holdfast.snapshot.engine import CopyEngine, Snapshot
from holdfast.snapshot.gate import GATE_S_MAX, Gate
from holdfast.snapshot.plan import Moment, SavePlan, make_plan
from holdfast.snapshot.pool import SlotPool
from holdfast.state.capture import Capture
from holdfast.training.handle import Level, SaveHandle, postponed_step, rule_text
from holdfast.training.lapse import Lapse, reason_text
from holdfast.training.session import Reservation, Session

BUSY_WAIT_S_MAX = 0.05
RETURN_S_MAX = 1.0
NEW_PLAN_S_MAX = 30.0
REFUSED_PLAN_S = 30.0
HANDLES_COUNT_MAX = 64
EAGER_SAVES_MAX = 3
STRETCH_DOUBLINGS_MAX = 5

AWAY = "the node agent is away"
BEHIND = "earlier steps are not committed yet (save less often, or ask `holdfast doctor`)"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Owed:
    """A step that found no slot: who saved it, and what would tell that it is gone."""

    step: int
    updates: int
    thread: int
    plan: SavePlan
    moment: Moment


class Saver:
    """See the module. ``parent`` is the (step, generation) that this attempt was restored from.

    ``stall_s`` is what the newest save has cost the training thread, ``arena`` the slots' folder.
    """

    def __init__(
        self, *, capture: Capture, session: Session, spec: AttemptSpec, seat: Seat, arena: Path
    ) -> None:
        self.parent: tuple[int, int] | None = None
        self.stall_s = 0.0
        self._lapse = Lapse()
        self._capture = capture
        self._session = session
        self.arena = arena
        self._spec = spec
        self._seat = seat
        self._pool = SlotPool(arena)
        self._engine = CopyEngine(self._copied)
        self._gate = Gate(self._engine)
        self._plan: SavePlan | None = None
        self._refused: tuple[float, CheckpointError] | None = None
        self._handles: dict[int, SaveHandle] = {}
        self._latest: Snapshot | None = None
        self._saving: dict[int, SlotName | None] = {}  # None: not closed yet
        self._guard = threading.Lock()
        self._waited_s = 0.0
        self._steps_seen = 0
        self._patience_s = BUSY_WAIT_S_MAX
        self._owed: _Owed | None = None
        self._wishing = False
        self._fenced = False
        self._outage = False
        self._shortage = ""
        self._failure: CheckpointError | None = None
        self._warned_idle = self._warned_eager = False
        levels: list[Level] = ["staged", "local", "replicated"]
        self._reachable = frozenset([*levels, "durable"] if spec.persist.on else levels)
        self._rule = rule_text(spec.persist)

    @property
    def stretch(self) -> float:
        """Factor on a time trigger's interval while steps are abandoned one after another."""
        return float(2 ** min(self._lapse.in_row, STRETCH_DOUBLINGS_MAX))

    @property
    def abandoned_count(self) -> int:
        """How many steps were given up."""
        return self._lapse.count

    def save(self, step: int, notes: Mapping[str, object] | None = None) -> SaveHandle:
        """Snapshot the state as that of ``step``; the handle tells how it goes on.

        ``notes`` go with it; those that cannot are left out, loudly: they never cost a save.
        """
        known = self._handles.get(step)
        if known is not None:
            return known
        self._settle_stall()
        self._settle_owed()
        self._give_up_lost()
        if self._latest is not None and self._latest.abandoned:
            self._give_up(self._latest)
        started_s = time.perf_counter()
        handle = SaveHandle(step, reachable=self._reachable, rule=self._rule)
        self._remember(handle)
        handle.lack_copies(self._shortage)
        self._claim(step, self._note(step, notes))
        try:
            plan = self._ready_plan()
            if not self._copy(plan, step):
                updates = self._gate.updates_count
                self._owed = _Owed(step, updates, threading.get_ident(), plan, plan.moment())
                handle.on_wait = self._pay
        except Exception as cause:  # noqa: BLE001 - the user's code and torch run in it: see S4
            self._fail(step, cause)
        handle.stall_s += time.perf_counter() - started_s
        return handle

    def _copy(self, plan: SavePlan, step: int, slot_s_max: float | None = None) -> bool:
        """Begin the copy of ``step``; False: no slot within ``slot_s_max``, None: as patience is.

        If it fails, the slot is free for the next one.
        """
        buffer = self._take_slot(plan, step, slot_s_max)
        if buffer is None:
            return False
        begun = False
        try:
            self._begin(plan, buffer, step)
            begun = True
        finally:
            if not begun:
                self._pool.put_back(buffer)
        return True

    def abandon(self, step: int, reason: str, error: CheckpointError | None = None) -> None:
        """Give ``step`` up for all ranks; say so to its handle and, if it is news, to people."""
        failure = error or PreconditionError(reason, step=step)
        handle = self._handles.get(step)
        if handle is not None:
            handle.fail(failure)
        self._failure = failure
        self._release(step)
        text = self._lapse.lost(step, reason)
        if text:
            log.warning("job %s: %s; training goes on", self._spec.job, text)
        given_up = AbandonedStep(
            run=self._seat.run, step=step, generation=self._seat.generation, reason=reason
        )
        event = self._event("save_abandoned", text, step) if text else None
        self._session.post(abandoned=given_up, event=event)

    def _settle_owed(self) -> None:
        """Training has gone on: a step that found no slot cannot be saved any more."""
        if self._owed is not None:
            step, self._owed = self._owed.step, None
            reason = f"no free slot: {AWAY if self._session.lost_agent else BEHIND}"
            self.abandon(step, reason, ExhaustedError(reason, step=step))

    def _pay(self, deadline: float) -> None:
        """Save the owed step, as it was, now that its caller waits; give it up if that is gone."""
        owed = self._owed
        if owed is None or owed.thread != threading.get_ident() or self._fenced:
            return
        if owed.updates != self._gate.updates_count or self._plan is not owed.plan:
            self._settle_owed()
            return
        try:
            if (
                self._engine.wait(0.0 if self._hangs() else max(0.0, deadline - time.monotonic()))
                and owed.plan.go_back(owed.moment)
                and self._copy(owed.plan, owed.step, max(0.0, deadline - time.monotonic()))
            ):
                self._owed = None
        except Exception as cause:  # noqa: BLE001 - as in save
            self._owed = None
            self._fail(owed.step, cause)

    def _fail(self, step: int, cause: Exception) -> None:
        self.abandon(
            step, reason_text(cause), cause if isinstance(cause, CheckpointError) else None
        )

    def has_saved(self, step: int) -> bool:
        """Tell whether this rank began to save ``step``."""
        return step in self._handles

    def before_update(self) -> None:
        """Wait until nothing is being copied; the explicit gate."""
        self._gate.before_update()

    def note_step(self, step: int) -> None:
        """Take that ``step`` is done; warn, once, when steps are counted and no optimizer moves."""
        self._settle_owed()
        idle = self._latest is not None and self._gate.steps_count == self._steps_seen
        self._steps_seen = self._gate.steps_count
        if idle and self._capture.optimizers and not self._warned_idle:
            self._warned_idle = True
            warnings.warn(
                f"step({step}): no captured optimizer has stepped since the last call; step counts "
                f"optimizer steps, not micro-batches",
                stacklevel=3,
            )

    def take_failure(self) -> CheckpointError | None:
        """Return what went wrong since the last call, once."""
        failure, self._failure = self._failure, None
        return failure

    def on_view(self, view: SessionView) -> None:
        """Take over the agent's news; on the watch thread."""
        self._learn_outage(view.degraded)
        postponed = postponed_step(self._spec.persist, view.steps)
        for levels in view.steps:
            handle = self._handles.get(levels.step)
            if handle is not None:
                handle.learn(levels, postponed=levels.step == postponed)
            text = self._lapse.saved(levels.step) if levels.local else ""
            if text:
                log.warning("job %s: %s", self._spec.job, text)
            if levels.sealed or levels.abandoned:
                self._release(levels.step)
        # Last: whoever takes a slot knows by now what became of the step that lay in it.
        self._pool.offer(view.leases)
        if view.shortage != self._shortage:
            self._learn_shortage(view.shortage)
        if view.fenced and not self._fenced:
            self._fenced = True
            self._failure = StaleGenerationError("a newer attempt of this job trains: stop here")
            self._end_handles(self._failure)
            log.error("job %s: %s; nothing is saved any more", self._spec.job, self._failure)

    def _end_handles(self, error: CheckpointError) -> None:
        """Let nobody wait for what will not come."""
        for handle in list(self._handles.values()):
            if not handle.ended:
                handle.fail(error)

    def _learn_outage(self, degraded: str) -> None:
        """Say once that nothing is committed, and once that it is again."""
        if bool(degraded) == self._outage:
            return
        self._outage = bool(degraded)
        text = "metadata answers again, saves are committed"
        if degraded:
            text = f"{degraded}; saves go on, the newest of them waits in memory to be committed"
        log.warning("job %s: %s", self._spec.job, text)

    def _learn_shortage(self, reason: str) -> None:
        """Say once that steps get no further than ``local``; saves go on."""
        self._shortage = reason
        for handle in list(self._handles.values()):
            handle.lack_copies(reason)
        if reason and self._spec.rank == 0:
            advice = "start more node agents, or ask for fewer replicas"
            log.warning("job %s: steps stay local: %s; %s", self._spec.job, reason, advice)

    def close(self, timeout_s: float) -> CheckpointError | None:
        """Wait, bounded, for the newest save to get where it can; return why it did not.

        A step that found no slot is saved now, unless something has been updated since.
        """
        deadline = time.monotonic() + max(timeout_s, 0.0)
        self._engine.wait(0.0 if self._hangs() else max(timeout_s, 0.0))
        self._pay(deadline)
        self._settle_owed()
        self._engine.wait(max(0.0, deadline - time.monotonic()))
        self._gate.uninstall()
        error: CheckpointError | None = None
        newest = max(self._handles.values(), key=lambda handle: handle.step, default=None)
        if newest is not None:
            try:
                newest.wait_copies(max(0.0, deadline - time.monotonic()))
            except CheckpointError as cause:
                why = f" ({self._session.view.degraded})" if self._session.view.degraded else ""
                error = type(cause)(f"training ends and {cause.message}{why}", step=newest.step)
        self._engine.close(0.0 if self._hangs() else max(0.0, deadline - time.monotonic()))
        self._end_handles(PreconditionError("the checkpointer was closed"))
        self._pool.close()
        return error

    def _hangs(self) -> bool:
        """Tell whether a copy was given up that may never end: it has been waited for enough."""
        return self._latest is not None and self._latest.abandoned

    def _ready_plan(self) -> SavePlan:
        """Return the plan of the state as it is now; a new one has its slots reserved."""
        if self._fenced:
            raise StaleGenerationError("a newer attempt of this job trains")
        if not self._engine.wait(0.0 if self._hangs() else GATE_S_MAX):
            self._engine.abandon("the next save came first")
            raise UnavailableError("the copy of an earlier step hangs")
        plan = self._plan
        if plan is None or not plan.is_current():
            plan = self._plan = make_plan(
                self._capture,
                job=self._spec.job,
                run=self._seat.run,
                generation=self._seat.generation,
                rank=self._spec.rank,
                world_size=self._spec.world_size,
            )
            self._refused = None
            self._reserve(plan)
        elif self._refused is not None:
            since_s, error = self._refused
            if time.monotonic() - since_s < REFUSED_PLAN_S:
                raise error
            self._reserve(plan)
        return plan

    def _reserve(self, plan: SavePlan) -> None:
        # Slots of the same plan stay: to the agent nothing has changed, it leases no new ones.
        self._pool.reset(keep=plan.plan_hash)
        self._patience_s = NEW_PLAN_S_MAX
        try:
            self._session.reserve(
                Reservation(
                    plan_hash=plan.plan_hash,
                    length_bytes=plan.length_bytes,
                    slots=slots_per_rank(persist=self._spec.persist.on),
                    checkpoint_bytes=self._capture.estimate().checkpoint_bytes,
                )
            )
        except CheckpointError as error:
            self._refused = (time.monotonic(), error)
            raise
        self._refused = None

    def _take_slot(self, plan: SavePlan, step: int, slot_s_max: float | None) -> SlotBuffer | None:
        buffer = self._pool.acquire(plan.plan_hash, 0.0)
        if buffer is None:
            self._wishing = True
            self._session.post(wants_slot=step)
            wait_s = self._slot_wait_s(step) if slot_s_max is None else slot_s_max
            buffer = self._pool.acquire(plan.plan_hash, wait_s)
        # One wait is enough to learn that protection is behind: until a slot is free again, later
        # saves are given up at once instead of stopping the training thread each time.
        self._patience_s = BUSY_WAIT_S_MAX if buffer is not None else 0.0
        if buffer is not None and self._wishing:
            self._wishing = False
            self._session.post(wants_slot=0)
        return buffer

    def _slot_wait_s(self, step: int) -> float:
        """Return how long the training thread waits for a slot that is not there.

        When all copies of the save before are made, the slot before that is only a report and its
        answer away (4.7). While copies are missing nobody knows how long it takes.
        """
        if self._session.lost_agent or not self._patience_s:
            return 0.0
        before = [handle for handle in self._handles.values() if handle.step < step]
        newest = max(before, key=lambda handle: handle.step, default=None)
        returning = newest is not None and newest.copied and not self._outage
        return max(self._patience_s, RETURN_S_MAX) if returning else self._patience_s

    def _begin(self, plan: SavePlan, buffer: SlotBuffer, step: int) -> None:
        optimizers = self._capture.optimizers
        defer = self._gate.trusts(optimizers)
        if not defer and optimizers and len(self._handles) > EAGER_SAVES_MAX:
            self._say_eager(step)
        self._latest = self._engine.begin(
            plan,
            buffer,
            step=step,
            generation=self._seat.generation,
            parent=self.parent,
            defer=defer,
        )

    def _say_eager(self, step: int) -> None:
        if not self._warned_eager:
            self._warned_eager = True
            reason = "no optimizer step was seen between two saves: all is copied before returning"
            self._session.post(event=self._event("save_eager", reason, step))

    def _copied(self, snapshot: Snapshot) -> None:
        """The copy has ended, well or not; on the copy thread (or the caller's, if all eager)."""
        if snapshot.abandoned:
            self._pool.put_back(snapshot.buffer)
            self._give_up(snapshot)
            return
        buffer = snapshot.buffer
        closed = SlotName(buffer.slot, buffer.incarnation, SlotState.CLOSED)
        try:
            buffer.close_slot()
        except CheckpointError as error:
            self._pool.forget(buffer)
            self.abandon(snapshot.step, error.message, error)
            return
        with self._guard:
            if snapshot.step in self._saving:  # else it is sealed already
                self._saving[snapshot.step] = closed
        copy_s, size = snapshot.copy_s, snapshot.plan.length_bytes
        self._session.report(
            lambda r: replace(r, costs=replace(r.costs, copy_s=copy_s, save_bytes=size))
        )
        handle = self._handles.get(snapshot.step)
        if handle is not None:
            handle.reach("staged")
        self._session.post(closed_slot=buffer.slot)

    def _claim(self, step: int, note: StepNote | None) -> None:
        """Say that this rank has begun ``step``: until it is sealed, all others wait for it."""
        with self._guard:
            self._saving[step] = None
            self._session.post(saving=tuple(self._saving), note=note)

    def _note(self, step: int, notes: Mapping[str, object] | None) -> StepNote | None:
        """Return what the user says of ``step``; rank 0 says it for all."""
        if notes is None or self._spec.rank:
            return None
        try:
            return step_note(step, notes)
        except InvalidRequestError as error:
            self._failure = error
            reason = f"step {step} is saved without its notes: {error}"
            log.warning("job %s: %s", self._spec.job, reason)
            self._session.post(event=self._event("notes_refused", reason, step))
            return None

    def _release(self, step: int) -> None:
        with self._guard:
            if step in self._saving:
                del self._saving[step]
                self._session.post(saving=tuple(self._saving))

    def _give_up(self, snapshot: Snapshot) -> None:
        """Abandon the step of a copy that was given up, once; its thread may still hang."""
        handle = self._handles.get(snapshot.step)
        if handle is None or not handle.abandoned:
            self.abandon(snapshot.step, snapshot.reason)

    def _give_up_lost(self) -> None:
        """Abandon closed steps whose slot has gone: not sealed, or lost with the agent's arena."""
        with self._guard:
            closed = [(step, name) for step, name in self._saving.items() if name is not None]
        for step, name in closed:
            names = (name.file_name, name.to(SlotState.SEALED).file_name)
            if not any((self.arena / entry).exists() for entry in names):
                self.abandon(step, "its segment was lost before it was sealed")

    def _settle_stall(self) -> None:
        """Add to the newest save what the gate has waited for it since."""
        waited_s, self._waited_s = self._gate.waited_s - self._waited_s, self._gate.waited_s
        newest = next(reversed(self._handles.values()), None)
        if newest is not None:
            newest.stall_s += waited_s
            self.stall_s = newest.stall_s

    def _remember(self, handle: SaveHandle) -> None:
        self._handles[handle.step] = handle
        while len(self._handles) > HANDLES_COUNT_MAX:
            # A drain is slow: many later steps begin and end before its handle has learned all.
            ended = (step for step, known in self._handles.items() if not known.draining)
            del self._handles[next(ended, next(iter(self._handles)))]

    def _event(self, kind: str, message: str, step: int) -> Event:
        context = {
            "step": str(step),
            "rank": str(self._spec.rank),
            "abandoned": str(self.abandoned_count),
        }
        return Event(
            kind=kind, severity="warning", message=message, job=self._spec.job, context=context
        )
