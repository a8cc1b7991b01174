"""The figures of a run: times of jobs, what the cluster did, what it cost, how fair it was."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from holdfast_services.scheduler.simulator.alone import Alone
from holdfast_services.scheduler.simulator.simulated_job import SimulatedJob
from holdfast_services.scheduler.simulator.simulation import Run

FAIR_FROM_S = 300.0
"""Jobs that are shorter alone wait for a round and a start, whatever a policy does."""
HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFigures:
    """One job. ``ftf``: its time beside that alone on its fair share; ``alone_s``: that time."""

    name: str
    application: str
    submitted_s: float
    jct_s: float
    alone_s: float
    ftf: float
    starts: int
    gpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One run.

    ``utilisation``: GPUs that jobs had, of those that were up. ``goodput``: the GPUs' worth of
    progress, by what each job would take alone on one GPU. ``cost``: of the GPUs that jobs had.
    ``ftf_worst``: of jobs that take at least ``FAIR_FROM_S`` alone.
    """

    policy: str
    jobs: int
    jct_mean_s: float
    jct_p50_s: float
    jct_p99_s: float
    makespan_s: float
    utilisation: float
    goodput: float
    cost: float
    ftf_worst: float
    starts_mean: float
    lost_nodes: int


def job_figures(run: Run, alone: Alone) -> list[JobFigures]:
    """Return the figures of each job, in the order of submission."""
    active = _Active(run)
    found = []
    for job in run.jobs:
        assert job.ended_s is not None
        jct_s = job.ended_s - job.submitted_s
        mean = active.mean(job.submitted_s, job.ended_s)
        share = max(1, int(run.scenario.gpus / max(mean, 1.0)))
        best_s = alone.best_s(job.truth, share)
        found.append(
            JobFigures(
                name=job.name,
                application=job.truth.name,
                submitted_s=job.submitted_s,
                jct_s=jct_s,
                alone_s=best_s,
                ftf=jct_s / best_s,
                starts=job.starts,
                gpu_s=job.gpu_s,
            )
        )
    return found


def summary(run: Run, jobs: Sequence[JobFigures], alone: Alone) -> Summary:
    """Return the figures of a run; ``jobs`` are those of its jobs."""
    times = sorted(one.jct_s for one in jobs)
    makespan_s = max((one.submitted_s + one.jct_s for one in jobs), default=0.0)
    up = sum(one.gpus_up for one in run.rounds)
    worth_s = sum(alone.seconds(job.truth, 1) for job in run.jobs)
    cost = sum(one.cost_per_h for one in run.rounds) * run.scenario.round_s / HOUR_S
    return Summary(
        policy=run.policy,
        jobs=len(jobs),
        jct_mean_s=sum(times) / max(len(times), 1),
        jct_p50_s=quantile(times, 0.5),
        jct_p99_s=quantile(times, 0.99),
        makespan_s=makespan_s,
        utilisation=sum(one.gpus for one in run.rounds) / max(up, 1),
        goodput=worth_s / max(makespan_s, 1.0),
        cost=cost,
        ftf_worst=max((one.ftf for one in jobs if one.alone_s >= FAIR_FROM_S), default=0.0),
        starts_mean=sum(one.starts for one in jobs) / max(len(jobs), 1),
        lost_nodes=run.lost_nodes,
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which ``share`` of them lie, linear between two; 0 of none.

    >>> quantile([1.0, 2.0, 4.0], 0.5), quantile([1.0, 2.0], 0.75)
    (2.0, 1.75)
    """
    if not ordered:
        return 0.0
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


class _Active:
    """How many jobs there were, by time."""

    def __init__(self, run: Run) -> None:
        changes = sorted(
            change for job in run.jobs for change in ((job.submitted_s, 1), (_end_s(job), -1))
        )
        self._times = [at for at, _ in changes]
        self._counts = list(accumulate(step for _, step in changes))
        spans = zip(self._times, self._times[1:], self._counts, strict=False)
        self._areas = [0.0, *accumulate((end - begin) * count for begin, end, count in spans)]

    def mean(self, begin_s: float, end_s: float) -> float:
        """Return the mean number of jobs from ``begin_s``, when one came, until one ended."""
        if end_s <= begin_s:
            return 1.0
        begin, end = bisect_left(self._times, begin_s), bisect_left(self._times, end_s)
        return (self._areas[end] - self._areas[begin]) / (end_s - begin_s)


def _end_s(job: SimulatedJob) -> float:
    assert job.ended_s is not None
    return job.ended_s
