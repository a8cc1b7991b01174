"""What an agent knows: slots, sessions, the last view of the catalogue, work under way.

Owns the values and nothing else; ``event_handling`` and ``next_actions`` change a draft, all
others read. Knows no file, socket or clock: seconds arrive with events. Units: bytes, seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from holdfast.core.abandoned_step import AbandonedStep
from holdfast.core.attempts import AttemptSpec, Seat
from holdfast.core.budget import Reservation
from holdfast.core.ids import CheckpointId, ShardId
from holdfast.core.inventory import BadSource, Endpoint, HeldState, Peer
from holdfast.core.needs import Needs
from holdfast.core.node_view import NodeView, RunView
from holdfast.core.reports import RankReport
from holdfast.core.shard import Shard
from holdfast.core.slot_names import SlotName, SlotState
from holdfast.core.sources import Memory, Object, Rebuilt, Source
from holdfast.core.stripes import Element, Stripe

AGENT = "agent"
"""Holder of slots that the agent itself fills."""


class Work(Enum):
    """What a thread is doing to a slot; nobody else touches the slot meanwhile."""

    NONE = "none"
    CREATING = "creating"
    SEALING = "sealing"
    VERIFYING = "verifying"
    FETCHING = "fetching"
    MAKING = "making"
    RECLAIMING = "reclaiming"


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What a sealed slot holds; ``digests`` are the part digests, joined.

    ``source`` is the tier it came from: ``memory``, ``peer`` or ``object``.
    """

    shard: Shard
    owner: str
    digests: bytes
    source: str = "memory"
    held: HeldState = HeldState.SEALED
    verified_decision: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSum:
    """What a slot with an element of parity holds; digests of parts are joined.

    ``member_digests`` are those of each member of its stripe: what a member that is made again
    is verified against.
    """

    element: Element
    root_digest: bytes
    digests: bytes
    member_digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Twin:
    """Whom a slot was lent to, for the next copy of what it held last: a peer's rank's segment.

    ``session`` has some of the same tensors and fills them in. ``given_up``: it is to let go;
    ``sealed``: since it closed the slot it has sealed a step, most likely that of the filling.
    """

    of: ShardId
    session: str
    given_up: bool = False
    sealed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One file of the arena.

    Invariants: ``content`` is set exactly when the state is SEALED; ``session`` is the holder
    while the state is WRITING or CLOSED (empty: unknown, left from before a restart).
    Without ``plan_hash`` its lease was taken back before anything was written.

    A PARTIAL one holds the ``parts`` of a segment, or will; ``partial`` is set once they are there
    and says of which segment. Its ``length_bytes`` are those of its parts. ``element`` is set
    exactly when the state is ELEMENT.

    ``last`` is what was sealed in it the time before, while nothing is: some of its bytes may lie
    there still. A hint for who fills it, never evidence. ``hindered`` is why it could not be
    sealed when that was tried last, if nothing is wrong with what is in it. ``twin`` is set while
    a rank may fill it for a copy, or has: WRITING or CLOSED, without ``session``. ``made_for`` is
    the session whose rank was to write it when its memory was allocated: it is near that.
    """

    name: SlotName
    length_bytes: int
    work: Work = Work.NONE
    session: str = ""
    plan_hash: str = ""
    content: Content | None = None
    filling: ShardId | None = None
    blocked: bool = False
    parts: frozenset[int] = frozenset()
    partial: Content | None = None
    element: HeldSum | None = None
    last: Content | None = None
    hindered: str = ""
    twin: Twin | None = None
    made_for: str = ""

    @property
    def loadable(self) -> Content | None:
        """What a rank of this node may load from it: a whole segment, or parts of one."""
        return self.content or self.partial

    @property
    def idle_free(self) -> bool:
        """Whether the slot is free and no thread works on it."""
        return self.name.state is SlotState.FREE and self.work is Work.NONE

    def freed(self) -> Slot:
        """Return the slot as a free one, which still knows what it held last."""
        return Slot(
            name=self.name.to(SlotState.FREE),
            length_bytes=self.length_bytes,
            last=self.content or self.last,
            made_for=self.made_for,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One rank's process. ``reading`` holds slots until it has loaded from them.

    ``spec`` and ``report`` are the rank's own words; ``seat`` is the catalogue's answer.
    ``wants_slot`` is the step that found no free slot; ``sealed_s`` when the newest of
    ``sealed_steps`` was; ``replaced`` are sealed steps that gave
    theirs up to a later one, newest last. ``refused`` is why the file system had no room for a
    slot that this session was short of, since it reserved last.
    """

    id: str
    spec: AttemptSpec
    seat: Seat
    report: RankReport = field(default_factory=RankReport)
    opened_s: float = 0.0
    reservation: Reservation | None = None
    refused: str = ""
    live: bool = True
    fenced: bool = False
    wants_slot: int = 0
    sealed_steps: tuple[int, ...] = ()
    sealed_s: float = 0.0
    replaced: tuple[int, ...] = ()
    abandoned: tuple[AbandonedStep, ...] = ()
    reading: frozenset[ShardId] = frozenset()
    proposed_s: float | None = None
    ready_s: float | None = None
    ready_decision: int = 0
    needs: Needs | None = None

    @property
    def run(self) -> str:
        """The run that the rank trains."""
        return self.seat.run

    @property
    def generation(self) -> int:
        """The generation of the rank's attempt."""
        return self.seat.generation

    @property
    def loaded(self) -> bool:
        """Whether the rank has loaded what was confirmed."""
        return self.report.loaded

    @property
    def active(self) -> bool:
        """Whether the rank is alive and of the newest attempt known here."""
        return self.live and not self.fenced


@dataclass(frozen=True, slots=True, kw_only=True)
class Tries:
    """Tries of one fetch or request: when the next may begin, or that one is under way or done."""

    count: int = 0
    next_s: float = 0.0
    under_way: bool = False
    done: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldWish:
    """A copy that an owner asked this node to hold, for the first time at ``asked_s``."""

    shard: Shard
    source: Peer
    asked_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenPiece:
    """A piece of a stripe as this agent reaches it: from one of these nodes, maybe this one."""

    number: int
    is_element: bool
    root_digest: bytes
    peers: tuple[Peer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilding:
    """A stripe as this agent reaches it; at least as many pieces as it has members."""

    stripe: Stripe
    pieces: tuple[GivenPiece, ...]


Giver = Peer | Object | Rebuilding
"""A source as this agent reaches it: of a node's memory, the node."""

AskKey = tuple[ShardId, str, tuple[Endpoint, ...]]
"""Shard, backup node and its endpoints: a backup that came back elsewhere is asked again."""


@dataclass(slots=True, kw_only=True)
class State:
    """The whole state of an agent. ``handle`` changes a copy; values inside are frozen.

    ``seen`` is, by run, the newest committed checkpoint of any view so far: it never goes back,
    whatever order views arrive in. ``replaced_count`` counts since metadata was lost. ``hurried``:
    a restore waits for fetches here, so that none keeps the rate for copies, which is
    ``copies_bytes_per_s``; 0: there is none. ``unlike`` counts, by run, generation and rank, how
    often in turn what was filled in for a copy was other bytes. ``nodes_of_memory``: where several
    are it matters whom a slot is made for.
    """

    me: Peer
    budget_bytes: int
    copies_bytes_per_s: int = 0
    nodes_of_memory: int = 1
    slots: dict[str, Slot] = field(default_factory=dict)
    sessions: dict[str, Session] = field(default_factory=dict)
    view: NodeView | None = None
    lost: str = "metadata service not reached yet"
    seen: dict[str, CheckpointId] = field(default_factory=dict)
    replaced_count: int = 0
    holds: dict[ShardId, HoldWish] = field(default_factory=dict)
    fetches: dict[ShardId, Tries] = field(default_factory=dict)
    asks: dict[AskKey, Tries] = field(default_factory=dict)
    makes: dict[str, Tries] = field(default_factory=dict)
    unlike: dict[tuple[str, int, int], int] = field(default_factory=dict)
    bad_sources: tuple[BadSource, ...] = ()
    hurried: bool = False
    said: frozenset[str] = frozenset()
    creating_after_s: float = 0.0
    next_slot: int = 1
    now_s: float = 0.0

    def copy(self) -> State:
        """Return a state whose change leaves this one as it is."""
        return State(
            me=self.me,
            budget_bytes=self.budget_bytes,
            copies_bytes_per_s=self.copies_bytes_per_s,
            nodes_of_memory=self.nodes_of_memory,
            slots=dict(self.slots),
            sessions=dict(self.sessions),
            view=self.view,
            lost=self.lost,
            seen=dict(self.seen),
            replaced_count=self.replaced_count,
            holds=dict(self.holds),
            fetches=dict(self.fetches),
            asks=dict(self.asks),
            makes=dict(self.makes),
            unlike=dict(self.unlike),
            bad_sources=self.bad_sources,
            hurried=self.hurried,
            said=self.said,
            creating_after_s=self.creating_after_s,
            next_slot=self.next_slot,
            now_s=self.now_s,
        )

    @property
    def used_bytes(self) -> int:
        """Bytes of all slot files, free ones too."""
        return sum(slot.length_bytes for slot in self.slots.values())

    def run(self, run: str) -> RunView | None:
        """Return what the newest view of the catalogue says of ``run``."""
        for view in self.view.runs if self.view else ():
            if view.run == run:
                return view
        return None

    def peer(self, node: str) -> Peer | None:
        """Return the live node of this name, as the newest view has it."""
        nodes = self.view.nodes if self.view else ()
        return next((peer for peer in nodes if peer.node == node), None)

    def giver(self, source: Source) -> Giver | None:
        """Return how to reach a source; None: not a node that is known, or too few of them."""
        match source:
            case Memory():
                return self.peer(source.node)
            case Rebuilt():
                return self.rebuilding(source)
            case Object():
                return source

    def rebuilding(self, source: Rebuilt) -> Rebuilding | None:
        """Return how to reach the pieces of a stripe; None: too few are with nodes known here."""
        pieces = []
        for piece in source.pieces:
            known = (self.peer(node) for node in piece.nodes)
            peers = tuple(peer for peer in known if peer is not None)
            if peers:
                given = GivenPiece(
                    number=piece.number,
                    is_element=piece.is_element,
                    root_digest=piece.root_digest,
                    peers=peers,
                )
                pieces.append(given)
        enough = len(pieces) >= len(source.stripe.members)
        return Rebuilding(stripe=source.stripe, pieces=tuple(pieces)) if enough else None

    def elements(self) -> dict[str, Slot]:
        """Return the slots with elements of parity, by the elements' keys."""
        return {s.element.element.key: s for s in self.slots.values() if s.element is not None}

    def held(self, shard: ShardId) -> Slot | None:
        """Return the slot with a servable copy of ``shard``; for many shards ask ``copies``."""
        return next(
            (
                slot
                for slot in self.slots.values()
                if slot.content
                and slot.content.shard.id == shard
                and slot.content.held is HeldState.SEALED
            ),
            None,
        )

    def partials(self) -> dict[ShardId, Slot]:
        """Return the partial slots whose parts are all there, by shard."""
        found = ((s.partial.shard.id, s) for s in self.slots.values() if s.partial)
        return dict(found)

    def copies(self) -> dict[ShardId, Slot]:
        """Return, by shard, the slot that ``held`` returns for it.

        Made anew for each question: a checkpoint has as many shards as ranks, and ``held`` looks
        at all slots for each of them.
        """
        found: dict[ShardId, Slot] = {}
        for slot in self.slots.values():
            if slot.content and slot.content.held is HeldState.SEALED:
                found.setdefault(slot.content.shard.id, slot)
        return found
