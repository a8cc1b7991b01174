"""How many nodes of a pool there should be: as many as are used well, within a budget (F103).

The *utility* of ``n`` nodes is what the jobs could make of them, in GPUs' worth of progress per
GPU: near 1 while jobs wait for GPUs, and less the wider they run. It falls as ``n`` grows. The
number changes only when utility has left a window, and then to where it is closest to the middle.

Source: the window and the rule are those of AdaptDL; the budget is ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from holdfast.errors import InvalidRequestError
from holdfast_services.scheduler.domain.policies.facts import Node, NodeState, View
from holdfast_services.scheduler.domain.policies.refusals import refusals
from holdfast_services.scheduler.domain.policies.rounding import rounded
from holdfast_services.scheduler.domain.policies.shapes import Pool, pool_of
from holdfast_services.scheduler.domain.policies.table import table

NODES_MAX = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """Between which bounds the nodes of a pool may be, and when their number changes.

    ``node``: what another one would be like, its price with it. ``budget_per_h``: the most that all
    nodes of the pool may cost; None: no bound.

    Raises:
        InvalidRequestError: the bounds or the window are the wrong way round.
    """

    node: Node
    nodes_min: int
    nodes_max: int
    utility_min: float = 0.35
    utility_max: float = 0.65
    budget_per_h: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.nodes_min <= self.nodes_max <= NODES_MAX:
            raise InvalidRequestError(
                f"{self.nodes_min} to {self.nodes_max} nodes: 0 to {NODES_MAX}, the least first"
            )
        if not 0 <= self.utility_min <= self.utility_max:
            raise InvalidRequestError(
                f"utility from {self.utility_min} to {self.utility_max}: the least first"
            )

    @property
    def affordable(self) -> int:
        """The most nodes that bounds and budget allow, ``nodes_min`` at least."""
        if self.budget_per_h is None or not self.node.price_per_h > 0:
            return self.nodes_max
        paid = math.floor(self.budget_per_h / self.node.price_per_h)
        return max(self.nodes_min, min(self.nodes_max, paid))


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """How many nodes of a pool there should be, and why."""

    pool: Pool
    nodes: int
    utility: float
    why: str


def wanted_nodes(view: View, sizing: Sizing) -> Wanted:
    """Return how many nodes of the pool of ``sizing.node`` there should be."""
    pool = pool_of(sizing.node)
    now = sum(pool_of(node) == pool and node.state is NodeState.UP for node in view.nodes)
    most = sizing.affordable
    utility_of = _Utilities(view, sizing.node, max(most, now))
    bounded = min(max(now, sizing.nodes_min), most)
    utility = utility_of(bounded)
    bounds = f"{sizing.nodes_min} to {most} nodes"
    if most < sizing.nodes_max:
        bounds += f" for {sizing.budget_per_h:g} per hour"
    if sizing.utility_min <= utility <= sizing.utility_max:
        why = f"{bounded} nodes are used to {utility:.2f}, within the window; {bounds}"
        return Wanted(pool=pool, nodes=bounded, utility=utility, why=why)
    middle = (sizing.utility_min + sizing.utility_max) / 2
    low, high = sizing.nodes_min, most
    while low + 1 < high:
        between = (low + high) // 2
        if utility_of(between) > middle:
            low = between
        else:
            high = between
    # Of two that are equally far the one that leaves the window less far.
    chosen = min((high, low), key=lambda n: abs(utility_of(n) - middle))
    if low == sizing.nodes_min and utility_of(low) <= middle:
        chosen = low
    why = (
        f"{bounded} nodes are used to {utility:.2f}, outside of {sizing.utility_min:g} to "
        f"{sizing.utility_max:g}; {chosen} would be to {utility_of(chosen):.2f}; {bounds}"
    )
    return Wanted(pool=pool, nodes=chosen, utility=utility_of(chosen), why=why)


class _Utilities:
    """The utility of a number of nodes, found once for each."""

    def __init__(self, view: View, node: Node, most: int) -> None:
        self._pool = pool_of(node)
        others = [one for one in view.nodes if pool_of(one) != self._pool]
        asked = [replace(node, name=f"asked{at}", state=NodeState.UP) for at in range(most)]
        large = replace(view, nodes=(*others, *asked))
        refused = refusals(large)
        jobs = [job for job in large.jobs if job.name not in refused]
        self._table = table(large, sorted(jobs, key=lambda job: (job.submitted_s, job.name)))
        goodput = self._table.goodput
        first = np.argmax(goodput > 0, axis=1) if goodput.size else np.zeros(0, dtype=np.int64)
        base = np.array([goodput[row, at] / self._table.gpus[at] for row, at in enumerate(first)])
        self._speedup = goodput / np.where(base > 0, base, 1.0)[:, None] if len(base) else goodput
        self._capacity = {
            pool: sum(one.gpus for one in others if pool_of(one) == pool)
            for pool in {pool_of(one) for one in others if one.gpus}
        }
        self._quotas: Mapping[str, int] = view.quotas
        self._found: dict[int, float] = {}

    def __call__(self, nodes: int) -> float:
        """Return the GPUs' worth of progress per GPU; of no nodes it is 1 if anybody wants one."""
        if nodes not in self._found:
            self._found[nodes] = self._utility(nodes)
        return self._found[nodes]

    def _utility(self, nodes: int) -> float:
        if not nodes:
            return 1.0 if self._table.jobs else 0.0
        gpus = nodes * self._pool.gpus_per_node
        capacity = {**self._capacity, self._pool: gpus}
        chosen = rounded(self._table, self._speedup, capacity, self._quotas)
        made = sum(
            float(self._speedup[row, at])
            for row, at in enumerate(chosen)
            if at >= 0 and self._table.shapes[at].pool == self._pool
        )
        return made / gpus
