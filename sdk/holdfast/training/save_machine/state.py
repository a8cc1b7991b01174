"""What the save machine remembers between two events. Immutable, small: it is copied often.

Named tuples, since a copy of one costs a third of a frozen dataclass's, and saves are frequent.
"""

from __future__ import annotations

from typing import NamedTuple

from holdfast.core.slot_names import SlotName
from holdfast.errors import CheckpointError
from holdfast.training.unsaved_steps import Lapse

BUSY_WAIT_S_MAX = 0.05
STRETCH_DOUBLINGS_MAX = 5


class Author(NamedTuple):
    """Who saves: one rank of one attempt of a run."""

    job: str
    run: str
    generation: int
    rank: int


class Claim(NamedTuple):
    """A step that this rank has begun and that is neither sealed nor given up.

    ``closed`` is the slot that holds it once its copy has ended. ``suspects`` are its notes that
    are not finite: it is refused for them, whatever else happens to it.
    """

    step: int
    closed: SlotName | None = None
    suspects: tuple[str, ...] = ()


class Refusal(NamedTuple):
    """Why the slots of plan number ``plan`` were refused, and when."""

    plan: int
    at_s: float
    error: CheckpointError


class SaveState(NamedTuple):
    """All that the rules of saving depend on.

    Attributes:
        author: Who saves.
        parent: (step, generation) that the attempt was restored from; None: it began at step 0.
        saving: Steps begun, the oldest first; every other rank waits for them.
        newest: The highest step for which a save was asked, -1: none.
        before: The highest one before that.
        saves_count: How many saves were asked for.
        copying: The step whose copy was begun and has not ended.
        hanging: The step whose copy was given up and may never end: it was waited for once.
        reserved: Number of the plan whose slots are reserved, 0: of none.
        refused: Why there are no slots of the newest plan.
        patience_s: How long the next save may wait for a slot; ``waits_s``: how much of it is left.
        owed: The step that found no slot, while training has not gone on.
        wished: The step for which the agent was told that a slot is wanted.
        local_step: The newest step known to be ``local``; ``copied_step``: with all its copies.
        answered: The newest announced step that was saved, or declined as heard of too late.
        fenced: Whether a newer attempt trains.
        outage: Whether commits stand still.
        shortage: Why steps get no further than ``local``; empty: they do.
        hindrance: Why the agent gives no slot, if it said so.
        failure: What went wrong last, until somebody takes it.
        lapse: The steps that were not saved.
        eager_told: Whether it was said that nothing is deferred.
        refused_count: Steps in a row that were refused since they are not finite; the last one is
            ``refused_step``, -1: none, and ``refused_names`` what was not finite in it.
    """

    author: Author
    parent: tuple[int, int] | None = None
    saving: tuple[Claim, ...] = ()
    newest: int = -1
    before: int = -1
    saves_count: int = 0
    copying: int | None = None
    hanging: int | None = None
    reserved: int = 0
    refused: Refusal | None = None
    patience_s: float = BUSY_WAIT_S_MAX
    waits_s: float = 0.0
    owed: int | None = None
    wished: int | None = None
    local_step: int = -1
    copied_step: int = -1
    answered: int = 0
    fenced: bool = False
    outage: bool = False
    shortage: str = ""
    hindrance: str = ""
    failure: CheckpointError | None = None
    lapse: Lapse = Lapse()
    eager_told: bool = False
    refused_count: int = 0
    refused_step: int = -1
    refused_names: tuple[str, ...] = ()

    @property
    def stretch(self) -> float:
        """Factor on a time trigger's interval while steps are abandoned one after another."""
        return float(2 ** min(self.lapse.in_row, STRETCH_DOUBLINGS_MAX))

    @property
    def steps_saving(self) -> tuple[int, ...]:
        """The steps that all other ranks wait for, the oldest first."""
        return tuple([claim.step for claim in self.saving])
