"""First come, first served, by priority: who comes first gets the least that it runs on, then more.

*Squeeze*: a job that waits makes those who have more than their least give it back. *Backfill*: a
job for which there is no room holds up none behind it that fits, but for those that could not be
taken off again; these may not begin while it has waited longer than ``waits_s``. What is left is
given out in the same order; who runs grows only by what is worth a move.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from holdfast_services.scheduler.domain.policies.chosen import Chosen
from holdfast_services.scheduler.domain.policies.plan import Round
from holdfast_services.scheduler.domain.policies.shapes import Pool
from holdfast_services.scheduler.domain.policies.table import Table

GROWS_BY_MIN = 1.5
"""A job is not moved for less than half as many GPUs again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fifo:
    """The policy and its parameter, see the module."""

    name: str = "fifo"
    waits_s: float = 600.0

    def choose(self, facts: Round) -> Chosen:
        """Return the shapes that are left for each job by those before it."""
        table = facts.table
        queue = sorted(range(len(table.jobs)), key=lambda row: (-table.jobs[row].priority, row))
        left = _Left(table, dict(facts.capacity), dict(facts.quota_left))
        place_in_queue = {row: at + 1 for at, row in enumerate(queue)}
        held_up = False
        for row in queue:
            job = table.jobs[row]
            blocked = held_up and not job.preemptible
            if not blocked and left.give(row, left.least(row)):
                continue
            waited_s = facts.now_s - job.since_s
            held_up = held_up or (not job.allocation and waited_s > self.waits_s)
        for keeps in (True, False):
            for row in queue:
                if left.columns[row] >= 0:
                    left.give(row, left.more(row, keeps=keeps))

        def says(row: int, column: int) -> str:
            job, place = table.jobs[row], f"number {place_in_queue[row]} of {len(queue)}"
            if column < 0:
                return (
                    f"waits, {place}: it needs {job.replicas_min} GPUs, those before it leave less"
                )
            shape = table.shapes[column]
            return (
                f"{shape.gpus} GPUs on {shape.nodes} nodes of {job.replicas_min} to "
                f"{job.replicas_max}, {place} by priority {job.priority} and age"
            )

        # Where the chosen shape does not fit, the largest smaller one.
        values = np.where(table.goodput > 0, table.gpus.astype(np.float64), 0.0)
        values[[row for row in queue if left.columns[row] < 0]] = 0.0
        return Chosen(columns=left.columns, values=values, says=says)


class _Left:
    """What is left of pools and quotas while jobs take their shapes, one after the other."""

    def __init__(self, table: Table, pools: dict[Pool, int], quotas: dict[str, int]) -> None:
        self.columns = [-1] * len(table.jobs)
        self._table = table
        self._pools, self._quotas = pools, quotas

    def least(self, row: int) -> int:
        """Return the smallest shape that the job may have and that is left, -1 if none.

        Where it already runs comes first among the pools, then where most is left.
        """
        fits = [at for at in self._allowed(row) if self._is_left(row, at)]
        current = int(self._table.current[row])
        pool = self._table.shapes[current].pool if current >= 0 else None

        def rank(at: int) -> tuple[int, bool, int, int]:
            shape = self._table.shapes[at]
            return shape.gpus, shape.pool != pool, -self._pools[shape.pool], at

        return min(fits, key=rank, default=-1)

    def more(self, row: int, *, keeps: bool) -> int:
        """Return what the job has now, or the most that is worth a move, of what is left."""
        chosen, current = self.columns[row], int(self._table.current[row])
        shapes = self._table.shapes
        floor = shapes[chosen].gpus
        if current >= 0:
            has = shapes[current].gpus
            if keeps:
                same = [current] if current in self._allowed(row) else []
                return same[0] if same and has > floor and self._is_left(row, current) else -1
            if chosen == current:
                floor = int(np.ceil(has * GROWS_BY_MIN)) - 1
        elif keeps:
            return -1
        fits = [
            at
            for at in self._allowed(row)
            if shapes[at].pool == shapes[chosen].pool
            and shapes[at].gpus > floor
            and self._is_left(row, at)
        ]
        return max(fits, key=lambda at: shapes[at].gpus, default=-1)

    def give(self, row: int, column: int) -> bool:
        """Let the job have this shape in place of what it has taken; tell whether it is one."""
        if column < 0:
            return False
        self._take(row, self.columns[row], -1)
        self._take(row, column, 1)
        self.columns[row] = column
        return True

    def _allowed(self, row: int) -> list[int]:
        return [int(at) for at in np.flatnonzero(self._table.goodput[row] > 0)]

    def _is_left(self, row: int, column: int) -> bool:
        taken = self.columns[row]
        shapes, owner = self._table.shapes, self._table.jobs[row].owner
        back = shapes[taken].gpus if taken >= 0 else 0
        back_here = back if taken >= 0 and shapes[taken].pool == shapes[column].pool else 0
        gpus = shapes[column].gpus
        quota: Mapping[str, int] = self._quotas
        return gpus <= self._pools[shapes[column].pool] + back_here and (
            owner not in quota or gpus <= quota[owner] + back
        )

    def _take(self, row: int, column: int, sign: int) -> None:
        if column < 0:
            return
        shape, owner = self._table.shapes[column], self._table.jobs[row].owner
        self._pools[shape.pool] -= sign * shape.gpus
        if owner in self._quotas:
            self._quotas[owner] -= sign * shape.gpus
