"""A rank's saves: the SDK's real save machine over slots in a dict, copies that take their time.

What the SDK's performer does for a real process is done here, each piece of work an event of its
own. A reservation is made with the session already, not at the first save.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.simulation.node import File
from tests.simulation.segments import JOB

from holdfast.core.abandoned_step import AbandonedStep
from holdfast.core.reports import StepNote
from holdfast.core.session import SessionView
from holdfast.core.slot_names import SlotName
from holdfast.training.save_machine import events as ev
from holdfast.training.save_machine.rules import handle
from holdfast.training.save_machine.state import Author, SaveState

if TYPE_CHECKING:
    from tests.simulation.rank import Process

ABANDONED_TOLD_MAX = 64
NOTES_TOLD_MAX = 8


class Saves:
    """The machine of a process; ``abandoned``, ``notes`` and ``wants_slot`` are what it posted."""

    def __init__(self, process: Process, run: str, generation: int) -> None:
        self.state = SaveState(Author(JOB, run, generation, process.rank), reserved=1)
        self.abandoned: list[AbandonedStep] = []
        self.notes: list[StepNote] = []
        self.wants_slot = 0
        self.sealed_before = 0
        self._process = process
        self._closed: tuple[str, ...] = ()
        self._waiting: int | None = None
        self._slot: tuple[File, SlotName] | None = None
        self._work: dict[type, Callable[[Any], ev.SaveEvent | None]] = {
            ev.Post: self._post,
            ev.Prepare: lambda action: ev.Prepared(action.step, 1),
            ev.TakeSlot: self._take_slot,
            ev.GoBack: lambda action: ev.WentBack(action.step, 0.0),
            ev.Begin: self._begin,
            ev.CloseSlot: self._close_slot,
        }

    @property
    def busy(self) -> bool:
        """Whether training waits for a slot or a copy."""
        return self._waiting is not None or self._slot is not None

    def stepped(self, step: int, *, save: bool) -> None:
        """A step of training is done."""
        self.handle(ev.Stepped(step))
        if save:
            self.handle(ev.Due(step, StepNote(step=step, json=f'{{"loss":{step}}}')))

    def learn(self, view: SessionView) -> None:
        """Take the agent's news; a step that found no slot is saved if there is one now."""
        self.handle(ev.View(view))
        if self._waiting is not None:
            if self._find():
                step, self._waiting = self._waiting, None
                self.handle(ev.SlotReady(step))
        elif self.state.owed == self._process.step and not self.busy:
            self.handle(ev.Awaited(0.0))

    def copied(self, step: int) -> None:
        """The last byte of ``step`` is in its slot."""
        self.handle(ev.Copied(step))

    def handle(self, event: ev.SaveEvent | None) -> None:
        """Have the machine handle ``event`` and all answers; tell which slots were closed."""
        while event is not None:
            self.state, actions = handle(self.state, event, now_s=self._process.world.now_s)
            event = None
            for action in actions:
                work = self._work.get(type(action))
                event = work(action) if work else None
        closed, self._closed = self._closed, ()
        if closed:
            self._process.tell(closed)

    def _post(self, action: ev.Post) -> None:
        if action.abandoned is not None:
            self.abandoned = [*self.abandoned, action.abandoned][-ABANDONED_TOLD_MAX:]
        if action.note is not None:
            self.notes = [*self.notes, action.note][-NOTES_TOLD_MAX:]
        if action.wants_slot is not None:
            self.wants_slot = action.wants_slot
        self.sealed_before = max(self.sealed_before, action.sealed_before or 0)
        if action.closed_slot is not None:
            self._closed = (*self._closed, action.closed_slot)

    def _find(self) -> bool:
        self._slot = self._process.free_slot()
        return self._slot is not None

    def _take_slot(self, action: ev.TakeSlot) -> ev.SaveEvent | None:
        step = action.step
        if self._find():
            return ev.SlotReady(step)
        if action.wait_s <= 0:
            return ev.NoSlot(step)
        self._waiting = step

        def over() -> None:
            if self._waiting == step:
                self._waiting = None
                self.handle(ev.NoSlot(step))
                self._process.tell()
                self._process.attempt.try_step()

        self._process.later(action.wait_s, over)
        return None

    def _begin(self, action: ev.Begin) -> None:
        assert self._slot is not None
        self._process.copy_into(*self._slot, action.step)

    def _close_slot(self, action: ev.CloseSlot) -> ev.SaveEvent:
        assert self._slot is not None
        (file, name), self._slot = self._slot, None
        closed = self._process.close(action.step, file, name, self.state.parent)
        if closed is None:
            return ev.CopyFailed(action.step, "the slot was taken away")
        return ev.Closed(action.step, closed)
