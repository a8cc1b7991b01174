"""Which nodes a job gets, once its shape is chosen: whoever keeps its shape keeps its nodes.

Large jobs are placed first, on nodes that are free, small ones where least is left over. Nodes that
hold a job's checkpoint come first among equal ones, spot nodes last. A shape that does not fit,
since what is free lies apart, has one smaller neighbour move, if that is worth its restart; else it
gives way to the best one that fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from holdfast_services.scheduler.domain.policies.facts import Allocation, Job, Node, NodeState
from holdfast_services.scheduler.domain.policies.shapes import Pool, Shape, pool_of, shape_of

Array = npt.NDArray[np.float64]
HORIZON_S = 600.0
"""A neighbour that moves loses what it is worth by the part of this time that its move takes."""


class Room:
    """What is free on the nodes that may be used, while a plan is made."""

    def __init__(self, nodes: Sequence[Node], quotas: Mapping[str, int]) -> None:
        up = [node for node in nodes if node.state is NodeState.UP and node.gpus]
        self._nodes = {node.name: node for node in up}
        self.free = {node.name: node.gpus for node in up}
        self.quota_left = dict(quotas)
        self._shared: set[str] = set()
        """Nodes with a job that lies on several: another one would share their network."""
        self._of_pool: dict[Pool, list[Node]] = {}
        for node in sorted(up, key=lambda node: (node.spot, node.name)):
            self._of_pool.setdefault(pool_of(node), []).append(node)

    def has(self, allocation: Allocation) -> bool:
        """Tell whether all of an allocation is free, and its nodes may be used."""
        several = len(allocation) > 1
        return bool(allocation) and all(
            self.free.get(name, 0) >= gpus and not (several and name in self._shared)
            for name, gpus in allocation
        )

    def take(self, job: Job, allocation: Allocation) -> None:
        """Take an allocation that is free for a job."""
        if job.owner in self.quota_left:
            self.quota_left[job.owner] -= sum(gpus for _, gpus in allocation)
        for name, gpus in allocation:
            self.free[name] -= gpus
            if len(allocation) > 1:
                self._shared.add(name)

    def give_back(self, job: Job, allocation: Allocation) -> None:
        """Have what a job had on one node be free again."""
        if job.owner in self.quota_left:
            self.quota_left[job.owner] += sum(gpus for _, gpus in allocation)
        for name, gpus in allocation:
            self.free[name] += gpus

    def capacity(self, pool: Pool) -> int:
        """Return the free GPUs of a pool."""
        return sum(self.free[node.name] for node in self._of_pool.get(pool, ()))

    def shape(self, job: Job) -> Shape | None:
        """Return the shape of what a job has; None if it has nothing, or not all of it is there."""
        return shape_of(job, self._nodes)

    def find(
        self, job: Job, shape: Shape, cost: Mapping[str, int] = MappingProxyType({})
    ) -> Allocation:
        """Return where ``job`` would have ``shape``; empty if nowhere, or its quota forbids it.

        Nodes of less ``cost`` come first, of those without spot nodes, of these the nearest.
        """
        if shape.gpus > self.quota_left.get(job.owner, shape.gpus):
            return ()
        nodes = [
            node for node in self._of_pool.get(shape.pool, []) if job.preemptible or not node.spot
        ]
        near = job.held_by | {name for name, _ in job.allocation}
        if shape.nodes == 1:
            return self._on_one(nodes, near, shape.gpus, cost)
        per_node = shape.pool.gpus_per_node
        whole, rest = divmod(shape.gpus, per_node)
        empty = [node for node in nodes if self.free[node.name] == per_node]
        if len(empty) < whole:
            return ()
        empty.sort(key=lambda n: (cost.get(n.name, 0), n.spot, n.name not in near, n.name))
        chosen = [(node.name, per_node) for node in empty[:whole]]
        if not rest:
            return tuple(sorted(chosen))
        taken = {name for name, _ in chosen} | self._shared
        others = [node for node in nodes if node.name not in taken]
        last = self._on_one(others, near, rest, cost)
        return (*sorted(chosen), *last) if last else ()

    def find_displacing(self, job: Job, shape: Shape, others: Sequence[Job]) -> Allocation:
        """Return where ``job`` would have ``shape`` in place of the fewest GPUs of ``others``.

        These have GPUs that are free here; who loses one has to move with all of them.
        """
        moved: dict[str, int] = dict.fromkeys(self.free, 0)
        unused = dict(self.free)
        for other in others:
            for name, gpus in other.allocation:
                if name in unused:
                    unused[name] -= gpus
                    moved[name] += other.gpus
        needed = min(shape.gpus, shape.pool.gpus_per_node)
        quiet = {name for name, left in unused.items() if left >= needed}
        cost = {name: 0 if name in quiet else moved[name] for name in self.free}
        return self.find(job, shape, cost)

    def _on_one(
        self, nodes: Sequence[Node], near: frozenset[str], gpus: int, cost: Mapping[str, int]
    ) -> Allocation:
        def rank(node: Node) -> tuple[int, bool, int, bool, str]:
            left = self.free[node.name] - gpus
            return cost.get(node.name, 0), node.spot, left, node.name not in near, node.name

        fits = [node for node in nodes if self.free[node.name] >= gpus]
        return ((min(fits, key=rank).name, gpus),) if fits else ()


def place(
    room: Room,
    jobs: Sequence[Job],
    shapes: Sequence[Shape],
    chosen: Sequence[int],
    values: Array,
) -> dict[str, Allocation]:
    """Return the allocation of each job that gets one, out of ``room``.

    Args:
        room: What is free; taken from.
        jobs: In the order in which they come first.
        shapes: By column.
        chosen: The column of each job; -1 for none.
        values: Shape ``(jobs, shapes)``: what a shape is worth where the chosen one does not fit,
            and where GPUs are left over; not above 0: it may not have it.
    """
    placing = _Placing(room, jobs, shapes, chosen, values)
    moving = []
    for row, (job, column) in enumerate(zip(jobs, chosen, strict=True)):
        if column >= 0 and room.shape(job) == shapes[column] and room.has(job.allocation):
            placing.put(job, job.allocation)
        elif column >= 0:
            moving.append((-shapes[column].gpus, row))
    for _, row in sorted(moving):
        below = shapes[chosen[row]].gpus
        if not placing.is_put(row, [chosen[row]]) and not placing.is_put_beside(row):
            placing.is_put(row, placing.by_value(row, below))
    for row, job in enumerate(jobs):
        if job.name not in placing.found:
            most = max(room.free.values(), default=0)
            placing.is_put(row, placing.by_value(row, most + 1))
    return placing.found


class _Placing:
    """What ``place`` has found so far."""

    def __init__(
        self,
        room: Room,
        jobs: Sequence[Job],
        shapes: Sequence[Shape],
        chosen: Sequence[int],
        values: Array,
    ) -> None:
        self._room, self._jobs, self._shapes = room, jobs, shapes
        self._chosen, self._values = chosen, values
        self.found: dict[str, Allocation] = {}

    def put(self, job: Job, allocation: Allocation) -> None:
        """Give a job what is free."""
        self.found[job.name] = allocation
        self._room.take(job, allocation)

    def is_put(self, row: int, columns: Sequence[int]) -> bool:
        """Give a job the first of these shapes that fits; tell whether any does."""
        job = self._jobs[row]
        for at in columns:
            if allocation := self._room.find(job, self._shapes[at]):
                self.put(job, allocation)
                return True
        return False

    def by_value(self, row: int, below: int) -> list[int]:
        """Return the columns of smaller shapes that are worth something, the best first."""
        values = self._values[row]
        worth = [at for at, one in enumerate(values) if one > 0 and self._shapes[at].gpus < below]
        return sorted(worth, key=lambda at: -values[at])

    def is_put_beside(self, row: int) -> bool:
        """Give a job its shape on a node that one smaller job leaves for it; tell whether so."""
        job, shape = self._jobs[row], self._shapes[self._chosen[row]]
        if shape.nodes > 1 or self._room.capacity(shape.pool) < shape.gpus:
            return False
        values, less = self._values[row], self.by_value(row, shape.gpus)
        fits = (values[at] for at in less if self._room.find(job, self._shapes[at]))
        gain = values[self._chosen[row]] - next(fits, 0.0)
        return any(self._has_moved(at, row) for at in self._neighbours(shape, gain))

    def _neighbours(self, shape: Shape, gain: float) -> list[int]:
        """Return who could make room for a shape and loses less than ``gain``, the smallest first.

        All of them have kept what they had on one node.
        """
        found = []
        for at, one in enumerate(self._jobs):
            if not 0 < one.gpus < shape.gpus or self.found.get(one.name) != one.allocation:
                continue
            (node, gpus), *others = one.allocation
            if not others and self._room.free[node] + gpus >= shape.gpus:
                part = min(1.0, one.cost.seconds(local=False) / HORIZON_S)
                if self._values[at, self._chosen[at]] * part < gain:
                    found.append(at)
        return sorted(found, key=lambda at: self._jobs[at].gpus)

    def _has_moved(self, at: int, row: int) -> bool:
        """Have a neighbour move, if that makes room and it finds some; tell whether so."""
        other, job, room = self._jobs[at], self._jobs[row], self._room
        room.give_back(other, other.allocation)
        if self.is_put(row, [self._chosen[row]]):
            if self.is_put(at, [self._chosen[at]]):
                return True
            room.give_back(job, self.found.pop(job.name))
        self.put(other, other.allocation)
        return False
