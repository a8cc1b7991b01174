"""Pollux, as its simulator was published: the power mean of speedups over the fair share.

A speedup counts beside what the job would have with its fair share of the GPUs, and less by the age
of the job if it is moved. The harmonic mean (power -1) is as large as can be. Solved exactly here,
by a knapsack; the published genetic search comes as near as 2 %.

Source: Pollux, section 4.2, and the branch osdi21-artifact of petuum/adaptdl.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast_services.scheduler.domain.policies.chosen import Chosen
from holdfast_services.scheduler.domain.policies.plan import Round
from holdfast_services.scheduler.domain.policies.rounding import rounded
from holdfast_services.scheduler.domain.policies.table import Array, Table

LEAST_SPEEDUP = 1e-3
"""What no GPU counts as, so that its inverse is a number."""
FACTOR_MIN = 1e-3
"""So that a job of this second takes what nobody else wants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pollux:
    """The policy as published; it has no parameters."""

    name: str = "pollux"

    def choose(self, facts: Round) -> Chosen:
        """Return the shapes of which the harmonic mean of speedups is the greatest."""
        table = facts.table
        total = sum(facts.capacity.values())
        nodes = sum(gpus / pool.gpus_per_node for pool, gpus in facts.capacity.items())
        jobs = len(table.jobs)
        fair = table.goodput_at(1, -(-total // max(jobs, 1)) or 1)
        speedup = table.goodput / np.where(fair > 0, fair, 1.0)[:, None]
        # A share as large as one node counts as 1.
        scaled = speedup * (nodes / max(total, 1))
        counted = scaled * restart_factor(table, facts.now_s)
        values = 1 / LEAST_SPEEDUP - 1 / (counted + LEAST_SPEEDUP)
        values = np.where(table.goodput > 0, values, 0.0)
        columns = rounded(table, values, facts.capacity, facts.quota_left)

        def says(row: int, column: int) -> str:
            if column < 0:
                return "waits: the mean of speedups is greater without it"
            shape = table.shapes[column]
            return (
                f"{shape.gpus} GPUs on {shape.nodes} nodes: {speedup[row, column]:.3g} times as "
                f"fast as on its fair share of {total} GPUs among {jobs} jobs"
            )

        return Chosen(columns=columns, values=values, says=says)


def restart_factor(table: Table, now_s: float) -> Array:
    """Return what is left of a speedup after a move: less for a young job that moved often."""
    age_s = np.array([max(now_s - job.submitted_s, 0.0) for job in table.jobs])[:, None]
    restarts = np.array([job.restarts for job in table.jobs])[:, None]
    moved = np.maximum(age_s - restarts * table.move_s, 0.0) / np.maximum(age_s + table.move_s, 1.0)
    return np.where(table.move_s > 0, np.maximum(moved, FACTOR_MIN), 1.0)
