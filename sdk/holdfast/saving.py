"""One rank's saves: from "this step is due" to a closed slot, and what became of each.

The training thread waits here for three things only, each bounded: the end of an earlier copy
(``GATE_S_MAX``), a free slot (``BUSY_WAIT_S_MAX``; none at all after a save that found none), and
the slots of a new plan (once per plan: its memory must be made first). Whatever fails, the step
is abandoned for the attempt, said so, and training goes on (P4).
"""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections.abc import Mapping
from pathlib import Path

from holdfast.core.budget import slots_per_rank
from holdfast.core.facts import AbandonedStep, Event, PersistRule, StepNote
from holdfast.core.notes import step_note
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
from holdfast.handle import Level, SaveHandle, postponed_step
from holdfast.session import Attempt, Membership, Reservation, Session
from holdfast.snapshot.buffer import SlotBuffer
from holdfast.snapshot.engine import CopyEngine, Snapshot
from holdfast.snapshot.gate import GATE_S_MAX, Gate
from holdfast.snapshot.plan import SavePlan, make_plan
from holdfast.snapshot.pool import SlotPool
from holdfast.state.capture import Capture

BUSY_WAIT_S_MAX = 2.0
NEW_PLAN_S_MAX = 30.0
REFUSED_PLAN_S = 30.0
HANDLES_COUNT_MAX = 64
EAGER_SAVES_MAX = 3
STRETCH_DOUBLINGS_MAX = 5

log = logging.getLogger(__name__)


class Saver:
    """See the module. ``parent`` is the (step, generation) that this attempt was restored from.

    ``stall_s`` is what the newest save has cost the training thread; ``abandoned_count`` the steps
    that were given up.
    """

    def __init__(
        self, *, capture: Capture, session: Session, attempt: Attempt, membership: Membership
    ) -> None:
        self.parent: tuple[int, int] | None = None
        self.stall_s = 0.0
        self.abandoned_count = 0
        self._abandoned_in_row = 0
        self._abandoned_step = -1
        self._capture = capture
        self._session = session
        self._attempt = attempt
        self._membership = membership
        self._pool = SlotPool(membership.arena)
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
        self._fenced = False
        self._shortage = ""
        self._failure: CheckpointError | None = None
        self._warned_idle = self._warned_eager = False
        levels: list[Level] = ["staged", "local", "replicated"]
        self._reachable = frozenset([*levels, "durable"] if attempt.persist.on else levels)
        self._rule = _rule_text(attempt.persist)

    @property
    def stretch(self) -> float:
        """Factor on a time trigger's interval while steps are abandoned one after another."""
        return float(2 ** min(self._abandoned_in_row, STRETCH_DOUBLINGS_MAX))

    @property
    def arena(self) -> Path:
        """The folder of this node's slots."""
        return self._membership.arena

    def save(self, step: int, notes: Mapping[str, object] | None = None) -> SaveHandle:
        """Snapshot the state as that of ``step``; the handle tells how it goes on.

        ``notes`` go with it; those that cannot are left out, loudly: they never cost a save.
        """
        known = self._handles.get(step)
        if known is not None:
            return known
        self._settle_stall()
        self._give_up_lost()
        if self._latest is not None and self._latest.abandoned:
            self._give_up(self._latest)
        started_s = time.perf_counter()
        handle = SaveHandle(step, reachable=self._reachable, rule=self._rule)
        self._remember(handle)
        handle.lack_copies(self._shortage)
        self._claim(step, self._note(step, notes))
        buffer: SlotBuffer | None = None
        try:
            plan = self._ready_plan()
            buffer = self._take_slot(plan)
            self._begin(plan, buffer, step)
        except (CheckpointError, OSError, RuntimeError) as cause:
            # RuntimeError: what torch raises when it cannot copy; no failed save ends training.
            if buffer is not None:
                self._pool.put_back(buffer)
            self.abandon(step, str(cause), cause if isinstance(cause, CheckpointError) else None)
        handle.stall_s += time.perf_counter() - started_s
        return handle

    def abandon(self, step: int, reason: str, error: CheckpointError | None = None) -> None:
        """Give ``step`` up for all ranks of the attempt, and say so everywhere."""
        failure = error or PreconditionError(reason, step=step)
        handle = self._handles.get(step)
        if handle is not None:
            handle.fail(failure)
        self._failure = failure
        self.abandoned_count += 1
        self._abandoned_in_row += 1
        self._abandoned_step = max(self._abandoned_step, step)
        log.warning("step %d is not saved: %s; training goes on", step, reason)
        self._release(step)
        self._session.post(
            abandoned=AbandonedStep(
                run=self._membership.run,
                step=step,
                generation=self._membership.generation,
                reason=reason,
            ),
            event=self._event("save_abandoned", f"step {step} is not saved: {reason}", step),
        )

    def has_saved(self, step: int) -> bool:
        """Tell whether this rank began to save ``step``."""
        return step in self._handles

    def before_update(self) -> None:
        """Wait until nothing is being copied; the explicit gate."""
        self._gate.before_update()

    def note_step(self, step: int) -> None:
        """Warn, once, when steps are counted and no optimizer moves."""
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
        self._pool.offer(view.leases)
        postponed = postponed_step(self._attempt.persist, view.steps)
        for levels in view.steps:
            handle = self._handles.get(levels.step)
            if handle is not None:
                handle.learn(levels, postponed=levels.step == postponed)
            if levels.local and levels.step > self._abandoned_step:
                self._abandoned_in_row = 0
            if levels.sealed or levels.abandoned:
                self._release(levels.step)
        if view.shortage != self._shortage:
            self._learn_shortage(view.shortage)
        if view.fenced and not self._fenced:
            self._fenced = True
            self._failure = StaleGenerationError("a newer attempt of this job trains: stop here")
            log.error("%s; nothing is saved any more", self._failure)

    def _learn_shortage(self, reason: str) -> None:
        """Say once that steps get no further than ``local``; saves go on."""
        self._shortage = reason
        for handle in list(self._handles.values()):
            handle.lack_copies(reason)
        if reason and self._attempt.rank == 0:
            log.warning("job %s: steps stay local: %s", self._attempt.job, reason)

    def close(self, timeout_s: float) -> None:
        """Wait, bounded, for the copy under way and for the newest save to get where it can."""
        deadline = time.monotonic() + max(timeout_s, 0.0)
        self._engine.wait(0.0 if self._hangs() else max(timeout_s, 0.0))
        self._gate.uninstall()
        newest = max(self._handles.values(), key=lambda handle: handle.step, default=None)
        if newest is not None and not newest.ended and not self._session.lost_agent:
            try:
                newest.wait_copies(max(0.0, deadline - time.monotonic()))
            except CheckpointError as error:
                log.warning("closing: %s", error)
        self._engine.close(0.0 if self._hangs() else max(0.0, deadline - time.monotonic()))
        self._pool.reset()

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
                job=self._attempt.job,
                run=self._membership.run,
                generation=self._membership.generation,
                rank=self._attempt.rank,
                world_size=self._attempt.world_size,
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
                    slots=slots_per_rank(persist=self._attempt.persist.on),
                    checkpoint_bytes=self._capture.estimate().checkpoint_bytes,
                )
            )
        except CheckpointError as error:
            self._refused = (time.monotonic(), error)
            raise
        self._refused = None

    def _take_slot(self, plan: SavePlan) -> SlotBuffer:
        patience_s = 0.0 if self._session.lost_agent else self._patience_s
        buffer = self._pool.acquire(plan.plan_hash, patience_s)
        # One wait is enough to learn that protection is behind: until a slot is free again, later
        # saves are given up at once instead of stopping the training thread each time.
        self._patience_s = BUSY_WAIT_S_MAX if buffer is not None else 0.0
        if buffer is None:
            behind = self._session.lost_agent or self._session.view.degraded
            raise ExhaustedError(
                f"no free slot after {patience_s:.1f} s: "
                f"{behind or 'earlier steps are not committed yet'}"
            )
        return buffer

    def _begin(self, plan: SavePlan, buffer: SlotBuffer, step: int) -> None:
        optimizers = self._capture.optimizers
        defer = self._gate.trusts(optimizers)
        if not defer and optimizers and len(self._handles) > EAGER_SAVES_MAX:
            self._say_eager(step)
        self._latest = self._engine.begin(
            plan,
            buffer,
            step=step,
            generation=self._membership.generation,
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
        if notes is None or self._attempt.rank:
            return None
        try:
            return step_note(step, notes)
        except InvalidRequestError as error:
            self._failure = error
            reason = f"step {step} is saved without its notes: {error}"
            log.warning("%s", reason)
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
            if not any((self._membership.arena / entry).exists() for entry in names):
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
            "rank": str(self._attempt.rank),
            "abandoned": str(self.abandoned_count),
        }
        return Event(
            kind=kind, severity="warning", message=message, job=self._attempt.job, context=context
        )


def _rule_text(rule: PersistRule) -> str:
    """Return which steps become durable, as the end of a sentence; empty: none by itself."""
    texts = []
    if rule.steps:
        texts.append(f"at or after each {rule.steps}")
    if rule.seconds:
        texts.append(f"{rule.seconds:g} s after the last one that went")
    return f"the object tier takes the first step committed {', or '.join(texts)}" if texts else ""
