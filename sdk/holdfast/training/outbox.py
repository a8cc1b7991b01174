"""What a rank has yet to tell its agent. Data only; the session guards and sends it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.core.abandoned_step import AbandonedStep
from holdfast.core.needs import Needs
from holdfast.core.reports import NOTES_COUNT_MAX, RankReport, StepNote
from holdfast.core.session import SessionUpdate
from holdfast.core.user_events import Event

EVENTS_COUNT_MAX = 256
HINTS_COUNT_MAX = 64


@dataclass(slots=True)
class Outbox:
    """What the agent has not been told yet; levels are repeated, lists are sent once.

    Saves change ``saving``, ``sealed_before`` and notes; the report has them once it is sent.

    Lists are bounded: of what could not be told for long, the oldest is dropped. That costs
    nothing but news: which steps are lost follows from the report's ``step`` and ``saving``.
    """

    report: RankReport = field(default_factory=RankReport)
    saving: tuple[int, ...] = ()
    sealed_before: int = 0
    wants_slot: int = 0
    needs: Needs | None = None
    notes: deque[StepNote] = field(default_factory=lambda: deque(maxlen=NOTES_COUNT_MAX))
    abandoned: deque[AbandonedStep] = field(default_factory=lambda: deque(maxlen=HINTS_COUNT_MAX))
    closed_slots: deque[str] = field(default_factory=lambda: deque(maxlen=HINTS_COUNT_MAX))
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=EVENTS_COUNT_MAX))

    def message(self, session: str) -> SessionUpdate:
        """Return everything as one update."""
        return SessionUpdate(
            session=session,
            report=replace(
                self.report,
                saving=self.saving,
                sealed_before=self.sealed_before,
                notes=tuple(self.notes),
            ),
            wants_slot=self.wants_slot,
            needs=self.needs,
            closed_slots=tuple(self.closed_slots),
            abandoned=tuple(self.abandoned),
            events=tuple(self.events),
        )

    def delivered(self, update: SessionUpdate) -> None:
        """Forget what ``update`` carried: what stands at the front, if it still does."""
        _forget(self.abandoned, update.abandoned)
        _forget(self.closed_slots, update.closed_slots)
        _forget(self.events, update.events)


def _forget(waiting: deque[Any], sent: Sequence[object]) -> None:
    told = {id(item) for item in sent}
    while waiting and id(waiting[0]) in told:
        waiting.popleft()
