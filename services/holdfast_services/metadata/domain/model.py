"""The facts that the rules reason about: nodes, one run with its attempt, what is committed.

All values are frozen; a rule returns a changed copy. Times are seconds of the database's clock,
the only one there is; they arrive as arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.core.facts import (
    AbandonedStep,
    Decision,
    DecisionState,
    Event,
    Inventory,
    SupersedeRule,
)
from holdfast.core.ids import CheckpointId

MEMORY_ROWS_PER_RUN_MAX = 64
ABANDONED_PER_RUN_MAX = 64
SUPERSEDE_RULES_PER_RUN_MAX = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long things are believed, in seconds."""

    node_lease_s: float = 5.0
    decide_wait_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node as it last reported itself."""

    inventory: Inventory
    reported_at_s: float
    lease_until_s: float

    @property
    def name(self) -> str:
        """The name it reports under."""
        return self.inventory.node.node

    def live(self, now_s: float) -> bool:
        """Tell whether its lease holds."""
        return self.lease_until_s > now_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One launch of the process group; ``replicas_cut`` is what the nodes at hand allow."""

    generation: int
    nonce: bytes
    launcher: str
    holder: str
    world_size: int
    replicas: int
    replica_domain: str
    started_at_s: float
    lease_until_s: float
    replicas_cut: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """What is known of one registered rank; ``loaded`` never goes back."""

    rank: int
    node: str
    registered_at_s: float
    live: bool = True
    ready_decision: int = 0
    loaded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A committed checkpoint; a level is a fact with a time, None until it was reached."""

    id: CheckpointId
    world_size: int
    plan_hash: str
    length_bytes: int
    local_at_s: float
    replicated_at_s: float | None = None
    durable_at_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One lineage of checkpoints with its newest attempt.

    Invariants:
        * ``generation`` is at least that of the attempt and of every shard seen; an attempt
          below it is fenced.
        * ``decision`` belongs to the attempt; once CONFIRMED it never changes.
        * ``rejected`` are the checkpoints that this attempt tried in vain.
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
    abandoned: tuple[AbandonedStep, ...] = ()
    announced_step: int = 0
    announced_at_s: float = 0.0

    @property
    def current(self) -> Attempt | None:
        """The attempt whose claims count; None when there is none or it is fenced."""
        attempt = self.attempt
        return attempt if attempt and attempt.generation == self.generation else None

    def superseded(self, checkpoint: CheckpointId) -> bool:
        """Tell whether a confirmed restore has left ``checkpoint`` behind."""
        return any(rule.covers(checkpoint) for rule in self.rules)

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
            and sum(rank.loaded for rank in self.ranks) < attempt.world_size
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A changed run and the news of the change."""

    run: Run
    events: tuple[Event, ...] = field(default=())
