"""Jobs that could not run here were the cluster empty: each with the sum that says so (F107)."""

from __future__ import annotations

from collections import Counter

from holdfast_services.scheduler.domain.policies.facts import Job, View
from holdfast_services.scheduler.domain.policies.shapes import Pool, pool_of


def refusals(view: View) -> dict[str, str]:
    """Return why each of those jobs can never run; nodes that are lost now count, they come back.

    With no node at all nothing is known, and nobody is refused.
    """
    everything = Counter(pool_of(node) for node in view.nodes if node.gpus)
    lasting = Counter(pool_of(node) for node in view.nodes if node.gpus and not node.spot)
    found = {}
    for job in view.jobs if everything else ():
        why = _refusal(job, everything if job.preemptible else lasting, view)
        if why:
            found[job.name] = why
    return found


def _refusal(job: Job, counts: Counter[Pool], view: View) -> str:
    quota = view.quotas.get(job.owner)
    if quota is not None and quota < job.replicas_min:
        return f"needs {job.replicas_min} GPUs, and the quota of {job.owner or 'nobody'} is {quota}"
    if job.batches.replicas_max < job.replicas_min:
        return (
            f"needs {job.replicas_min} GPUs, and its batch of at most {job.batches.maximum} "
            f"samples gives {job.batches.local_min} each to {job.batches.replicas_max}"
        )
    fits = [
        pool
        for pool, nodes in sorted(counts.items())
        if job.gpu_types is None or pool.gpu_type in job.gpu_types
    ]
    if any(counts[pool] * pool.gpus_per_node >= job.replicas_min for pool in fits):
        return ""
    has = " or ".join(
        f"{counts[pool]} nodes x {pool.gpus_per_node} = {counts[pool] * pool.gpus_per_node} "
        f"of {pool.gpu_type}"
        for pool in fits
    )
    which = "" if job.gpu_types is None else f" of {', '.join(sorted(job.gpu_types))}"
    lasting = "" if job.preemptible else " that are not spot, since it is not preemptible"
    return f"needs {job.replicas_min} GPUs{which} of one kind{lasting}: there are {has or 'none'}"
