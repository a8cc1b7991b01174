"""The simulation: rounds of the scheduler's own plan over the jobs of a trace.

In each round all jobs advance, then those that were submitted meanwhile appear, then the policy
plans, then whoever has other nodes begins to move. Source: the simulator published with Pollux; the
contract is docs/reference/simulate.md.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from holdfast.errors import InternalError
from holdfast_services.scheduler.domain.policies.facts import (
    Family,
    Job,
    MoveCost,
    Node,
    NodeState,
    View,
    Work,
)
from holdfast_services.scheduler.domain.policies.history import History
from holdfast_services.scheduler.domain.policies.plan import Plan, Policy, plan, plan_arrivals
from holdfast_services.scheduler.simulator.mishaps import Mishaps
from holdfast_services.scheduler.simulator.scenario import ROUNDS_MAX, Scenario
from holdfast_services.scheduler.simulator.simulated_job import Noise, SimulatedJob
from holdfast_services.scheduler.simulator.trace import TraceJob

GPU_TYPE = "gpu"
RIGID = frozenset({"fifo"})
"""Policies whose jobs have the GPUs and the batch that their users asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFigures:
    """What a round was like at its end. ``gpus``: that jobs have, of ``gpus_up`` that there are.

    ``cost_per_h``: of the GPUs that jobs have.
    """

    at_s: float
    active: int
    waiting: int
    gpus: int
    gpus_up: int
    price: float
    cost_per_h: float


@dataclass(slots=True, kw_only=True)
class Run:
    """What a simulation has found."""

    policy: str
    scenario: Scenario
    jobs: list[SimulatedJob]
    rounds: list[RoundFigures] = field(default_factory=list)
    lost_nodes: int = 0


def simulate(
    trace: Sequence[TraceJob],
    policy: Policy,
    scenario: Scenario,
    ended: Callable[[], None] = lambda: None,
) -> Run:
    """Return what becomes of the jobs of a trace.

    Args:
        trace: The jobs, in any order.
        policy: Whose plans are carried out.
        scenario: The cluster and what goes wrong.
        ended: Called for each job that has ended.

    Raises:
        InternalError: the policy lets a job wait for ever.
    """
    world = _World(trace, policy, scenario)
    while world.coming or world.active:
        if len(world.run.rounds) >= ROUNDS_MAX:
            names = ", ".join(job.name for job in world.active[:3])
            raise InternalError(f"{policy.name} has not ended after {ROUNDS_MAX} rounds: {names}")
        for _ in range(world.round()):
            ended()
    return world.run


class _World:
    """The state between two rounds."""

    def __init__(self, trace: Sequence[TraceJob], policy: Policy, scenario: Scenario) -> None:
        ordered = sorted(trace, key=lambda job: (job.submitted_s, job.name))
        wishes = random.Random(f"{scenario.seed}:declared")  # noqa: S311 - no secret
        noise = Noise(sigma=scenario.noise, outliers=scenario.outliers)
        jobs = [
            SimulatedJob(
                job, declared=_declared(job, scenario, wishes), fixed=policy.name in RIGID,
                noise=noise, seed=scenario.seed,
            )
            for job in ordered
        ]  # fmt: skip
        self.run = Run(policy=policy.name, scenario=scenario, jobs=jobs)
        self.coming = jobs[::-1]
        self.active: list[SimulatedJob] = []
        self._policy, self._scenario = policy, scenario
        self._nodes = scenario.cluster()
        self._mishaps = Mishaps(scenario, self._nodes)
        self._history: dict[str, History] = {}
        self._now_s = 0.0

    def round(self) -> int:
        """Let one round pass; return how many jobs have ended in it."""
        begin_s = self._now_s
        self._now_s = begin_s + self._scenario.round_s
        self._advance(begin_s)
        over = [job for job in self.active if job.ended_s is not None]
        self._learn()
        self.active = [job for job in self.active if job.ended_s is None]
        while self.coming and self.coming[-1].submitted_s <= self._now_s:
            self.active.append(self.coming.pop())
        nodes = self._mishaps.nodes(self._nodes, self._now_s)
        found = Plan()
        if self.active:
            found = plan(self._view(nodes), self._policy, self._now_s)
            self._apply(found, self._now_s)
        self._note(found, nodes)
        return len(over)

    def _advance(self, begin_s: float) -> None:
        """Let all jobs run until the end of the round, or the loss of a node of theirs."""
        now_s, end_s = begin_s, self._now_s
        lost = [(one.gone_s, one) for one in self._mishaps.between(begin_s, end_s)]
        coming = self._at_once(begin_s, end_s)
        for at_s in sorted({at for at, _ in lost} | {at for at, _ in coming} | {end_s}):
            for job in self.active:
                job.advance(now_s, at_s - now_s)
            now_s = at_s
            for mishap in (one for at, one in lost if at == at_s):
                self.run.lost_nodes += 1
                repeats_s = self._scenario.repeats_s if mishap.by_surprise else 0.0
                for job in self.active:
                    if job.ended_s is None and mishap.node in dict(job.allocation):
                        job.fail(now_s, repeats_s)
            if any(at == at_s for at, _ in coming) and at_s < end_s:
                self.active += [job for at, job in coming if at == at_s]
                self._place_arrivals(now_s)

    def _at_once(self, begin_s: float, end_s: float) -> list[tuple[float, SimulatedJob]]:
        found = []
        while self._scenario.at_once and self.coming and self.coming[-1].submitted_s < end_s:
            job = self.coming.pop()
            found.append((max(job.submitted_s, begin_s), job))
        return found

    def _place_arrivals(self, now_s: float) -> None:
        here = [job for job in self.active if job.ended_s is None]
        nodes = self._mishaps.nodes(self._nodes, now_s)
        found = plan_arrivals(self._view(nodes, here), self._policy, now_s)
        for job in here:
            if not job.allocation and job.name in found.allocations:
                job.move(found.allocations[job.name], now_s, self._scenario.restart_s)

    def _learn(self) -> None:
        """Add to the families what their jobs have measured, and tell the jobs."""
        if not self._scenario.history:
            return
        for job in self.active:
            history = self._history.setdefault(job.truth.name, History())
            history.measured(GPU_TYPE, job.new_points)
            job.new_points.clear()
            if job.first_noise:
                history.began(job.first_noise)
            if job.ended_s is not None:
                history.ended(job.done)
        for job in self.active:
            family = self._history[job.truth.name].family()
            job.family_profile = family.profiles.get(GPU_TYPE)

    def _view(self, nodes: tuple[Node, ...], jobs: Sequence[SimulatedJob] | None = None) -> View:
        families = {name: history.family() for name, history in self._history.items()}
        active = self.active if jobs is None else jobs
        return View(
            nodes=nodes,
            jobs=tuple(self._facts(job, families) for job in active),
            families=families,
        )

    def _facts(self, job: SimulatedJob, families: dict[str, Family]) -> Job:
        profile = job.profile
        return Job(
            name=job.name,
            submitted_s=job.submitted_s,
            batches=job.limits,
            replicas_min=job.replicas_min,
            replicas_max=job.replicas_max,
            family=job.truth.name if job.truth.name in families else "",
            work=Work(done=job.done, declared=job.declared),
            profiles={GPU_TYPE: profile} if profile else {},
            noise=job.noise,
            cost=MoveCost(restart_s=self._scenario.restart_s),
            allocation=job.allocation,
            held_by=job.held_by,
            since_s=job.since_s,
            waited_s=job.waited_s,
            restarts=max(job.starts - 1, 0),
        )

    def _apply(self, found: Plan, now_s: float) -> None:
        for job in self.active:
            allocation = found.allocations.get(job.name, ())
            if allocation != job.allocation:
                job.move(allocation, now_s, self._scenario.restart_s)

    def _note(self, found: Plan, nodes: tuple[Node, ...]) -> None:
        up = [node for node in nodes if node.state is not NodeState.LOST]
        price_per_h = {node.name: node.price_per_h / node.gpus for node in nodes}
        places = [place for job in self.active for place in job.allocation]
        self.run.rounds.append(
            RoundFigures(
                at_s=self._now_s,
                active=len(self.active),
                waiting=sum(not job.allocation for job in self.active),
                gpus=sum(gpus for _, gpus in places),
                gpus_up=len(up) * self._scenario.gpus_per_node,
                price=max(found.prices.values(), default=0.0),
                cost_per_h=sum(gpus * price_per_h[name] for name, gpus in places),
            )
        )


def _declared(job: TraceJob, scenario: Scenario, drawn: random.Random) -> float | None:
    """Return the samples that the user says the job takes; wrong by a factor if so told."""
    whole = job.truth.ends_at(job.truth.epochs - 1) * job.truth.limits.initial
    factor = math.exp(drawn.gauss(0.0, scenario.wrong_by)) if scenario.wrong_by else 1.0
    return whole * factor if scenario.declares else None
