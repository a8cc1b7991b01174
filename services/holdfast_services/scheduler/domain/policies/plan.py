"""A plan: which GPUs each job should have now, and why, from facts, a policy and a time.

Whoever may not move keeps what it has, who starves is served, the policy chooses a shape for each
of the others, and placing finds nodes. Deterministic, and the same in whatever order jobs and nodes
are told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from holdfast_services.scheduler.domain.policies.facts import Allocation, Job, View
from holdfast_services.scheduler.domain.policies.placing import Room, place
from holdfast_services.scheduler.domain.policies.refusals import refusals
from holdfast_services.scheduler.domain.policies.shapes import Pool, pools
from holdfast_services.scheduler.domain.policies.starving import Starvation, keeps, serve
from holdfast_services.scheduler.domain.policies.table import Array, Table, table

RULE = Starvation()


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What a policy chooses from: the jobs that may move, and the GPUs that are theirs.

    ``capacity``: GPUs by pool. ``quota_left``: GPUs by owner, for those who have a quota.
    """

    table: Table
    capacity: Mapping[Pool, int]
    quota_left: Mapping[str, int]
    now_s: float


class Choice(Protocol):
    """What a policy has chosen; rows and columns are those of the table.

    ``columns``: the shape of each job, -1 for none. ``values``: what each shape is worth to each
    job where the chosen one does not fit; not above 0: it may not have it.
    """

    @property
    def columns(self) -> Sequence[int]:
        """The column of each row, -1 for none."""

    @property
    def values(self) -> Array:
        """What each shape is worth to each job."""

    @property
    def prices(self) -> Mapping[Pool, float]:
        """What a GPU of each pool costs, where a policy has a price."""

    def why(self, row: int, column: int) -> str:
        """Return in one sentence why the job of ``row`` has the shape of ``column``."""


class Policy(Protocol):
    """How GPUs are shared out: a value with its parameters."""

    @property
    def name(self) -> str:
        """What it is called on the command line."""

    def choose(self, facts: Round) -> Choice:
        """Return the shape of each job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What each job should have. Who is not in ``allocations`` waits; ``reasons`` has all jobs.

    ``refused``: jobs that can never run here, with the sum; they are in ``reasons`` as well.
    """

    allocations: Mapping[str, Allocation] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    prices: Mapping[Pool, float] = field(default_factory=dict)


def plan(view: View, policy: Policy, now_s: float, starvation: Starvation = RULE) -> Plan:
    """Return what every job of the view should have from now on."""
    return _plan(view, policy, now_s, starvation, stays=frozenset())


def plan_arrivals(view: View, policy: Policy, now_s: float) -> Plan:
    """Return a plan in which who has GPUs keeps them, and who waits gets what is free (F101)."""
    has = frozenset(job.name for job in view.jobs if job.allocation)
    return _plan(view, policy, now_s, RULE, stays=has)


def _plan(
    view: View, policy: Policy, now_s: float, starvation: Starvation, *, stays: frozenset[str]
) -> Plan:
    refused = refusals(view)
    ordered = sorted(view.jobs, key=lambda job: (job.submitted_s, job.name))
    room = Room(view.nodes, view.quotas)
    allocations: dict[str, Allocation] = {}
    reasons = {name: f"refused: {why}" for name, why in refused.items()}
    open_jobs = [job for job in ordered if job.name not in refused]
    for job in open_jobs:
        why = _pinned(job, stays, starvation, now_s)
        if why and room.has(job.allocation):
            room.take(job, job.allocation)
            allocations[job.name] = job.allocation
            reasons[job.name] = f"keeps its {job.gpus} GPUs: {why}"
    moving = [job for job in open_jobs if job.name not in allocations]
    if not pools(view.nodes):
        reasons |= {job.name: "waits: no node may be used now" for job in moving}
        return Plan(allocations=allocations, reasons=reasons, refused=refused)
    if not stays:
        served = serve(view, moving, room, starvation, now_s)
        allocations |= served
        why = f"had waited for {starvation.starves_s:.0f} s: served first, with the least"
        reasons |= dict.fromkeys(served, why)
        moving = [job for job in moving if job.name not in served]
    facts = Round(
        table=table(view, moving),
        capacity={pool: room.capacity(pool) for pool in pools(view.nodes)},
        quota_left={owner: max(gpus, 0) for owner, gpus in room.quota_left.items()},
        now_s=now_s,
    )
    choice = policy.choose(facts)
    shapes = facts.table.shapes
    placed = place(room, moving, shapes, choice.columns, choice.values)
    columns = {shape: at for at, shape in enumerate(shapes)}
    for row, job in enumerate(moving):
        column = -1
        if job.name in placed:
            has = replace(job, allocation=placed[job.name])
            allocations[job.name] = has.allocation
            shape = room.shape(has)
            assert shape is not None
            column = columns[shape]
        reasons[job.name] = choice.why(row, column)
    return Plan(
        allocations=allocations, reasons=reasons, refused=refused, prices=dict(choice.prices)
    )


def _pinned(job: Job, stays: frozenset[str], starvation: Starvation, now_s: float) -> str:
    """Return why a job is not moved now; empty if it may be."""
    if not job.allocation:
        return ""
    if not job.preemptible:
        return "it is not preemptible"
    if job.name in stays:
        return "only who waits is placed now"
    return "it had starved before" if keeps(job, starvation, now_s) else ""
