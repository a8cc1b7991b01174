"""The default policy: GPUs have a market price, and each job chooses what is best for it.

A job that has ``k`` GPUs pays for its own delay, 1 per second, and a rent of ``k`` times the price.
The price is such that what jobs choose is what there is. A job's work is worth what doing it later
would cost: ``min over k of (1 + phi * price * k) / speedup(k)``, where ``phi`` is the share of
today's price that it expects over the rest of its life: its rank by time left, 1 for the shortest
job, near 0 for the longest, which will see the cluster empty. So short jobs are not held up by long
ones, and long ones run wide when others are done. A shape that the job does not have now is worth
less by what the move was measured to cost. Priority is how much a second of delay costs.

Source: docs/explanation/scheduler.md. The idea of ranks is that of heSRPT (Berg, Vesilo and
Harchol-Balter, 2020), of rent that of a Fisher market.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from holdfast_services.scheduler.domain.policies.plan import Round
from holdfast_services.scheduler.domain.policies.rounding import rounded
from holdfast_services.scheduler.domain.policies.shapes import Pool
from holdfast_services.scheduler.domain.policies.table import Array, Ints, Table

PRICE_MAX = 1e6
HALVINGS = 25
SWEEPS = 3
PRIORITY_TELLS_MAX = 8
UNKNOWN_S = 300.0
"""A job whose speed nobody knows counts as so short: it comes before most, not before who is about
to end."""
SILENT = 0.5
"""The share of the price that a job expects of which nobody knows how much it wants."""
MOVES_IN_HORIZON = 4
"""A move that takes very long has longer to pay for itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """The policy and its parameters; see the module.

    ``horizon_s``: a move must pay for itself within so long. ``sticks``: who has GPUs counts as so
    much shorter when jobs are ranked, so that equal ones do not take turns.
    """

    name: str = "price"
    horizon_s: float = 600.0
    sticks: float = 0.95

    def choose(self, facts: Round) -> Bought:
        """Return what each job buys."""
        market = _market(facts.table, self)
        prices = market.clear(facts.capacity)
        worth = market.worth(prices)
        values = worth[:, None] * market.bought
        columns = rounded(facts.table, values, facts.capacity, facts.quota_left)
        return Bought(columns, values, prices, market)


@dataclass(frozen=True, slots=True)
class Bought:
    """What the jobs bought, see ``Choice``."""

    columns: list[int]
    values: Array
    prices: Mapping[Pool, float]
    market: Market

    def why(self, row: int, column: int) -> str:
        """Return the numbers of the bargain."""
        market, table = self.market, self.market.table
        jobs = len(table.jobs)
        rank = f"{market.rank[row]:.0f} of {jobs} from the longest"
        if column < 0:
            best = int(np.argmax(self.values[row]))
            value = float(self.values[row, best])
            if not value > 0:
                return f"waits: no shape is allowed to it now ({rank})"
            shape = table.shapes[best]
            rent = self.prices[shape.pool] * shape.gpus
            return (
                f"waits: {shape.gpus} GPUs are worth {value:.3g} to it and cost {rent:.3g} ({rank})"
            )
        shape = table.shapes[column]
        rent = self.prices[shape.pool] * shape.gpus
        speedup = float(market.speedup[row, column])
        move_s = float(table.move_s[row, column])
        stays = "it stays" if not move_s else f"the move costs {move_s:.0f} s"
        return (
            f"{shape.gpus} GPUs on {shape.nodes} nodes: {speedup:.3g} times as fast as on one, "
            f"worth {self.values[row, column]:.3g} for a rent of {rent:.3g} ({rank}; {stays})"
        )


@dataclass(frozen=True, slots=True)
class Market:
    """What jobs want. ``speedup``: beside one GPU; ``bought``: the same, less what a move costs.

    ``weight``: what a second of delay costs. ``rank``: 1 for the most time left; ``phi``: the share
    of the price that a job expects later.
    """

    table: Table
    speedup: Array
    bought: Array
    weight: Array
    rank: Array
    phi: Array
    pool: Ints
    pools: tuple[Pool, ...]

    def clear(self, capacity: Mapping[Pool, int]) -> dict[Pool, float]:
        """Return the price in each pool at which no more is wanted than there is."""
        prices = dict.fromkeys(self.pools, 0.0)
        for _ in range(SWEEPS if len(self.pools) > 1 else 1):
            for pool in self.pools:
                prices[pool] = self._clear_one(pool, prices, capacity[pool])
        return prices

    def _clear_one(self, pool: Pool, prices: dict[Pool, float], capacity: int) -> float:
        low, high = 0.0, 1.0
        while high < PRICE_MAX and self._wanted(pool, {**prices, pool: high}) > capacity:
            low, high = high, 2 * high
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            if self._wanted(pool, {**prices, pool: middle}) > capacity:
                low = middle
            else:
                high = middle
        return high

    def _wanted(self, pool: Pool, prices: Mapping[Pool, float]) -> int:
        rents = self._rents(prices)
        surplus = self.worth(prices)[:, None] * self.bought - rents
        best = np.argmax(surplus, axis=1)
        buys = surplus[np.arange(len(best)), best] > 0
        chosen = best[buys]
        return int(self.table.gpus[chosen[self.pool[chosen] == self.pools.index(pool)]].sum())

    def worth(self, prices: Mapping[Pool, float]) -> Array:
        """Return what the work of one second on one GPU would cost each job later."""
        costs = self.weight[:, None] + self.phi[:, None] * self._rents(prices)
        per_work = np.divide(
            costs, self.speedup, out=np.full(self.speedup.shape, np.inf), where=self.speedup > 0
        )
        found = per_work.min(axis=1, initial=np.inf)
        return np.where(np.isfinite(found), found, 0.0)

    def _rents(self, prices: Mapping[Pool, float]) -> Array:
        by_pool = np.array([prices[pool] for pool in self.pools])
        return by_pool[self.pool] * self.table.gpus


def _market(table: Table, policy: Price) -> Market:
    goodput, rows = table.goodput, np.arange(len(table.jobs))
    allowed = goodput > 0
    first = np.argmax(allowed, axis=1)
    base = goodput[rows, first] / table.gpus[first]
    base = np.where(base > 0, base, np.float64(1.0))
    speedup = goodput / base[:, None]
    told = [max(-PRIORITY_TELLS_MAX, min(job.priority, PRIORITY_TELLS_MAX)) for job in table.jobs]
    weight = np.exp2(np.array(told, dtype=np.float64))
    rank, phi = _ranks(table, base, policy.sticks, weight)
    pools = tuple(sorted({shape.pool for shape in table.shapes}))
    return Market(
        table=table,
        speedup=speedup,
        bought=speedup * _move_factor(table, policy.horizon_s),
        weight=weight,
        rank=rank,
        phi=phi,
        pool=np.array([pools.index(shape.pool) for shape in table.shapes], dtype=np.int64),
        pools=pools,
    )


def _ranks(table: Table, base: Array, sticks: float, weight: Array) -> tuple[Array, Array]:
    """Return the rank of each job by seconds left on one GPU, 1 for the most, and phi.

    Who has not said how much it wants, and whose family nobody knows, is in the middle.
    """
    count = len(base)
    silent = np.isnan(table.left) & table.known
    left_s = np.where(table.known, table.left / base, UNKNOWN_S)
    left_s = np.where(silent, 0.0, left_s)
    left_s = np.where(table.current >= 0, left_s * sticks, left_s) / weight
    rank = np.empty(count)
    # Of equal ones the older counts as shorter.
    rank[np.lexsort((-np.arange(count), -left_s))] = np.arange(1, count + 1)
    return rank, np.where(silent, SILENT, rank / max(count, 1))


def _move_factor(table: Table, horizon_s: float) -> Array:
    """Return the part of the time until the horizon, or the end, that a move leaves."""
    with np.errstate(divide="ignore", invalid="ignore"):
        left_s = table.left[:, None] / table.goodput
    unknown = np.isnan(left_s) | ~table.known[:, None]
    left_s = np.where(unknown, np.inf, left_s)
    horizon = np.maximum(horizon_s, MOVES_IN_HORIZON * table.move_s)
    until_s = np.minimum(horizon, left_s + table.move_s)
    return np.where(table.move_s > 0, np.maximum(1 - table.move_s / until_s, 0.0), 1.0)
