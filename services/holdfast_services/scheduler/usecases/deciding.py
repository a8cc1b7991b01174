"""What only the holder of the lease does: each decision is one transaction that finds it so still.

A scheduler that was stopped for an hour and wakes up between two lines of its own finds another
fence in the row, and has written nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from holdfast.errors import StaleGenerationError
from holdfast_services.scheduler.domain.advance import advance
from holdfast_services.scheduler.domain.cluster import Cluster, Node, Round
from holdfast_services.scheduler.domain.families import family_of
from holdfast_services.scheduler.domain.grants import Wish
from holdfast_services.scheduler.domain.job import Job, State
from holdfast_services.scheduler.domain.knowledge import NOTHING, Knowledge, noise
from holdfast_services.scheduler.domain.numbers import Numbers
from holdfast_services.scheduler.domain.planned import with_defaults
from holdfast_services.scheduler.domain.wishes import Wishes
from holdfast_services.scheduler.storage import Lease, Statements
from holdfast_services.scheduler.usecases.executors import FORGET_S

LEASE_S = 10.0
RENEW_S = 7.0
"""With less than that left a lease is renewed."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What a scheduler knows of its right to decide."""

    holder: str
    fence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """What the metadata service says of a node's agent; ``silent_s``: for how long nothing."""

    live: bool = False
    domain: str = ""
    silent_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What the metadata service says: rounds by job, agents by node. None: it does not answer.

    ``for_s``: so long it has, or has not.
    """

    rounds: Mapping[str, Round] | None
    agents: Mapping[str, Agent] | None
    for_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """All jobs that are not settled and the cluster, after a turn; whether anything changed."""

    jobs: Mapping[str, Job]
    cluster: Cluster
    changed: bool
    news: bool
    now_s: float


def hold(statements: Statements, me: str) -> Holding | None:
    """Return the right to decide, for ``LEASE_S`` from now; None: somebody else has it."""
    lease, now_s = statements.lock_lease(), statements.now_s()
    if lease.holder != me and lease.until_s > now_s:
        return None
    mine = lease.holder == me and lease.until_s > now_s
    fence = lease.fence if mine else lease.fence + 1
    if not mine or lease.until_s < now_s + RENEW_S:
        statements.save_lease(replace(lease, holder=me, fence=fence, until_s=now_s + LEASE_S))
    return Holding(me, fence)


def give_up(statements: Statements, holding: Holding) -> None:
    """Let another one have the lease at once."""
    lease = statements.lock_lease()
    if (lease.holder, lease.fence) == (holding.holder, holding.fence):
        statements.save_lease(replace(lease, until_s=0.0))


def _held(statements: Statements, holding: Holding) -> Lease:
    """Return the lease, locked.

    Raises:
        StaleGenerationError: somebody else has it.
    """
    lease = statements.lock_lease()
    if (lease.holder, lease.fence) != (holding.holder, holding.fence):
        raise StaleGenerationError(
            f"another scheduler plans: {lease.holder}, fence {lease.fence}, mine {holding.fence}"
        )
    return lease


def take_turn(statements: Statements, holding: Holding, heard: Heard) -> Turn:
    """Take in what has happened, and grant what is free of the newest plan.

    Raises:
        StaleGenerationError: another scheduler holds the lease.
    """
    lease, now_s = _held(statements, holding), statements.now_s()
    kept = {one.job.name: one for one in statements.open_jobs()}
    cluster = read_cluster(statements, heard, now_s)
    plan = statements.newest_plan()
    ahead = (found.newest for found in (heard.rounds or {}).values())
    numbers = Numbers(max(lease.number, *ahead, 0))
    jobs = [one.job for one in kept.values()]
    advanced = advance(jobs, _wishes(plan, jobs), cluster, numbers, now_s)
    for name, job in advanced.jobs.items():
        statements.save_job(kept[name], job)
        if job.state is State.ENDED is not kept[name].job.state:
            _note_end(statements, job)
    _save_asides(statements, cluster, advanced.asides)
    out_since_s = lease.metadata_out_since_s or now_s - heard.for_s
    changed = replace(
        lease,
        number=numbers.last,
        metadata_out_since_s=out_since_s if heard.rounds is None else 0.0,
    )
    if changed != lease:
        statements.save_lease(changed)
    after = {name: advanced.jobs.get(name, one.job) for name, one in kept.items()}
    return Turn(
        jobs=after,
        cluster=cluster,
        changed=bool(advanced.jobs),
        news=advanced.news,
        now_s=now_s,
    )


def _note_end(statements: Statements, job: Job) -> None:
    """Keep with what is known of a job that it has done all that it wanted."""
    job_id, known = statements.hint(job.name) or ("", NOTHING)
    if job_id == job.id:
        statements.save_hints(job.name, job.id, replace(known, ended=True))


def _wishes(plan: Wishes | None, jobs: list[Job]) -> dict[str, Wish]:
    """Return what a plan wishes for jobs that it has seen, not for others of their names."""
    by_job = plan.by_job if plan else {}
    return {
        job.name: by_job[job.name].gpus
        for job in jobs
        if job.name in by_job and by_job[job.name].id == job.id
    }


def _save_asides(statements: Statements, cluster: Cluster, after: Mapping[str, object]) -> None:
    before = {name: node.aside for name, node in cluster.nodes.items() if node.aside}
    for name, aside in after.items():
        if aside != before.get(name):
            statements.save_aside(name, aside)  # type: ignore[arg-type]
    for name in before.keys() - after.keys():
        statements.forget_aside(name)


def read_cluster(statements: Statements, heard: Heard, now_s: float) -> Cluster:
    """Return what is known of nodes and rounds; of an outage, as they last were."""
    asides = statements.asides()
    nodes = {}
    for row in statements.executors():
        report, agents = row.report, heard.agents
        agent = (agents or {}).get(row.node, Agent())
        nodes[row.node] = Node(
            name=row.node,
            gpus=report.gpus,
            gpu_type=report.gpu_type,
            spot=report.spot,
            leaving=report.leaving,
            applied=report.applied,
            launches=report.launches,
            silent_s=max(0.0, now_s - row.lease_until_s),
            domain=agent.domain,
            agent_live=None if agents is None else agent.live,
            agent_silent_s=agent.silent_s,
            aside=asides.get(row.node),
        )
    return Cluster(nodes=nodes, rounds=heard.rounds, rounds_since_s=now_s - heard.for_s)


def keep_plan(statements: Statements, holding: Holding, plan: Wishes) -> Wishes:
    """Write a plan under the next number, and return it with that.

    Raises:
        StaleGenerationError: another scheduler holds the lease.
    """
    lease = _held(statements, holding)
    numbered = replace(plan, number=lease.number + 1, made_at_s=statements.now_s())
    statements.save_lease(replace(lease, number=numbered.number))
    statements.add_plan(numbered, holding.fence)
    statements.forget_plans(numbered.number)
    statements.forget_executors(statements.now_s() - FORGET_S)
    statements.forget_hints()
    return numbered


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What is known of the jobs of a turn, by name, and of jobs and submissions before them."""

    jobs: Mapping[str, Knowledge]
    past: tuple[Knowledge, ...]


def learn(statements: Statements, turn: Turn, said: Mapping[str, Knowledge]) -> Learned:
    """Return what is known: what is said now, else what was said before.

    What an earlier submission of a name has measured is kept until the new one says something.
    """
    before = statements.hints()
    known = {}
    for name, job in turn.jobs.items():
        job_id, old = before.get(name, ("", NOTHING))
        new = said.get(name, NOTHING)
        old = old if job_id == job.id else NOTHING
        merged = new
        if new.hints is None:
            step = max(new.step, old.step)
            merged = replace(old, costs=new.costs or old.costs, step=step)
        if merged.hints is not None:
            merged = replace(
                merged,
                gpu_type=_type_of(job, turn) or old.gpu_type,
                family=family_of(job.spec),
                began=old.began or noise(merged.hints),
                ended=old.ended or job.state is State.ENDED,
            )
        is_free = job_id in ("", job.id) or merged.hints is not None
        if is_free and replace(merged, step=old.step, at_s=old.at_s) != old:
            statements.save_hints(name, job.id, merged)
        known[name] = merged
    past = tuple(old for name, (_, old) in before.items() if known.get(name, NOTHING).hints is None)
    return Learned(jobs=with_defaults(known), past=past)


def _type_of(job: Job, turn: Turn) -> str:
    nodes = (turn.cluster.nodes.get(part.node) for part in job.parts)
    return next((node.gpu_type for node in nodes if node), "")


def note_told(statements: Statements, told: Mapping[str, int]) -> None:
    """Note the numbers of the allocations that metadata has taken, by job."""
    for kept in statements.open_jobs():
        number = told.get(kept.job.name, 0)
        if kept.job.told < number <= kept.job.number:
            statements.save_job(kept, replace(kept.job, told=number))
