"""What is known of one run now, gathered once for all parts of a page. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.core.decision import DecisionState
from holdfast.core.ids import CheckpointId
from holdfast.core.inventory import RankStatus
from holdfast.core.reports import RankCosts
from holdfast_services.metadata.domain import costs
from holdfast_services.metadata.domain.attempts import status_by_rank
from holdfast_services.metadata.domain.believed_copies import CheckpointCopies
from holdfast_services.metadata.domain.model import Checkpoint, Run
from holdfast_services.metadata.domain.node_view import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A run, the last word of each of its ranks, and what it all cost.

    ``step`` is the last one that a rank has completed, 0: none is known; ``step_s`` how long a step
    of the slowest takes, 0: not known. ``usable`` are the rows that a restore could choose, newest
    first; ``copies`` where shards can be had, in memory and, during a restore, in the store.
    """

    run: Run
    now_s: float
    training: bool
    statuses: Mapping[int, RankStatus]
    costs: RankCosts
    step: int
    step_s: float
    shortage: str
    usable: tuple[Checkpoint, ...]
    copies: Mapping[CheckpointId, CheckpointCopies]

    @property
    def world_size(self) -> int:
        """Ranks of the newest attempt; 0: none began."""
        return self.run.attempt.spec.world_size if self.run.attempt else 0

    @property
    def state(self) -> str:
        """What the job does, in one word or two."""
        decision = self.run.decision
        if self.training and decision is not None and self.run.deciding:
            return "deciding"
        if decision is not None and decision.state is DecisionState.LOST and not decision.fresh:
            return "cannot restore"
        if self.training:
            return "restoring" if self.run.loading else "trains"
        return "stopped"


def training(run: Run, now_s: float) -> bool:
    """Tell whether the newest attempt of the run has a lease that holds."""
    return run.attempt is not None and run.attempt.lease_until_s > now_s


def facts_of(run: Run, world: World) -> Facts:
    """Return what is known of a run."""
    statuses = status_by_rank(run, world.nodes)
    reports = [status.report for status in statuses.values()]
    usable = tuple(row for row in run.checkpoints if run.usable(row.id))
    newest = usable[0].id.step if usable else 0
    evidence = world.evidence.get(run.id)
    return Facts(
        run=run,
        now_s=world.now_s,
        training=training(run, world.now_s),
        statuses=statuses,
        costs=costs.shown(run.attempt, statuses) if run.attempt else RankCosts(),
        step=max((report.step for report in reports), default=newest) or newest,
        step_s=max((report.step_s for report in reports), default=0.0),
        shortage=world.shortages.get(run.id, ""),
        usable=usable,
        copies=evidence.sources if evidence else {},
    )
