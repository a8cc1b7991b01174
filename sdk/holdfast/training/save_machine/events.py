"""What happens to a rank's saves (events) and what is to be done (actions). Data only.

An action is either *told* or *done*. What is told waits for nothing and is performed together with
the change of the state that it belongs to. What is done may take time; some of it is answered by
an event, which its docstring names.

Named tuples: as many dataclasses take 20 ms more of every script's import.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from holdfast.core.abandoned_step import AbandonedStep
from holdfast.core.announcements import Announcement
from holdfast.core.reports import StepNote
from holdfast.core.session import SessionView, SlotLease, StepLevels
from holdfast.core.slot_names import SlotName
from holdfast.core.user_events import Event
from holdfast.errors import CheckpointError

# ------------------------------------------------------------------------------------ events


class Loaded(NamedTuple):
    """Training begins with this checkpoint loaded."""

    step: int
    generation: int


class Stepped(NamedTuple):
    """Training has gone on to ``step``. ``announced`` is what the agent had announced by then.

    ``reached`` is the step at which training came to it, or went beyond; 0: at that very step.
    ``known``: this rank has begun to save that one.
    """

    step: int
    announced: Announcement | None = None
    reached: int = 0
    known: bool = False
    agent_lost: bool = False


class HeardLate(NamedTuple):
    """Training had gone on to ``step`` before this rank heard what is ``announced``.

    It has come to ``reached`` for that, and does not save it.
    """

    step: int
    announced: Announcement
    reached: int


class Due(NamedTuple):
    """A save of ``step`` is due: the state is now that of this step.

    ``suspects`` are notes that are not finite: it is copied, but to be looked at alone.
    """

    step: int
    note: StepNote | None = None
    agent_lost: bool = False
    suspects: tuple[str, ...] = ()


class NoteRefused(NamedTuple):
    """The user's notes of ``step`` cannot be stored with it."""

    step: int
    error: CheckpointError


class CopyHangs(NamedTuple):
    """Answers ``Prepare``: the copy of an earlier step still reads the state."""

    step: int


class Prepared(NamedTuple):
    """Answers ``Prepare``: there is a plan of the state as it is, with this number."""

    step: int
    plan: int


class Reserved(NamedTuple):
    """Answers ``Reserve``: the agent makes the slots of this plan.

    ``touch_s``: so long it may take until the first slot's memory is touched on a busy machine.
    """

    step: int
    plan: int
    touch_s: float = 0.0


class Refused(NamedTuple):
    """Answers ``Reserve``: the agent does not make them."""

    step: int
    plan: int
    error: CheckpointError


class SlotReady(NamedTuple):
    """Answers ``TakeSlot``: a slot is taken. ``eager``: an optimizer's step is not seen coming."""

    step: int
    eager: bool = False


class NoSlot(NamedTuple):
    """Answers ``TakeSlot``: no slot came free in time."""

    step: int
    agent_lost: bool = False


class Copied(NamedTuple):
    """All of ``step`` is in its slot."""

    step: int


class Closed(NamedTuple):
    """Answers ``CloseSlot``: nothing is written any more, the agent may seal it."""

    step: int
    name: SlotName


class CopyGivenUp(NamedTuple):
    """The copy of ``step`` was given up; it may still hang, and keeps its slot until it ends."""

    step: int
    reason: str


class CopyFailed(NamedTuple):
    """The copy of ``step`` has ended without a segment."""

    step: int
    reason: str
    error: CheckpointError | None = None


class NonFinite(NamedTuple):
    """What was to be saved of ``step`` is not finite: these tensors and notes, maybe more."""

    step: int
    names: tuple[str, ...]


class Failed(NamedTuple):
    """Something was raised on the training thread before the copy of ``step`` had begun."""

    step: int
    reason: str
    error: CheckpointError | None = None


class SlotsLost(NamedTuple):
    """The slots of these steps disappeared before the agent sealed them."""

    steps: tuple[int, ...]


class Awaited(NamedTuple):
    """A caller waits for the owed step. ``changed``: the state is not that step's any more."""

    left_s: float
    changed: bool = False
    agent_lost: bool = False


class WentBack(NamedTuple):
    """Answers ``GoBack``: the next copy writes the owed step as it was."""

    step: int
    left_s: float


class View(NamedTuple):
    """The agent sent a new view."""

    view: SessionView


class Closing(NamedTuple):
    """Training has ended, and what could be waited for has been."""


class FailureTaken(NamedTuple):
    """The last failure was handed to the caller."""


SaveEvent = (
    Loaded | Stepped | HeardLate | Due | NoteRefused | CopyHangs | Prepared | Reserved | Refused
    | SlotReady | NoSlot | Copied | Closed | CopyGivenUp | CopyFailed | NonFinite | Failed
    | SlotsLost | Awaited | WentBack | View | Closing | FailureTaken
)  # fmt: skip

# ---------------------------------------------------------------------- actions: what is told


class Post(NamedTuple):
    """Tell the agent what has changed; None: no change of that field."""

    saving: tuple[int, ...] | None = None
    note: StepNote | None = None
    wants_slot: int | None = None
    abandoned: AbandonedStep | None = None
    closed_slot: str | None = None
    event: Event | None = None
    sealed_before: int | None = None


class Stage(NamedTuple):
    """Tell the handle of ``step`` that it is staged."""

    step: int


class Fail(NamedTuple):
    """Tell the handle of ``step`` that it gets no further."""

    step: int
    error: CheckpointError


class FailAll(NamedTuple):
    """Tell every handle that still waits that its save gets no further."""

    error: CheckpointError


class Learn(NamedTuple):
    """Tell the handles how far their steps have got."""

    steps: Sequence[StepLevels]


class LackCopies(NamedTuple):
    """Tell the handles why nodes for the copies are missing; empty: none is missing."""

    reason: str


Tell = Post | Stage | Fail | FailAll | Learn | LackCopies
"""What only tells: it waits for nothing."""

# ----------------------------------------------------------------------- actions: what is done


class Warn(NamedTuple):
    """Log a line for people."""

    text: str
    level: Literal["warning", "error"] = "warning"


class Prepare(NamedTuple):
    """Have a plan of the state once nothing is copied; ``Prepared``, or ``CopyHangs`` in time."""

    step: int
    wait_s: float


class GiveUpCopy(NamedTuple):
    """Have the copy in flight stop as soon as it can."""

    reason: str


class Reserve(NamedTuple):
    """Ask the agent for the slots of the newest plan; ``Reserved`` or ``Refused``."""

    step: int
    plan: int


class TakeSlot(NamedTuple):
    """Take a slot of the newest plan, within ``wait_s``; ``SlotReady`` or ``NoSlot``."""

    step: int
    wait_s: float


class KeepMoment(NamedTuple):
    """Remember the values of the owed ``step`` that will change soon."""

    step: int


class GoBack(NamedTuple):
    """Return to the moment of an owed step once nothing is copied; ``WentBack``, if it can be."""

    step: int
    wait_s: float


class Begin(NamedTuple):
    """Begin the copy into the slot that was taken; ``Copied`` or ``CopyFailed`` when it ends."""

    step: int
    parent: tuple[int, int] | None
    defer: bool


class CloseSlot(NamedTuple):
    """Close the slot of the copy that has ended; ``Closed`` or ``CopyFailed``."""

    step: int


class Offer(NamedTuple):
    """Map the slots that the agent leases, and let go of those that it took back."""

    leases: Sequence[SlotLease]


Do = (
    Warn | Prepare | GiveUpCopy | Reserve | TakeSlot | KeepMoment | GoBack | Begin | CloseSlot
    | Offer
)  # fmt: skip
"""What does something: it may take time."""

SaveAction = Tell | Do
