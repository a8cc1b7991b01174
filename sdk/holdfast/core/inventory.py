"""What an agent reports of its node: a level, each replaces the one before.

Each class has the name and the fields of a message in ``proto/holdfast/v1``; ``rpc.codec`` turns
one into the other by those names. Units: bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import IntEnum
from operator import attrgetter

from holdfast.core.abandoned_step import AbandonedStep
from holdfast.core.ids import CheckpointId, ShardId
from holdfast.core.needs import Needs
from holdfast.core.reports import RankReport
from holdfast.core.shard import Shard
from holdfast.core.sources import Source
from holdfast.core.stripes import Element


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a node serves its segments over one kind of transport.

    The kind gives the form of the address: of ``tcp`` it is ``host:port``.
    """

    kind: str
    address: str

    def __str__(self) -> str:
        """Name it for people."""
        return f"{self.kind}://{self.address}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A live node as others reach it; ``domain`` empty means that it fails alone.

    ``endpoints`` serve its segments; whoever fetches takes one of a kind that it knows.
    """

    node: str
    rpc_address: str
    endpoints: tuple[Endpoint, ...]
    domain: str = ""


class HeldState(IntEnum):
    """Whether a held copy may be served."""

    UNSPECIFIED = 0
    SEALED = 1
    QUARANTINED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldShard:
    """One copy on the reporting node; ``owner`` is the node whose trainer wrote it."""

    shard: Shard
    state: HeldState
    owner: str
    slot_incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldElement:
    """An element of parity on the reporting node; one whose bytes are bad is not held any more."""

    element: Element
    root_digest: bytes
    slot_incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """What one rank's session is doing; ``ready_decision`` 0 means not ready for any.

    ``report`` is what the rank says of itself, as it said it; ``needs`` are those that it named, if
    it ``names_needs``, without byte ranges; the rest is what its agent sees.
    """

    job: str
    run: str
    generation: int
    rank: int
    live: bool = True
    ready_decision: int = 0
    nonce: bytes = b""
    report: RankReport = field(default_factory=RankReport)
    names_needs: bool = False
    needs: Needs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BadSource:
    """A source that had no good bytes of a shard, as seen while fetching for ``decision``."""

    shard: ShardId
    source: Source
    decision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """All that one agent holds and all ranks it serves; newer by (incarnation, sequence).

    ``seen``: of each run the newest committed checkpoint that the agent was told of. It replaces
    no shard of that one, or of one before it, by itself (architecture 4.7). ``room_bytes``: what
    more fits without a lease or a copy being given up for it.
    """

    node: Peer
    incarnation: int
    sequence: int
    budget_bytes: int = 0
    used_bytes: int = 0
    shards: tuple[HeldShard, ...] = ()
    ranks: tuple[RankStatus, ...] = ()
    abandoned: tuple[AbandonedStep, ...] = ()
    bad_sources: tuple[BadSource, ...] = ()
    leaving: bool = False
    seen: tuple[CheckpointId, ...] = ()
    elements: tuple[HeldElement, ...] = ()
    room_bytes: int = 0

    def lasting(self) -> tuple[object, ...]:
        """Return what does not change with every training step, to be compared."""
        ranks = [(*_of_rank(rank), rank.report.lasting()) for rank in self.ranks]
        return (*_of_node(self), ranks)

    def of_itself(self) -> tuple[object, ...]:
        """Return which life of the agent it is, and what of ``lasting`` is of no run."""
        return (self.incarnation, *_of_no_run(self))

    def by_run(self) -> dict[str, list[object]]:
        """Return what ``lasting`` says of each run."""
        found: dict[str, list[object]] = {}
        for held in self.shards:
            found.setdefault(held.shard.id.run, []).append(held)
        for made in self.elements:
            found.setdefault(made.element.stripe.checkpoint.run, []).append(made)
        for rank in self.ranks:
            said = (*_of_rank(rank), rank.report.lasting())
            found.setdefault(rank.run, []).append(said)
        for step in self.abandoned:
            found.setdefault(step.run, []).append(step)
        for bad in self.bad_sources:
            found.setdefault(bad.shard.run, []).append(bad)
        for key in self.seen:
            found.setdefault(key.run, []).append(key)
        return found


_of_rank = attrgetter(*(spec.name for spec in fields(RankStatus) if spec.name != "report"))
_PASSING = frozenset({"incarnation", "sequence", "used_bytes", "room_bytes", "ranks"})
_of_node = attrgetter(*(spec.name for spec in fields(Inventory) if spec.name not in _PASSING))
_BY_RUN = frozenset({"shards", "elements", "abandoned", "bad_sources", "seen"})
_of_no_run = attrgetter(
    *(spec.name for spec in fields(Inventory) if spec.name not in _PASSING | _BY_RUN)
)
