"""What an agent tells a rank's session: the values of ``agent.proto`` that both sides use.

A ``SessionView`` is a level like every view: whole, versioned, replaced by the next.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.core.abandoned_step import AbandonedStep
from holdfast.core.announcements import Announcement
from holdfast.core.decision import Decision
from holdfast.core.needs import ByteRange, Needs
from holdfast.core.reports import RankReport
from holdfast.core.shard import Shard
from holdfast.core.user_events import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLease:
    """A slot this session may write, until it closes it; see ``core.slot_names`` for file names."""

    slot: str
    incarnation: int
    length_bytes: int
    plan_hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLevels:
    """How far one saved step has got, as the agent knows it."""

    step: int
    sealed: bool = False
    local: bool = False
    replicated: bool = False
    durable: bool = False
    abandoned: bool = False
    reason: str = ""
    draining: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSegment:
    """One verified segment to load from; kept until the session says that it has loaded.

    ``ranges`` is what of it lies in the file, sorted and apart; empty: all of it.
    """

    shard: Shard
    file_name: str
    source: str
    ranges: tuple[ByteRange, ...] = ()

    @property
    def held_bytes(self) -> int:
        """How much of the segment lies in the file."""
        held = sum(part.end - part.begin for part in self.ranges)
        return held if self.ranges else self.shard.length_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreView:
    """The decision and, once it is confirmed and all is here, where to load from.

    ``needs`` is the number of the rank's needs that this answers, 0: it has named none.
    """

    decision: Decision
    ready: bool = False
    segments: tuple[LocalSegment, ...] = ()
    decide_s: float = 0.0
    fetch_s: float = 0.0
    needs: int = 0

    def is_of(self, generation: int) -> bool:
        """Tell whether the decision is for the attempt of that number.

        A catalogue that is lost while an attempt registers may give it two: a rank heard of the
        one, its agent of the other.
        """
        return self.decision.generation == generation


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionView:
    """Everything a rank acts on; ``shortage``: why no step gets all its copies, if so.

    ``hindrance``: why the agent can neither make nor seal slots of this rank, if so.
    ``forgotten``: the catalogue has lost the attempt, so the rank opens its session again.
    ``twins`` are slots for the next copies of other ranks' segments; each still has the head of the
    last one that it held. This rank may fill in what it has alike.
    """

    version: str
    fenced: bool = False
    leases: tuple[SlotLease, ...] = ()
    steps: tuple[StepLevels, ...] = ()
    announcement: Announcement | None = None
    restore: RestoreView | None = None
    degraded: str = ""
    shortage: str = ""
    forgotten: bool = False
    hindrance: str = ""
    twins: tuple[SlotLease, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionUpdate:
    """What a rank tells its agent; the newest wins, repeats are harmless.

    ``report`` goes on to the catalogue, the rest is between the two.
    ``wants_slot`` is the step that found no free slot, 0: none waits for one. ``needs`` are those
    of the checkpoint that was last proposed, None: the rank has not named them.
    """

    session: str
    report: RankReport = field(default_factory=RankReport)
    wants_slot: int = 0
    closed_slots: tuple[str, ...] = ()
    abandoned: tuple[AbandonedStep, ...] = ()
    events: tuple[Event, ...] = ()
    needs: Needs | None = None
