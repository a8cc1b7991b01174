"""What a plan is made from: nodes, jobs, families and quotas, as values.

Facts, not wishes: the shell reads them from the catalogue, the simulator from its cluster. Hints of
a job are checked where a value is made of them: none here can be absurd. Units: GPUs, seconds by
one clock, and samples; progress is in samples of the initial batch size.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.core.meshes import mesh_for
from holdfast.errors import InvalidRequestError
from holdfast.goodput.batches import BatchLimits
from holdfast.goodput.efficiency import GradientNoise
from holdfast.goodput.profile import Profile

GPUS_PER_NODE_MAX = 64
REPLICAS_MAX = 65_536
WORK_MAX = 1e18
MOVE_S_MAX = 86_400.0
PRIORITY_MAX = 100

Allocation = tuple[tuple[str, int], ...]
"""(node, GPUs) for each node of a job, in the order of its ranks; empty: it waits."""


def _check(what: str, value: float, most: float, **ids: str) -> None:
    if not (math.isfinite(value) and 0 <= value <= most):
        raise InvalidRequestError(f"{what} is {value!r}, not within 0 and {most:g}", **ids)


class NodeState(enum.Enum):
    """What a node may be used for."""

    UP = "up"
    DRAINING = "draining"
    """It will be taken away, or is to be emptied: jobs leave it, none comes."""
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node with GPUs of one type. ``price_per_h`` is for all of it, in any currency."""

    name: str
    gpus: int
    gpu_type: str = "gpu"
    spot: bool = False
    domain: str = ""
    state: NodeState = NodeState.UP
    price_per_h: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.gpus <= GPUS_PER_NODE_MAX:
            raise InvalidRequestError(
                f"a node of {self.gpus} GPUs, not 0 to {GPUS_PER_NODE_MAX}", node=self.name
            )
        _check("price_per_h", self.price_per_h, math.inf, node=self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """How far a job is, and how far it wants to go if it has said so.

    ``declared`` is a wish of the user, often wrong; ``done`` was measured.
    """

    done: float = 0.0
    declared: float | None = None

    def __post_init__(self) -> None:
        _check("done samples", self.done, WORK_MAX)
        if self.declared is not None:
            _check("declared samples", self.declared, WORK_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveCost:
    """What a move was measured to cost: the save, the restore, the start of ranks, steps repeated.

    ``restore_local_s`` is the restore on nodes that hold its checkpoint in memory.
    """

    save_s: float = 0.0
    restore_s: float = 0.0
    restore_local_s: float | None = None
    restart_s: float = 0.0
    repeated_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("save_s", "restore_s", "restart_s", "repeated_s"):
            _check(name, getattr(self, name), MOVE_S_MAX)
        _check("restore_local_s", self.restore_local_s or 0.0, MOVE_S_MAX)

    def seconds(self, *, local: bool) -> float:
        """Return how long the job makes no progress when it moves, or is started."""
        known = local and self.restore_local_s is not None
        restore_s = self.restore_local_s if known else self.restore_s
        return self.save_s + (restore_s or 0.0) + self.restart_s + self.repeated_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job that wants GPUs, or has some.

    ``replicas_min`` to ``replicas_max`` GPUs, or none; if it has ``meshes`` (see ``core.meshes``),
    only as many as there is one for. ``profiles`` are its own measurements by
    type of GPU; ``noise`` is None until it has been measured. ``preemptible``: once it has GPUs it
    keeps them if not. ``priority``: one more makes its time worth twice as much, or lets it go
    first; the policy says which. ``held_by``: nodes with its newest checkpoint in memory.
    ``since_s``: since when it has had GPUs without a gap, or has waited without one; ``waited_s``:
    how long it had waited when it got those that it has.
    """

    name: str
    submitted_s: float
    batches: BatchLimits
    replicas_min: int = 1
    replicas_max: int = 1
    gpu_types: frozenset[str] | None = None
    meshes: tuple[str, ...] = ()
    family: str = ""
    owner: str = ""
    priority: int = 0
    preemptible: bool = True
    work: Work = Work()
    profiles: Mapping[str, Profile] = field(default_factory=dict)
    noise: GradientNoise | None = None
    cost: MoveCost = MoveCost()
    allocation: Allocation = ()
    held_by: frozenset[str] = frozenset()
    since_s: float = 0.0
    waited_s: float = 0.0
    restarts: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.replicas_min <= self.replicas_max <= REPLICAS_MAX:
            raise InvalidRequestError(
                f"replicas {self.replicas_min} to {self.replicas_max}: at least 1, at most "
                f"{REPLICAS_MAX}, and the least not above the most",
                job=self.name,
            )
        if not -PRIORITY_MAX <= self.priority <= PRIORITY_MAX:
            raise InvalidRequestError(
                f"priority {self.priority} is not within {-PRIORITY_MAX} and {PRIORITY_MAX}",
                job=self.name,
            )

    def has_mesh_for(self, gpus: int) -> bool:
        """Tell whether it could train on so many GPUs, its bounds apart."""
        return not self.meshes or mesh_for(self.meshes, gpus) is not None

    @property
    def gpus(self) -> int:
        """How many GPUs it has."""
        return sum(gpus for _, gpus in self.allocation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What jobs of one family have measured, those that have ended among them.

    ``batches`` are those that its newest job allows. ``noise`` is that of gradients when such a job
    begins; ``work`` what one took in all, if any has ended.
    """

    batches: BatchLimits | None = None
    profiles: Mapping[str, Profile] = field(default_factory=dict)
    noise: GradientNoise | None = None
    work: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """All that a plan may know. Names of nodes are unique, and so are those of jobs.

    ``quotas``: the most GPUs of all jobs of an owner together; who is not named has no bound.
    """

    nodes: tuple[Node, ...]
    jobs: tuple[Job, ...]
    families: Mapping[str, Family] = field(default_factory=dict)
    quotas: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for what, names in (
            ("node", [node.name for node in self.nodes]),
            ("job", [job.name for job in self.jobs]),
        ):
            if len(set(names)) < len(names):
                twice = sorted(name for name in set(names) if names.count(name) > 1)
                raise InvalidRequestError(f"{what} {twice[0]} is there twice")
