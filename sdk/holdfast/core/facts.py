"""What agents report and what metadata answers: the values both sides reason about.

Each class has the name and the fields of a message in ``proto/holdfast/v1``; ``rpc.codec`` turns
one into the other by those names. Inventories and views are *levels*: each is whole, replaces
the one before, and losing one loses nothing.

Units: bytes, seconds; ``step`` counts optimizer steps completed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum

from holdfast.core.announcements import Announcement
from holdfast.core.ids import CheckpointId, ShardId
from holdfast.core.needs import Needs
from holdfast.core.protection import NO_COPIES, Copies
from holdfast.core.reports import RankReport
from holdfast.core.sources import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A sealed segment as everybody knows it; the same wherever a copy lies."""

    id: ShardId
    job: str
    world_size: int
    plan_hash: str
    length_bytes: int
    root_digest: bytes


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
class PersistRule:
    """Which committed steps go to the object store: the first at or after each multiple.

    ``seconds``: the first step committed so long after the last one that went. 0: no such rule.
    """

    steps: int = 0
    seconds: float = 0.0

    @property
    def on(self) -> bool:
        """Whether any step goes to the object store by itself."""
        return self.steps > 0 or self.seconds > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What is kept in the object store: the union of the rules; no rule at all keeps everything.

    ``last``: the newest n. ``every``: steps that are multiples. ``spaced_s``: one per span of time.
    ``best``: the n best by the key ``metric`` of the user's metadata. ``age_s_min``: nothing
    younger is deleted.
    """

    last: int = 0
    every: int = 0
    spaced_s: float = 0.0
    best: int = 0
    metric: str = ""
    maximize: bool = False
    age_s_min: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where an attempt begins if not at the newest checkpoint; made once per ``name``.

    ``fresh``: at step 0, leaving all checkpoints behind; else at ``step``.
    """

    name: str
    fresh: bool = False
    step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AbandonedStep:
    """A step that will never be whole in this generation: all drop their segments of it."""

    run: str
    step: int
    generation: int
    reason: str = ""


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
    no shard of that one, or of one before it, by itself (architecture 4.7).
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

    def lasting(self) -> Inventory:
        """Return the inventory without the fields that change with every training step."""
        ranks = tuple(replace(rank, report=rank.report.lasting()) for rank in self.ranks)
        return replace(self, incarnation=0, sequence=0, used_bytes=0, ranks=ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class SupersedeRule:
    """Left by a confirmed restore: a checkpoint later than it and older in generation is void."""

    after_step: int
    below_generation: int

    def covers(self, checkpoint: CheckpointId) -> bool:
        """Tell whether ``checkpoint`` may no longer be chosen."""
        return checkpoint.step > self.after_step and checkpoint.generation < self.below_generation


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A checkpoint whose level is a fact; ``local`` is implied.

    ``draining``: it is on its way to the object store, so its slots are kept.
    """

    checkpoint: CheckpointId
    replicated: bool = False
    durable: bool = False
    draining: bool = False


class DecisionState(IntEnum):
    """How far metadata has got with a restore; only CONFIRMED never changes."""

    UNSPECIFIED = 0
    PENDING = 1
    PROPOSED = 2
    CONFIRMED = 3
    LOST = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What an attempt should restore; ``fresh``: nothing, it begins at step 0.

    A node is told those of the checkpoint's ``shards`` that its ranks need, the number of all, and
    the ``world_size`` of the attempt that saved it.
    ``refused``: lost only as to what the attempt asked for; others can be restored. ``notes`` are
    the user's of the checkpoint's step: a JSON object, empty: none are known.
    """

    number: int
    state: DecisionState
    generation: int
    fresh: bool = False
    checkpoint: CheckpointId | None = None
    shards: tuple[Shard, ...] = ()
    reason: str = ""
    refused: bool = False
    notes: str = ""
    shards_count: int = 0
    world_size: int = 0


class WantReason(IntEnum):
    """Why a node should fetch a copy; restores come first."""

    UNSPECIFIED = 0
    RESTORE = 1
    REPAIR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """A copy that this node should fetch, and its sources in the order to ask them.

    The object store is the last.
    """

    shard: Shard
    sources: tuple[Source, ...]
    reason: WantReason


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """What a node needs to know of one run; see ``NodeView``.

    ``ring`` lists the nodes of the attempt in placement order. ``free_before`` is the newest
    checkpoint of which all copies that could be made lie with holders that have said that they know
    of the commit: slots of older ones may be freed. ``copies`` are those that the live nodes allow;
    ``shortage`` why that is fewer than asked for, if no node that was lost may still come back.
    ``attempt`` is the generation of the newest attempt that the catalogue knows, 0: of none;
    ``nonce`` names it: after a lost catalogue another attempt may have had the same generation.
    ``seats`` are those of its ranks that are registered from this node: each must be known again.
    """

    run: str
    job: str
    generation: int
    world_size: int
    ring: tuple[str, ...] = ()
    copies: Copies = NO_COPIES
    committed: tuple[Committed, ...] = ()
    free_before: CheckpointId | None = None
    pinned: tuple[CheckpointId, ...] = ()
    superseded: tuple[SupersedeRule, ...] = ()
    abandoned: tuple[AbandonedStep, ...] = ()
    announcement: Announcement | None = None
    decision: Decision | None = None
    shortage: str = ""
    attempt: int = 0
    nonce: bytes = b""
    seats: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """Everything a node acts on, as of one transaction of the catalogue.

    ``taken_incarnation``, ``taken_sequence``: the node's last inventory that was known then; 0:
    none was. The version does not speak of them. ``spares`` are copies on this node of which as
    many as the policy asks for lie elsewhere: a restore that has no room may take theirs.
    """

    version: str
    nodes: tuple[Peer, ...] = ()
    runs: tuple[RunView, ...] = ()
    wants: tuple[Want, ...] = ()
    incarnation_min: int = 0
    taken_incarnation: int = 0
    taken_sequence: int = 0
    spares: tuple[ShardId, ...] = ()

    @property
    def taken(self) -> tuple[int, int]:
        """The order of the views of one node: by the inventory that each answers (M4)."""
        return self.taken_incarnation, self.taken_sequence


EVENTS_PER_CALL_MAX = 100
"""How many events a call may bring; who has more brings them one call after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event for people; no decision depends on it."""

    kind: str
    severity: str
    message: str
    job: str = ""
    context: Mapping[str, str] = field(default_factory=dict)
