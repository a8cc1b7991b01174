"""What would be lost if something died now, and how long coming back would take. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from holdfast_services.metadata.domain.believed_copies import CheckpointCopies, whole
from holdfast_services.metadata.domain.model import Checkpoint
from holdfast_services.metadata.edges.dashboard.facts import Facts
from holdfast_services.metadata.edges.dashboard.texts import counted, lasted


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPoint:
    """Where a job would go on after a loss: ``step`` None: at step 0, everything is lost.

    ``lost_steps`` and ``lost_s`` are what would have to be trained again, None while nobody trains.
    """

    loss: str
    step: int | None
    lost_steps: int | None = None
    lost_s: float | None = None

    @property
    def brief(self) -> str:
        """The same in a cell of a list."""
        if self.step is None:
            return "everything"
        if self.lost_steps is None or self.lost_s is None:
            return "nothing"
        return self.lost

    @property
    def lost(self) -> str:
        """What would be lost, in words."""
        if self.step is None:
            return "everything: it would begin at step 0"
        if self.lost_steps is None or self.lost_s is None:
            return "nothing: it does not train"
        return f"{counted(self.lost_steps, 'step')}, {lasted(self.lost_s)}"


def recovery_points(facts: Facts) -> tuple[RecoveryPoint, ...]:
    """Return what is left after ever larger losses: processes, a node, all nodes."""
    return (
        _point(facts, "its processes", lambda row: row.stored or whole(_of(facts, row))),
        _point(facts, "any one node", lambda row: row.stored or outlives_a_node(_of(facts, row))),
        _point(facts, "all nodes", lambda row: row.stored),
    )


def outlives_a_node(copies: CheckpointCopies) -> bool:
    """Tell whether a checkpoint stays whole whichever node is lost."""
    return whole(copies) and all(
        item.object or item.rebuilt is not None or len(item.nodes) > 1 for item in copies.values()
    )


def recovery_time(facts: Facts) -> str:
    """Return how long a restore takes, as the last one did; says so if none was measured."""
    cost = facts.costs
    took_s = restore_s(facts)
    if not took_s:
        return "not measured: this attempt has restored nothing"
    parts = (("choose", cost.decide_s), ("fetch", cost.fetch_s), ("load", cost.load_s))
    said = ", ".join(f"{name} {lasted(value)}" for name, value in parts if value)
    return f"{lasted(took_s)}, as the last restore took ({said}), and the start of the script"


def restore_s(facts: Facts) -> float:
    """Return how long the last restore took, in seconds; 0: none was measured."""
    return facts.costs.decide_s + facts.costs.fetch_s + facts.costs.load_s


def _of(facts: Facts, row: Checkpoint) -> CheckpointCopies:
    return facts.copies.get(row.id, {})


def _point(facts: Facts, loss: str, survives: Callable[[Checkpoint], bool]) -> RecoveryPoint:
    row = next(filter(survives, facts.usable), None)
    if row is None:
        return RecoveryPoint(loss=loss, step=None)
    attempt = facts.run.attempt
    if attempt is None or not facts.training:
        return RecoveryPoint(loss=loss, step=row.id.step)
    steps = max(0, facts.step - row.id.step)
    since_s = max(row.local_at_s, attempt.started_at_s)
    lost_s = steps * facts.step_s if facts.step_s else max(0.0, facts.now_s - since_s)
    return RecoveryPoint(loss=loss, step=row.id.step, lost_steps=steps, lost_s=lost_s)
