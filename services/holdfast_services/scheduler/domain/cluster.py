"""What is known of nodes and of rounds when the scheduler decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.core.executions import LaunchState

GONE_S = 120.0
"""So long after its lease an executor or an agent is awaited: what runs on its node goes on, and
nothing begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Aside:
    """A node is not planned with until then, since starts have failed there."""

    until_s: float
    count: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node, as its executor reported it.

    ``silent_s``: how long its executor's lease is over; 0: it is not. ``agent_live`` is None while
    the metadata service does not say; ``agent_silent_s``: for how long it is not. ``applied``: the
    number of the orders that it carried out.
    """

    name: str
    gpus: int
    gpu_type: str = ""
    spot: bool = False
    leaving: str = ""
    applied: int = 0
    launches: tuple[LaunchState, ...] = ()
    domain: str = ""
    silent_s: float = 0.0
    agent_live: bool | None = True
    agent_silent_s: float = 0.0
    aside: Aside | None = None

    def state(self, job: str, start: int) -> LaunchState | None:
        """Return what the executor says of the launcher of a start."""
        return next((one for one in self.launches if (one.job, one.start) == (job, start)), None)

    @property
    def gone(self) -> bool:
        """Whether what a job has of it is lost to the job."""
        return self.silent_s > GONE_S or (self.silent_s > 0 and self.agent_live is False)

    @property
    def agent_gone(self) -> bool:
        """Whether its agent is awaited no more; until then ranks of a round that is on train on."""
        return self.agent_live is False and self.agent_silent_s > GONE_S

    def hindrance(self, now_s: float) -> str:
        """Return why nothing may begin on it; empty: it may."""
        if self.leaving:
            return f"it will be taken away: {self.leaving}"
        if self.silent_s > 0:
            return "its executor is silent"
        if self.agent_live is False:
            return "its agent is lost"
        if self.aside and self.aside.until_s > now_s:
            return f"set aside after {self.aside.count} failed starts: {self.aside.why}"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What the metadata service says of a job's launch.

    ``newest``: the number of the newest allocation that it has, 0: none. ``number``: of that of
    which the round is that is on, 0: none is. ``begun``: all its launchers run its ranks; so many
    on each of ``ranks``. ``waiting``: what is waited for.
    """

    newest: int = 0
    number: int = 0
    begun: bool = False
    ranks: Mapping[str, int] = field(default_factory=dict)
    waiting: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """All nodes, and the rounds of all launches.

    ``rounds`` is None while nobody says; ``rounds_since_s``: since when somebody has, without gap.
    """

    nodes: Mapping[str, Node] = field(default_factory=dict)
    rounds: Mapping[str, Round] | None = field(default_factory=dict)
    rounds_since_s: float = 0.0
