"""Nobody starves: who has waited too long is served before the policy is asked.

In the order in which they began to wait, each gets the least that it runs on, and keeps that for a
while, on up to half of the GPUs together, or the first of them on whatever it needs. So with ``A``
the least GPUs of those who have waited longer, ``m`` the most that one of these and the job itself
need, and ``K`` the GPUs that are up, of which a job may have any, it waits at most
``starves_s + (2 + A / max(1, K/2 - m + 1)) * (keeps_s + a round)``: in each such span all that were
served before are free again. Pinned jobs take their GPUs out of ``K``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast_services.scheduler.domain.policies.facts import (
    Allocation,
    Job,
    NodeState,
    View,
)
from holdfast_services.scheduler.domain.policies.placing import Room
from holdfast_services.scheduler.domain.policies.shapes import pools, shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Starvation:
    """When a job has waited too long, and how long it then keeps what it got."""

    starves_s: float = 3600.0
    keeps_s: float = 600.0


def keeps(job: Job, rule: Starvation, now_s: float) -> bool:
    """Tell whether a job was served since it starved, so lately that it keeps its GPUs."""
    return bool(
        job.allocation and job.waited_s >= rule.starves_s and now_s - job.since_s < rule.keeps_s
    )


def serve(
    view: View, jobs: Sequence[Job], room: Room, rule: Starvation, now_s: float
) -> dict[str, Allocation]:
    """Return what those get that have waited too long, out of ``room``.

    Args:
        view: All facts.
        jobs: Who may be served, or moved for it.
        room: What is free if all ``jobs`` are moved; taken from.
        rule: When is too long.
        now_s: The time.
    """
    waiting = sorted(
        (job for job in jobs if not job.allocation and now_s - job.since_s >= rule.starves_s),
        key=lambda job: (job.since_s, job.name),
    )
    kept = sum(job.gpus for job in view.jobs if keeps(job, rule, now_s))
    up = sum(node.gpus for node in view.nodes if node.state is NodeState.UP)
    left = up // 2 - kept
    columns = shapes(view.nodes, waiting) if pools(view.nodes) else ()
    stays = [job for job in jobs if job.allocation]
    found: dict[str, Allocation] = {}
    for job in waiting:
        first = not found and not kept
        if job.replicas_min > left and not first:
            break
        least = [
            shape
            for shape in columns
            if shape.gpus == job.replicas_min
            and (job.gpu_types is None or shape.pool.gpu_type in job.gpu_types)
        ]
        options = [room.find_displacing(job, shape, stays) for shape in least]
        allocation = next((option for option in options if option), ())
        if allocation:
            found[job.name] = allocation
            room.take(job, allocation)
            left -= job.replicas_min
    return found
