"""The facts that the rules reason about: nodes, one run with its attempt, what is committed.

All values are frozen; a rule returns a changed copy. Times are seconds of the database's clock,
the only one there is; they arrive as arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeAlias

from holdfast.core import lines
from holdfast.core.abandoned_step import AbandonedStep
from holdfast.core.announcements import Announcement
from holdfast.core.attempts import AttemptSpec
from holdfast.core.decision import Decision, DecisionState
from holdfast.core.failure_record import FailureRecord
from holdfast.core.ids import CheckpointId, ShardId
from holdfast.core.inventory import Inventory
from holdfast.core.lines import Move
from holdfast.core.node_view import SupersedeRule
from holdfast.core.persistence_rules import Retention
from holdfast.core.protection import NO_COPIES, Protection
from holdfast.core.reports import RankCosts
from holdfast.core.shard import Shard
from holdfast.core.user_events import Event
from holdfast_services.metadata.domain.ledger import Ledger

MEMORY_ROWS_PER_RUN_MAX = 64
ABANDONED_PER_RUN_MAX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long leases and waits last, in seconds, and whether there is an object tier.

    ``listen_s``: for so long after a gap, or at its beginning, a catalogue decides nothing.
    """

    node_lease_s: float = 5.0
    decide_wait_s: float = 10.0
    listen_s: float = 0.0
    object_tier: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node as it last reported itself."""

    inventory: Inventory
    reported_at_s: float
    lease_until_s: float

    @property
    def name(self) -> str:
        """The name under which the node reports."""
        return self.inventory.node.node

    def live(self, now_s: float) -> bool:
        """Tell whether the node's lease holds."""
        return self.lease_until_s > now_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One launch of the process group; ``allowed`` is what the live nodes allow of ``protection``.

    ``spec`` is what the rank that began it said. ``start_due``: no attempt before it has begun
    where it asks to. ``costs`` are those of its ranks together, as of ``costs_at_s``.
    """

    generation: int
    spec: AttemptSpec
    started_at_s: float
    lease_until_s: float
    allowed: Protection = NO_COPIES
    start_due: bool = False
    costs: RankCosts = field(default_factory=RankCosts)
    costs_at_s: float = 0.0

    @property
    def protection(self) -> Protection:
        """What the attempt asks for against the loss of nodes."""
        return self.spec.protection

    def awaits_nodes(self, now_s: float, limits: Limits) -> bool:
        """Tell whether nodes that have not reported since it began may still do."""
        return now_s < self.started_at_s + limits.decide_wait_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """What is known of one registered rank; ``loaded`` never goes back."""

    rank: int
    node: str
    registered_at_s: float
    live: bool = True
    ready_decision: int = 0
    loaded: bool = False


class NoParent(Enum):
    """Why a checkpoint names no other one as its parent."""

    BEGAN = "began"
    """Its attempt began at step 0."""
    UNKNOWN = "unknown"
    """The catalogue that saw its attempt begin was lost."""


Parent: TypeAlias = CheckpointId | NoParent
"""What the attempt that made a checkpoint had restored."""


def read_parent(key: CheckpointId, written: CheckpointId | None) -> Parent:
    """Return the parent of ``key`` by what its row or manifest names."""
    if written is None:
        return NoParent.BEGAN
    return NoParent.UNKNOWN if written == key else written


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A committed checkpoint; a level is a fact with a time, None until it was reached.

    ``copied_at_s``: as many copies as the policy asks for, or as the live nodes allowed then, lay
    with holders that knew of the commit; see ``acknowledged``.
    ``drain_at_s`` is set while it is on its way to the object store. ``notes`` are the user's, a
    JSON object or empty. ``parent`` is what its attempt had restored.
    ``expired`` and ``bad`` speak of the objects of a durable one: they are, or are being,
    deleted; some were read back wrong.
    """

    id: CheckpointId
    world_size: int
    plan_hash: str
    length_bytes: int
    local_at_s: float
    replicated_at_s: float | None = None
    durable_at_s: float | None = None
    copied_at_s: float | None = None
    drain_at_s: float | None = None
    notes: str = ""
    parent: Parent = NoParent.BEGAN
    expired: bool = False
    bad: bool = False

    @property
    def written_parent(self) -> CheckpointId | None:
        """The parent as rows and manifests name it; ``read_parent`` is the way back.

        Itself where it is not known. That claims no more than is certain: what is later and of an
        older generation was left behind.
        """
        if isinstance(self.parent, CheckpointId):
            return self.parent
        return self.id if self.parent is NoParent.UNKNOWN else None

    @property
    def draining(self) -> bool:
        """Whether the checkpoint is on its way to the object store."""
        return self.drain_at_s is not None

    @property
    def stored(self) -> bool:
        """Whether the object store has all of the checkpoint, as far as is known intact."""
        return self.durable_at_s is not None and not self.expired and not self.bad

    @property
    def acknowledged(self) -> bool:
        """Whether nobody replaces it, so that older slots may be freed (4.7).

        What is stored is, too: else saving stops for good where a holder had replaced its part
        before it heard of the commit.
        """
        return self.copied_at_s is not None or self.stored


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """A checkpoint on its way to the object store, and the shards that are still missing there."""

    checkpoint: CheckpointId
    missing: tuple[Shard, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What the object store has of a durable checkpoint: all shards, sorted, some maybe bad."""

    checkpoint: CheckpointId
    shards: tuple[Shard, ...]
    bad: tuple[ShardId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """That all ranks of the newest attempt have ended; ``in_order``: they closed what they had."""

    at_s: float
    in_order: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One lineage of checkpoints with its newest attempt.

    Invariants:
        * ``generation`` is at least that of the attempt and of every shard seen; an attempt
          below it is fenced.
        * ``decision`` belongs to the attempt; once CONFIRMED it never changes.
        * ``rejected`` are the checkpoints that this attempt tried in vain, and the one that the
          attempt before had confirmed and could not load.
        * ``checkpoints`` are all that are in memory only, and of the durable ones the newest few
          that may be restored and the newest few of the newest generation; newest first. Before
          inventories are judged, the row of all that they speak of is among them: only then is
          a checkpoint without a row a new one.
        * ``drains`` has one entry per draining row.
        * ``stored`` is filled while a restore is decided or loaded, for what may be restored.

    ``persisted_step`` and ``persisted_at_s`` are those of the last checkpoint that became due;
    ``persist_owed``: another was due and could not go, so the next one does. ``started`` are the
    names of the starts that were made, the newest last, a bounded number. ``rules`` follow from
    ``moves``, by ``after``. ``record`` is of the attempts before the newest, and ``ended``
    tells how that has ended; ``ledger`` of all of them.
    """

    id: str
    job: str
    generation: int = 0
    attempt: Attempt | None = None
    ranks: tuple[RankFacts, ...] = ()
    decision: Decision | None = None
    rejected: tuple[CheckpointId, ...] = ()
    pins: tuple[CheckpointId, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    rules: tuple[SupersedeRule, ...] = ()
    moves: tuple[Move, ...] = ()
    abandoned: tuple[AbandonedStep, ...] = ()
    announcement: Announcement | None = None
    announced_at_s: float = 0.0
    retention: Retention | None = None
    persisted_step: int = 0
    persisted_at_s: float = 0.0
    persist_owed: bool = False
    drains: tuple[Drain, ...] = ()
    stored: tuple[Stored, ...] = ()
    started: tuple[str, ...] = ()
    record: FailureRecord = field(default_factory=FailureRecord)
    ledger: Ledger = field(default_factory=Ledger)
    ended: Ended | None = None

    @property
    def current(self) -> Attempt | None:
        """The attempt whose claims count; None if no attempt began, or the newest one is fenced."""
        attempt = self.attempt
        return attempt if attempt and attempt.generation == self.generation else None

    def superseded(self, checkpoint: CheckpointId) -> bool:
        """Tell whether a confirmed restore or a rollback has left ``checkpoint`` behind."""
        return any(rule.covers(checkpoint) for rule in self.rules)

    def after(self, *moves: Move) -> Run:
        """Return the run after some more moves, whenever they were."""
        known = self.moves or lines.moves_of(self.rules)
        every = lines.with_moves(known, *moves)
        if every == self.moves:
            return self
        latest = len(moves) == 1 and every[-1] == moves[0]
        rules = lines.leaves(self.rules, moves[0]) if latest else None
        return replace(self, moves=every, rules=lines.rules_of(every) if rules is None else rules)

    @property
    def removed(self) -> bool:
        """Whether a user removed the job: no checkpoint of it counts until an attempt begins.

        An attempt that asked to start over has such a rule too, but it is the current one.
        """
        return self.current is None and any(
            rule.after_step < 0
            and rule.below_generation >= self.generation
            and not rule.from_generation
            for rule in self.rules
        )

    def dropped(self, checkpoint: CheckpointId) -> bool:
        """Tell whether ``checkpoint`` was abandoned: it will never be whole."""
        return any(
            (step.step, step.generation) == (checkpoint.step, checkpoint.generation)
            for step in self.abandoned
        )

    def usable(self, checkpoint: CheckpointId) -> bool:
        """Tell whether ``checkpoint`` may be chosen or committed at all."""
        return not self.superseded(checkpoint) and not self.dropped(checkpoint)

    @property
    def parent(self) -> CheckpointId | None:
        """What the newest attempt has restored; None: it began at step 0, or has not begun."""
        confirmed = self.decision and self.decision.state is DecisionState.CONFIRMED
        return self.decision.checkpoint if self.decision and confirmed else None

    @property
    def deciding(self) -> bool:
        """Tell whether a restore is being decided: evidence is kept, nothing may be freed."""
        return self.decision is not None and self.decision.state in (
            DecisionState.PENDING,
            DecisionState.PROPOSED,
        )

    @property
    def loading(self) -> bool:
        """Tell whether a confirmed restore has ranks that have not loaded yet."""
        attempt, decision = self.attempt, self.decision
        return (
            attempt is not None
            and decision is not None
            and decision.state is DecisionState.CONFIRMED
            and decision.checkpoint is not None
            and sum(rank.loaded for rank in self.ranks) < attempt.spec.world_size
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A changed run and the news of the change."""

    run: Run
    events: tuple[Event, ...] = field(default=())
