"""One turn of the scheduler: what has happened, then what can be granted of the plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from holdfast.core.text import tellable
from holdfast_services.scheduler.domain.asides import judged
from holdfast_services.scheduler.domain.cluster import Aside, Cluster
from holdfast_services.scheduler.domain.following import follow
from holdfast_services.scheduler.domain.grants import Wish, grant
from holdfast_services.scheduler.domain.job import Job
from holdfast_services.scheduler.domain.numbers import Numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Advanced:
    """Jobs that have changed; all nodes set aside.

    ``news``: a job has lost GPUs, so the plan is of another world.
    """

    jobs: Mapping[str, Job]
    asides: Mapping[str, Aside]
    news: bool


def advance(
    jobs: Sequence[Job],
    wishes: Mapping[str, Wish],
    cluster: Cluster,
    numbers: Numbers,
    now_s: float,
) -> Advanced:
    """Return what changes now; ``jobs`` are all that are not settled, in any order."""
    asides = {name: node.aside for name, node in cluster.nodes.items() if node.aside}
    before = {job.name: job for job in jobs}
    followed = {name: follow(job, cluster, numbers, now_s) for name, job in before.items()}
    strikes = [strike for one in followed.values() for strike in one.strikes]
    good = [node for one in followed.values() for node in one.good]
    after_asides = judged(asides, strikes, good, now_s)
    cluster = _with(cluster, after_asides)
    after = {name: one.job for name, one in followed.items()}
    news = any(after[name].shares != job.shares for name, job in before.items())
    made = grant(in_queue(after.values()), wishes, cluster, numbers, now_s)
    after |= made.jobs
    after = {name: _awaiting(job, made.waits.get(name, "")) for name, job in after.items()}
    return Advanced(
        jobs={name: job for name, job in after.items() if job != before[name]},
        asides=after_asides,
        news=news,
    )


def _awaiting(job: Job, waiting: str) -> Job:
    waiting = tellable(waiting)
    return job if job.waiting == waiting else replace(job, waiting=waiting)


def _with(cluster: Cluster, asides: Mapping[str, Aside]) -> Cluster:
    nodes = {name: replace(node, aside=asides.get(name)) for name, node in cluster.nodes.items()}
    return replace(cluster, nodes=nodes)


def in_queue(jobs: Iterable[Job]) -> list[Job]:
    """Return jobs in the order in which they are served, were there no other policy."""
    return sorted(jobs, key=lambda job: (-job.spec.priority, job.submitted_at_s, job.name))
