"""The fit of AdaptDL, written anew from its definition: what known times were made with.

The root mean square of logarithmic errors of compute and step times, and two penalties, by L-BFGS-B
from a fixed start. Our own fit is another one, so times of jobs differ by some percent; with this
one the simulator gives the known times.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize

from holdfast.goodput.fit import Measured
from holdfast.goodput.profile import Profile
from holdfast.goodput.step_time import StepTime
from holdfast_services.scheduler.domain.policies.history import Measurements

Array = npt.NDArray[np.float64]
FIRST = (0.1, 0.01, 0.1, 0.01, 0.1, 0.01, 1.001)
LEAST = 1e-8


def reference() -> Measurements:
    """Return measurements whose profile is made as AdaptDL makes it, after each new point."""
    return Measurements(make=lambda points, _: Profile(step_time=fit(points)), foreseen=0.0)


def fit(points: Sequence[Measured]) -> StepTime:
    """Return the parameters that AdaptDL finds."""
    problem = _Problem(points)
    low, high, first = [LEAST] * 6 + [1.0], [np.inf] * 6 + [10.0], list(FIRST)

    def fix(at: int, value: float) -> None:
        low[at] = high[at] = first[at] = value

    if len(np.unique(problem.batch)) == 1:
        fix(0, float(problem.compute.mean() / 2))
    if not problem.between.any():
        fix(2, LEAST)
        fix(3, LEAST)
    if not problem.inside.any():
        fix(4, LEAST)
        fix(5, LEAST)
    if not (problem.replicas > 2).any():
        fix(3, LEAST)
        fix(5, LEAST)
    bounds = list(zip(low, high, strict=True))
    found = minimize(problem.error, first, jac=True, bounds=bounds, method="L-BFGS-B").x
    if not problem.between.any():
        found[2], found[3] = max(found[2], 1.1 * found[4]), max(found[3], 1.1 * found[5])
    found = np.clip(found, low, [1e6] * 6 + [10.0])
    return StepTime(**dict(zip(StepTime.__slots__, map(float, found), strict=True)))


class _Problem:
    def __init__(self, points: Sequence[Measured]) -> None:
        nodes = np.array([p.nodes for p in points])
        self.replicas = np.array([p.replicas for p in points])
        self.batch = np.array([p.local_batch for p in points], dtype=np.float64)
        self.compute = np.array([p.compute_s for p in points])
        self.step = np.array([p.step_s for p in points])
        self.between = nodes > 1
        self.inside = (nodes == 1) & (self.replicas > 1)
        self.further = np.maximum(self.replicas - 2, LEAST)

    def error(self, at: Array) -> tuple[float, Array]:
        """Return the error and its slope."""
        gamma, further, count = at[6], self.further, len(self.batch)
        compute = at[0] + at[1] * self.batch
        network = np.where(
            self.between,
            at[2] + at[3] * further,
            np.where(self.inside, at[4] + at[5] * further, LEAST),
        )
        log_c, log_n = np.log(compute), np.log(network)
        power = np.exp(gamma * (log_n - log_c))
        share = 1 / (1 + power)
        log_s = log_c + np.log1p(power) / gamma
        off_c, off_s = log_c - np.log(self.compute), log_s - np.log(self.step)
        root_c, root_s = (np.sqrt((off**2).mean() + 1e-30) for off in (off_c, off_s))
        by_c, by_s = off_c / count / root_c, off_s / count / root_s
        of_compute, of_network = (by_c + by_s * share) / compute, by_s * (1 - share) / network
        mixed = share * log_c + (1 - share) * log_n
        slope = np.array(
            (
                of_compute.sum(), (of_compute * self.batch).sum(),
                of_network[self.between].sum(), (of_network * further)[self.between].sum(),
                of_network[self.inside].sum(), (of_network * further)[self.inside].sum(),
                (by_s * (mixed - log_s)).sum() / gamma + 2e-3 * (gamma - 1),
            )
        )  # fmt: skip
        value = root_c + root_s + 1e-3 * (gamma - 1) ** 2
        for alpha, beta in ((2, 3), (4, 5)):
            value += 1e-2 * (at[beta] / at[alpha]) ** 2
            slope[beta] += 2e-2 * at[beta] / at[alpha] ** 2
            slope[alpha] -= 2e-2 * at[beta] ** 2 / at[alpha] ** 3
        return float(value), slope
