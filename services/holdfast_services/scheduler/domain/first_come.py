"""The plainest policy: who comes first has what it asks for, as much as is left."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast_services.scheduler.domain.advance import in_queue
from holdfast_services.scheduler.domain.cluster import Cluster
from holdfast_services.scheduler.domain.job import Job
from holdfast_services.scheduler.domain.wishes import Wished


def first_come(jobs: Iterable[Job], cluster: Cluster, now_s: float) -> dict[str, Wished]:
    """Return what each job should have: by priority, then by age, those that fit."""
    live = in_queue(job for job in jobs if not job.over)
    free = {n.name: n.gpus for n in cluster.nodes.values() if not n.hindrance(now_s)}
    wishes: dict[str, dict[str, int]] = {}
    for job in live:  # the least for each first, then what is left
        wishes[job.name] = _taken(job, job.spec.gpus_min, free, {})
    for job in live:
        if wishes[job.name]:
            more = job.spec.gpus_max - job.spec.gpus_min
            wishes[job.name] = _taken(job, more, free, wishes[job.name], least=0)
    return {
        job.name: Wished(id=job.id, gpus=wishes[job.name], why=_why(job, wishes[job.name]))
        for job in live
    }


def _taken(
    job: Job, count: int, free: dict[str, int], has: dict[str, int], *, least: int | None = None
) -> dict[str, int]:
    """Take up to ``count`` GPUs, where it is already first; nothing if there are not enough."""
    least = count if least is None else least
    if sum(free.values()) < least:
        return has
    shares = dict(has)
    for node in sorted(free, key=lambda name: (-job.shares.get(name, 0), -free[name], name)):
        taken = min(count, free[node])
        if taken:
            free[node] -= taken
            shares[node] = shares.get(node, 0) + taken
            count -= taken
    return shares


def _why(job: Job, wish: dict[str, int]) -> str:
    spec = job.spec
    if not wish:
        return f"needs {spec.gpus_min} GPUs, and those before it in the queue leave fewer"
    asked = f"{spec.gpus_min}:{spec.gpus_max}"
    return f"has {sum(wish.values())} of {asked} GPUs, as much as those before it leave"
