"""What the catalogue knows of a launch: its launchers, and the round that is on, if one is.

A *launcher* starts the ranks of one node. A *round* is one start of all ranks: who takes part, in
which order, under which nonce. Times are those of the database's clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from holdfast.core.allocations import Allocation
from holdfast.core.rounds import Ending, Place, RankFailure, Terms


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """One launcher as it last reported itself, and how others reach its node.

    ``round``: the nonce of the round whose ranks it runs or ran. ``warm``: those of the next would
    begin at once.

    ``early_count``: rounds in a row that its ranks have ended before their first step.
    ``left_out``: why no round begins with it until ``back_at_s``, if so.

    ``goes_at_s``: when its node will be taken away; 0: nobody has said so.

    ``silent_since_s``: since when its lease has run out while it takes part in the last round; 0:
    it is heard. It is lost, or only its agent is, and its ranks train on.
    """

    id: str
    sequence: int
    node: str
    address: str
    holder: str
    ranks: int
    port: int
    joined_at_s: float
    finished: bool = False
    stopping: bool = False
    round: str = ""
    warm: bool = False
    early_count: int = 0
    left_out: str = ""
    back_at_s: float = 0.0
    silent_since_s: float = 0.0
    goes_at_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One node's part of a round. They stay in order: the same members keep the same ranks.

    ``devices``: its GPUs by number, if somebody says which.
    """

    launcher: str
    node: str
    ranks: int
    devices: tuple[int, ...] = ()


class EndReason(StrEnum):
    """Why a round that goes well ends after a step that all ranks have saved."""

    GROWTH = "growth"
    RESCALE = "rescale"
    NOTICE = "notice"

    @property
    def text(self) -> str:
        """The reason as people read it."""
        return _END_REASONS[self]


_END_REASONS = {
    EndReason.GROWTH: "a node that came later is taken in",
    EndReason.RESCALE: "the job goes on with other nodes",
    EndReason.NOTICE: "a node will be taken away",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundEnd:
    """The wish that the round ends after a step that all ranks have saved.

    ``copied``: not before all copies of the step are made, since nodes will go; where it is known
    which, not before others have what only they hold of it.
    """

    reason: EndReason
    asked_at_s: float
    copied: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """All launchers of one job's launch, in the order in which they came, and their last round.

    ``number``, ``members`` and the master are those of the last round, also once it is over, and
    ``on`` says that it is not. ``enough_since_s``: since when it is awaited who else comes, with as
    many nodes here as it needs at least; 0: there are not. ``again_after_s``: no round before.
    ``quick_count``: rounds in a row that failed soon. ``cause_awaited``: a rank has lost another
    one, and nobody has told yet which went first. ``end``: the round that is on ends after a step
    that is saved, once there is one. ``allocation``: who is to take part, if somebody says so;
    ``allocated``: the number of the one of which the last round is.
    """

    job: str
    id: str = ""
    terms: Terms = field(default_factory=Terms)
    launchers: tuple[Launcher, ...] = ()
    number: int = 0
    members: tuple[Member, ...] = ()
    master_address: str = ""
    master_port: int = 0
    on: bool = False
    began_at_s: float = 0.0
    enough_since_s: float = 0.0
    again_after_s: float = 0.0
    quick_count: int = 0
    cause_awaited: bool = False
    restarts_at_s: tuple[float, ...] = ()
    failure: RankFailure | None = None
    stopping: bool = False
    ending: Ending | None = None
    end: RoundEnd | None = None
    allocation: Allocation | None = None
    allocated: int = 0

    @property
    def silent(self) -> tuple[Launcher, ...]:
        """The launchers that are not heard."""
        return tuple(one for one in self.launchers if one.silent_since_s)

    @property
    def nonce(self) -> str:
        """What names the last round, and no other one of any launch."""
        return self._nonce_of(self.number)

    @property
    def nonce_before(self) -> str:
        """What names the round before the last one; empty: there was none."""
        return self._nonce_of(self.number - 1)

    def _nonce_of(self, number: int) -> str:
        return f"{self.id}.{number}" if number > 0 else ""

    def launcher(self, name: str) -> Launcher | None:
        """Return a launcher by its id."""
        return next((launcher for launcher in self.launchers if launcher.id == name), None)

    def having(self, told: Launcher) -> Launch:
        """Return the launch with what is known of one launcher by now."""
        launchers = tuple(told if one.id == told.id else one for one in self.launchers)
        return replace(self, launchers=launchers)

    def available(self, launcher: Launcher) -> bool:
        """Tell whether a round may begin with a launcher: old ranks must not meet new ones."""
        offered = (launcher.address, launcher.port)
        usable = not (launcher.stopping or launcher.left_out or launcher.goes_at_s)
        return usable and offered != (self.master_address, self.master_port)

    def takes_part(self, name: str) -> bool:
        """Tell whether a launcher takes part in the last round."""
        return any(member.launcher == name for member in self.members)

    def place(self, name: str) -> Place | None:
        """Return where a launcher stands in the round that is on; None: it does not."""
        if not (self.on and self.takes_part(name)):
            return None
        index = [member.launcher for member in self.members].index(name)
        return Place(
            round=self.number,
            nonce=self.nonce,
            master_address=self.master_address,
            master_port=self.master_port,
            first_rank=sum(member.ranks for member in self.members[:index]),
            world_size=sum(member.ranks for member in self.members),
            node_rank=index,
            nodes_count=len(self.members),
            ranks=self.members[index].ranks,
            devices=self.members[index].devices,
        )
