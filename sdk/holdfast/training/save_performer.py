"""Does what the save machine decides: plans, slots, copies, and what the agent is told.

Owns slots, copy thread and gate of one rank, and the snapshot of the newest save. Decides nothing:
each method does one action, and returns the event that answers it, if there is one.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from holdfast.copying.port import Devices
from holdfast.core.attempts import AttemptSpec, Seat
from holdfast.core.budget import Reservation
from holdfast.core.slot_names import SlotName, SlotState
from holdfast.core.user_events import Event
from holdfast.errors import CheckpointError, PreconditionError
from holdfast.guards import RefuseNonFinite
from holdfast.logs import steady_logger
from holdfast.said import is_first_to_say
from holdfast.snapshot.buffer import SlotBuffer
from holdfast.snapshot.engine import CopyEngine, Snapshot
from holdfast.snapshot.finite_check import FiniteCheck
from holdfast.snapshot.optimizer_gate import Gate
from holdfast.snapshot.plan import Moment, SavePlan, Source, make_plan
from holdfast.snapshot.pool import SlotPool
from holdfast.snapshot.twins import Twins, has_twins
from holdfast.training.refused_parts import RefusedParts
from holdfast.training.save_machine import events as ev
from holdfast.training.save_machine.state import Claim
from holdfast.training.session import AgentSession

TOUCH_BYTES_PER_S_MIN = 64 << 20
"""How fast a busy machine's agent makes slots, one after the other; idle ones do 1 GiB/s."""
SUSPECTED_COUNT_MAX = 64
"""Steps with notes that are not finite: more than copies that nobody has looked at yet."""

log = steady_logger(__name__)


@dataclass(frozen=True, slots=True)
class OwedMoment:
    """A step that found no slot, and the means to tell whether its state has changed."""

    step: int
    updates: int
    thread: int
    plan: SavePlan
    moment: Moment


class SavePerformer:
    """Performs the save machine's actions; the copy thread calls ``on_end`` when a copy has ended.

    If all is eager it is called on the training thread, inside the action ``Begin``.

    ``plan`` is the plan of the newest save; ``latest`` the snapshot that was begun last;
    ``refused_parts`` keeps what the guard refuses, None: nothing is kept.
    """

    def __init__(
        self,
        *,
        capture: Source,
        session: AgentSession,
        spec: AttemptSpec,
        seat: Seat,
        arena: Path,
        on_end: Callable[[ev.SaveEvent], None],
        devices: Devices,
        guard: RefuseNonFinite | None = None,
    ) -> None:
        self.plan: SavePlan | None = None
        self.latest: Snapshot | None = None
        self.pool = SlotPool(arena, self._say_refusal)
        self.twins = Twins(arena)
        self._finite = FiniteCheck(guard.excludes) if guard else None
        self.engine = CopyEngine(self._ended, self.twins, behind=guard is not None)
        self.gate = Gate(self.engine, devices=devices)
        self.owed: OwedMoment | None = None
        self._plan_number = 0
        self._told: set[str] = set()
        self._buffer: SlotBuffer | None = None
        # By step: one may end on the training thread while the copy thread closes the one before.
        self._closing: dict[int, Snapshot] = {}
        self._capture = capture
        self._session = session
        self._spec = spec
        self._who = f"job {spec.job}" + (f", rank {spec.rank}" if spec.world_size > 1 else "")
        self._seat = seat
        self._arena = arena
        self._devices = devices
        self._on_end = on_end
        self.refused_parts: RefusedParts | None = None
        if guard is not None and (folder := guard.kept_in(spec.job)):
            self.refused_parts = RefusedParts(
                folder, rank=spec.rank, who=self._who, tell=self._tell_unkept
            )
        # The copy thread may look at one step when training suspects the next.
        self._suspected: deque[tuple[int, tuple[str, ...]]] = deque(maxlen=SUSPECTED_COUNT_MAX)
        self._works: dict[type, Callable[[Any], ev.SaveEvent | None]] = {
            ev.Warn: self._warn,
            ev.Prepare: self._prepare,
            ev.GiveUpCopy: self._give_up_copy,
            ev.Reserve: self._reserve,
            ev.TakeSlot: self._take_slot,
            ev.KeepMoment: self._keep_moment,
            ev.GoBack: self._go_back,
            ev.Begin: self._begin,
            ev.CloseSlot: self._close_slot,
            ev.Offer: self._offer,
        }

    def do(self, action: ev.SaveAction) -> ev.SaveEvent | None:
        """Do one action; return the event that answers it.

        Raises:
            Exception: whatever the user's code or torch raise while the state is read.
        """
        return self._works[type(action)](action)

    def let_go(self) -> bool:
        """Make the taken slot ready for the next save; True: a copy still writes into it.

        For who was interrupted between taking a slot and the copy.
        """
        return self.pool.recall()

    def has_changed(self, owed: OwedMoment) -> bool:
        """Tell whether the state is another one than that of the owed step, or may be."""
        return self.may_differ(owed.updates) or self.plan is not owed.plan

    def may_differ(self, updates: int) -> bool:
        """Tell whether something was updated since the gate counted ``updates``, or may have been.

        What an optimizer does that nobody has seen step cannot be told.
        """
        seen = self.gate.sees(self._capture.optimizers)
        return not seen or updates != self.gate.updates_count

    def lost(self, saving: Sequence[Claim]) -> tuple[int, ...]:
        """Return closed steps whose slot has gone: not sealed, or lost with the agent's arena."""
        return tuple(
            [c.step for c in saving if c.closed is not None and not self._exists(c.closed)]
        )

    def _exists(self, closed: SlotName) -> bool:
        names = (closed.file_name, closed.to(SlotState.SEALED).file_name)
        return any((self._arena / entry).exists() for entry in names)

    def _warn(self, action: ev.Warn) -> None:
        say = log.error if action.level == "error" else log.warning
        say("%s: %s", self._who, action.text)

    def _prepare(self, action: ev.Prepare) -> ev.SaveEvent:
        """Return that there is a plan of the state as it is now."""
        self._refuse_in_capture()
        if not self.engine.wait(action.wait_s):
            return ev.CopyHangs(action.step)
        try:
            self._renew_plan()
        except (CheckpointError, RuntimeError) as cause:  # of what an accelerator is asked for
            lost = self.engine.lost(self.plan.accelerators if self.plan else ())
            if lost:
                raise PreconditionError(lost) from cause
            raise
        return ev.Prepared(action.step, self._plan_number)

    def _refuse_in_capture(self) -> None:
        """A copy that is captured is not done, but at each replay, into a slot that is closed."""
        if self._devices.capturing():
            raise PreconditionError(
                "a graph is being captured: nothing is copied before it is replayed; save outside"
            )

    def _renew_plan(self) -> None:
        if self.plan is None or not self.plan.is_current():
            self._plan_number += 1  # first: a plan under a number that is reserved has no slots
            self.plan = make_plan(
                self._capture,
                job=self._spec.job,
                run=self._seat.run,
                generation=self._seat.generation,
                rank=self._spec.rank,
                world_size=self._spec.world_size,
                devices=self._devices,
            )
            device = next(iter(self.plan.accelerators), None)
            self.pool.serve(device)
            self.twins.serve(device)
            self._say_doubts(self.plan)

    def _say_doubts(self, plan: SavePlan) -> None:
        for text in (*plan.left_out, *self._capture.surprises):
            if text not in self._told:
                self._told.add(text)
                if is_first_to_say(text):
                    log.warning("job %s: %s", self._spec.job, text)

    def _say_refusal(self, reason: str) -> None:
        """Tell people, once for each reason, that copies go through pageable memory."""
        if reason in self._told:
            return
        self._told.add(reason)
        message = (
            f"slots are not registered with the driver, so saves copy more slowly and optimizer "
            f"steps wait for the copy: {reason}"
        )
        log.warning("job %s: %s", self._spec.job, message)
        event = Event(
            kind="slots_unregistered", severity="warning", message=message, job=self._spec.job
        )
        self._session.post(event=event)

    def _tell_unkept(self, message: str) -> None:
        """Tell people that what was refused is not kept; on any thread."""
        context = {"rank": str(self._spec.rank)}
        job = self._spec.job
        event = Event(
            kind="keep_failed", severity="warning", message=message, job=job, context=context
        )
        self._session.post(event=event)

    def _give_up_copy(self, action: ev.GiveUpCopy) -> None:
        self.engine.abandon(action.reason)

    def _reserve(self, action: ev.Reserve) -> ev.SaveEvent:
        assert self.plan is not None
        # Slots of the same plan stay: to the agent nothing has changed, it leases no new ones.
        self.pool.reset(keep=self.plan.plan_hash)
        try:
            making = self._session.reserve(
                Reservation(
                    plan_hash=self.plan.plan_hash,
                    length_bytes=self.plan.length_bytes,
                    slots=self._spec.slots_per_rank,
                    restored_bytes=self._capture.estimate().restored_bytes(
                        named=self._spec.names_needs,
                        local_world_size=self._spec.local_world_size,
                        replicas=self._spec.replicas,
                    ),
                    twins=has_twins(self.plan),
                )
            )
        except CheckpointError as error:
            return ev.Refused(action.step, action.plan, error)
        first_bytes = self.plan.length_bytes * self._spec.local_world_size if making else 0
        return ev.Reserved(action.step, action.plan, first_bytes / TOUCH_BYTES_PER_S_MIN)

    def _take_slot(self, action: ev.TakeSlot) -> ev.SaveEvent:
        assert self.plan is not None
        self._buffer = self.pool.acquire(self.plan.plan_hash, action.wait_s)
        if self._buffer is None:
            return ev.NoSlot(action.step, agent_lost=bool(self._session.lost_agent))
        optimizers = self._capture.optimizers
        return ev.SlotReady(action.step, bool(optimizers) and not self.gate.trusts(optimizers))

    def _keep_moment(self, action: ev.KeepMoment) -> None:
        assert self.plan is not None
        updates, thread = self.gate.updates_count, threading.get_ident()
        self.owed = OwedMoment(action.step, updates, thread, self.plan, self.plan.moment())

    def _go_back(self, action: ev.GoBack) -> ev.SaveEvent | None:
        deadline = time.monotonic() + action.wait_s
        owed = self.owed
        assert owed is not None
        self._refuse_in_capture()
        if not self.engine.wait(action.wait_s) or not owed.plan.go_back(owed.moment):
            return None
        return ev.WentBack(action.step, max(0.0, deadline - time.monotonic()))

    def _begin(self, action: ev.Begin) -> None:
        assert self.plan is not None
        assert self._buffer is not None
        self.latest = self.engine.begin(
            self.plan,
            self._buffer,
            step=action.step,
            generation=self._seat.generation,
            parent=action.parent,
            defer=action.defer,
        )

    def _ended(self, snapshot: Snapshot) -> None:
        """The copy has ended, well or not; on the copy thread (or the caller's, if all eager)."""
        if snapshot.abandoned:
            self.pool.put_back(snapshot.buffer)
            self._on_end(ev.CopyFailed(snapshot.step, snapshot.reason))
            return
        refused = self._looked_at(snapshot)
        if not self._is_kept(snapshot, refused) and refused is not None:
            self.pool.put_back(snapshot.buffer)
        if refused is None:
            self._closing[snapshot.step] = snapshot
        self._on_end(refused or ev.Copied(snapshot.step))

    def _is_kept(self, snapshot: Snapshot, refused: ev.NonFinite | ev.CopyFailed | None) -> bool:
        """Have what is refused written; True: its slot is put back once that has read it."""
        if self.refused_parts is None or isinstance(refused, ev.CopyFailed):
            return False
        return self.refused_parts.take(
            snapshot, refused=refused is not None, let_go=self.pool.put_back
        )

    def suspect(self, step: int, notes: tuple[str, ...]) -> None:
        """Have ``step`` refused for its notes once it is copied, whatever the copy holds."""
        self._suspected.append((step, notes))

    def _looked_at(self, snapshot: Snapshot) -> ev.NonFinite | ev.CopyFailed | None:
        """Return why what was copied is not to be saved, None: nothing speaks against it."""
        if self._finite is None:
            return None
        try:
            tensors = self._finite.non_finite(snapshot.plan, snapshot.buffer)
        except (CheckpointError, RuntimeError) as error:
            return ev.CopyFailed(snapshot.step, f"it cannot be looked at: {error}")
        names = (*dict(tuple(self._suspected)).get(snapshot.step, ()), *tensors)
        return ev.NonFinite(snapshot.step, names) if names else None

    def _close_slot(self, action: ev.CloseSlot) -> ev.SaveEvent:
        snapshot = self._closing.pop(action.step)
        buffer = snapshot.buffer
        closed = SlotName(buffer.slot, buffer.incarnation, SlotState.CLOSED)
        try:
            buffer.close_slot()
        except CheckpointError as error:
            self.pool.forget(buffer)
            return ev.CopyFailed(action.step, error.message, error)
        except OSError as error:
            self.pool.put_back(buffer)
            return ev.CopyFailed(action.step, f"its slot cannot be closed: {error}")
        self._say_costs(snapshot)
        return ev.Closed(action.step, closed)

    def _say_costs(self, snapshot: Snapshot) -> None:
        copy_s, size = snapshot.copy_s, snapshot.plan.length_bytes
        self._session.report(
            lambda r: replace(r, costs=replace(r.costs, copy_s=copy_s, save_bytes=size))
        )

    def _offer(self, action: ev.Offer) -> None:
        self.pool.offer(action.leases)
