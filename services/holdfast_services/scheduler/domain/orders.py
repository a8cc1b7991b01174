"""What follows from what jobs have: orders for nodes, and allocations for the metadata service."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast.core.allocations import Allocation, Share
from holdfast.core.executions import Order, Orders
from holdfast.core.job_spec import JobSpec
from holdfast.core.meshes import MESHES
from holdfast.core.rounds import NODES_MAX
from holdfast_services.scheduler.domain.job import Job, Part

LEAVE_S = 60.0
"""Beside its grace, how long a launcher that the metadata service ends may take to do so."""


def orders_by_node(jobs: Iterable[Job], now_s: float) -> dict[str, Orders]:
    """Return all that each node is to have; of a node that is not in it, nothing. No versions.

    What metadata has not taken yet is not ordered: a launcher must not come before its allocation.
    """
    found: dict[str, dict[tuple[str, int], Order]] = {}
    numbers: dict[str, int] = {}
    for job in jobs:
        for part in job.parts:
            if part.start <= job.told:
                order = _order(job, part, leaving=False)
                found.setdefault(part.node, {})[order.job, order.start] = order
                numbers[part.node] = max(numbers.get(part.node, 0), part.start)
        for held in job.held:
            # An executor that has carried out this number knows that it is to have no more of it.
            numbers[held.node] = max(numbers.get(held.node, 0), held.number)
            patient = now_s < held.since_s + job.spec.grace_s + LEAVE_S
            if patient:
                order = _order(job, held, leaving=True)
                found.setdefault(held.node, {}).setdefault((order.job, order.start), order)
    return {
        node: Orders(number=number, orders=tuple(made[key] for key in sorted(made)))
        for node, number in numbers.items()
        for made in (found.get(node, {}),)
    }


def _order(job: Job, part: Part, *, leaving: bool) -> Order:
    spec = job.spec
    return Order(
        job=spec.name,
        start=part.start,
        gpus=max(1, len(part.devices)),
        nodes_max=min(spec.gpus_max, NODES_MAX),
        command=() if leaving else spec.command,
        environment={} if leaving else _environment(spec),
        folder=spec.folder,
        grace_s=spec.grace_s,
        leaving=leaving,
    )


def _environment(spec: JobSpec) -> Mapping[str, str]:
    if not spec.meshes:
        return spec.environment
    return {**spec.environment, MESHES: ";".join(spec.meshes)}


def allocation(job: Job) -> Allocation:
    """Return what the metadata service is to know of who takes part."""
    shares = (
        Share(node=part.node, ranks=len(part.devices), devices=part.devices) for part in job.parts
    )
    # With meshes what is left without a node may be no number of ranks that it trains on.
    ranks_min = 0 if job.spec.meshes else job.spec.gpus_min
    return Allocation(number=job.number, ranks_min=ranks_min, shares=tuple(shares))
