"""The shapes that an allocation may have: so many GPUs on so many nodes of one pool.

A *pool* is all nodes with the same type and number of GPUs. On one node a job may have any number
of GPUs, on several it has whole nodes, but for the last where its bounds ask for it: so two jobs
never share the network of a node, and there are few shapes to choose from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from holdfast.core.meshes import counts
from holdfast_services.scheduler.domain.policies.facts import Job, Node, NodeState

NODES_APART = 16
"""Up to so many nodes a job may have any number of them; above, each further number is a quarter
more than the last."""
FEW_GPUS = 4
"""Up to so many GPUs of a node any number of them; above, powers of two, and three times those."""


@dataclass(frozen=True, slots=True, order=True)
class Pool:
    """A kind of node."""

    gpu_type: str
    gpus_per_node: int


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """``gpus`` on ``nodes`` nodes of a pool."""

    pool: Pool
    gpus: int
    nodes: int


def pool_of(node: Node) -> Pool:
    """Return the pool of a node."""
    return Pool(node.gpu_type, node.gpus)


def pools(nodes: Iterable[Node]) -> tuple[Pool, ...]:
    """Return the pools of the nodes that have GPUs to give, in order."""
    return tuple(sorted({pool_of(n) for n in nodes if n.gpus and n.state is NodeState.UP}))


def shapes(nodes: Sequence[Node], jobs: Iterable[Job]) -> tuple[Shape, ...]:
    """Return every shape that any of ``jobs`` may have on ``nodes``, by pool and GPUs."""
    up = [node for node in nodes if node.state is NodeState.UP]
    asked = {
        count for job in jobs for count in (job.replicas_min, job.replicas_max, *counts(job.meshes))
    }
    found = set()
    for pool in pools(nodes):
        count = sum(pool_of(node) == pool for node in up)
        for gpus in {*_counts(pool.gpus_per_node, count), *asked}:
            needed = -(-gpus // pool.gpus_per_node)
            if needed <= count:
                found.add(Shape(pool=pool, gpus=gpus, nodes=needed))
    return tuple(sorted(found))


def shape_of(job: Job, nodes: Mapping[str, Node]) -> Shape | None:
    """Return the shape of the GPUs that a job has; None if it has none, or a node of it is lost."""
    there = [nodes[name] for name, _ in job.allocation if name in nodes]
    found = {pool_of(node) for node in there if node.state is NodeState.UP}
    whole = len(there) == len(job.allocation) and all(n.state is NodeState.UP for n in there)
    if len(found) != 1 or not whole:
        return None
    return Shape(pool=found.pop(), gpus=job.gpus, nodes=len(job.allocation))


def _counts(per_node: int, nodes: int) -> Iterator[int]:
    """Yield the numbers of GPUs that are worth a choice.

    >>> list(_counts(8, 3)), list(_counts(4, 2))
    ([1, 2, 3, 4, 6, 8, 16, 24], [1, 2, 3, 4, 8])
    """
    for gpus in range(1, per_node + 1):
        even = gpus & (gpus - 1) == 0 or (gpus % 3 == 0 and (gpus // 3) & (gpus // 3 - 1) == 0)
        if gpus <= FEW_GPUS or even or gpus == per_node:
            yield gpus
    count = 2
    while count <= nodes:
        yield count * per_node
        count += max(1, count // 4) if count >= NODES_APART else 1
