"""Sia: an integer program over pairs of a type of GPU and a number of them.

Goodputs of a job count beside its least one; jobs without GPUs count as a little worse than that.
A move counts as in Pollux. Source: Sia, SOSP 2023, section 3.4, with its power of -0.5 and its
penalty of 1.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast_services.scheduler.domain.policies.chosen import Chosen
from holdfast_services.scheduler.domain.policies.plan import Round
from holdfast_services.scheduler.domain.policies.pollux import restart_factor
from holdfast_services.scheduler.domain.policies.rounding import rounded_by_program

COUNTED_MIN = 1e-6
STAYS = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Sia:
    """The policy with its two parameters; ``power`` is below 0."""

    name: str = "sia"
    power: float = -0.5
    waiting_penalty: float = 1.1

    def choose(self, facts: Round) -> Chosen:
        """Return the shapes of which the sum of powers is the least."""
        table = facts.table
        allowed = table.goodput > 0
        least = np.where(allowed, table.goodput, np.inf).min(axis=1, initial=np.inf)
        normal = table.goodput / np.where(np.isfinite(least), least, 1.0)[:, None]
        runs = (table.current >= 0)[:, None]
        counted = normal * np.where(runs, restart_factor(table, facts.now_s), 1.0)
        costs = np.maximum(np.where(allowed, counted, 1.0), COUNTED_MIN) ** self.power
        values = np.where(allowed, self.waiting_penalty - costs, 0.0)
        stays = np.flatnonzero(runs)
        values[stays, table.current[stays]] += STAYS  # of equal choices the one without a move
        columns = rounded_by_program(table, values, facts.capacity, facts.quota_left)

        def says(row: int, column: int) -> str:
            if column < 0:
                return "waits: others gain more from each of the GPUs"
            shape = table.shapes[column]
            return (
                f"{shape.gpus} x {shape.pool.gpu_type} on {shape.nodes} nodes: "
                f"{normal[row, column]:.3g} times its least goodput"
            )

        return Chosen(columns=columns, values=values, says=says)
