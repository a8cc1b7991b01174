"""Step-time parameters from measured steps, robust to steps that were slow by accident.

The parameters are the most likely ones. Errors are those of logarithms, so that all configurations
count alike; their distribution has heavy tails (Student's t) and a scale that is found with the
parameters: where steps vary by a tenth a tenth means little, where they agree to four digits all
of them are used, and a step that took five times as long moves nothing. Priors hold the overlap
and the retrogression near none until there is evidence. What was never observed costs nothing, and
between nodes a little more than inside of one, so that a job tries what it does not know.

Found by Gauss-Newton steps, damped as Levenberg and Marquardt do, in the logarithms of the
parameters: a dozen for 24 points. Source: the priors and penalties of Pollux, section 4.1; its
error is another one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.errors import InvalidRequestError
from holdfast.goodput.step_time import (
    GAMMA_MAX,
    GAMMA_MIN,
    SECONDS_MAX,
    SECONDS_MIN,
    Array,
    StepTime,
    network_s,
)

POINTS_MAX = 512
"""More of them say nothing new; the last ones count."""
STEPS_MAX, STEPS_ON_MAX = 60, 15
"""From nothing, and on from an earlier fit: what is left to gain is gained with the next point."""
_DAMPINGS_MAX = 8
_TAILS = 4.0
"""Degrees of freedom of the errors: of an error of ten scales a twentieth is believed."""
_SCALE_MIN = 3e-4
_NORMAL_PER_MEDIAN = 1.4826
_RETROGRESSION_PRIOR, _OVERLAP_PRIOR = 0.35, 1.0
_GAMMAS_FIRST = (1.2, 3.0)
_BETWEEN_NODES_MIN = 1.1
_LOG_STEP_MAX = 2.0
_ENOUGH = 1e-6
_LIKELIER_MIN, _SCALE_CHANGE_MIN = 1e-2, 0.03
"""A gain of a hundredth in log likelihood says nothing."""
_ALPHA_C, _BETA_C, _ALPHA_N, _BETA_N, _ALPHA_R, _BETA_R, _GAMMA = range(7)
_LOW = np.array([math.log(SECONDS_MIN)] * 6 + [GAMMA_MIN])
_HIGH = np.array([math.log(SECONDS_MAX)] * 6 + [GAMMA_MAX])


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the steps of one configuration took: medians, in seconds.

    ``compute_s`` is one micro-batch without the network, ``step_s`` one whose gradients are summed
    up. What came from a job is checked by ``is_believable``, not here.
    """

    nodes: int
    replicas: int
    local_batch: int
    compute_s: float
    step_s: float

    def is_believable(self) -> bool:
        """Tell whether all of it can be so: counts that fit together, times above 0 and finite."""
        counts = 1 <= self.nodes <= self.replicas and self.local_batch >= 1
        return counts and all(SECONDS_MIN < t < SECONDS_MAX for t in (self.compute_s, self.step_s))


def fit(points: Sequence[Measured], start: StepTime | None = None) -> StepTime:
    """Return the parameters that explain ``points`` best.

    Args:
        points: In any order; those that cannot be so are left out, and all but the last
            ``POINTS_MAX``.
        start: An earlier fit of most of these points, from which it is found sooner.

    Raises:
        InvalidRequestError: no point can be so.
    """
    believed = [point for point in points if point.is_believable()][-POINTS_MAX:]
    if not believed:
        raise InvalidRequestError(f"none of {len(points)} measured step times can be so")
    found = _Problem(believed).solve(start)
    if not any(point.nodes > 1 for point in believed):
        # A prior: what lies between nodes costs more than what was seen inside of one.
        found[_ALPHA_N] = found[_ALPHA_R] * _BETWEEN_NODES_MIN
        found[_BETA_N] = found[_BETA_R] * _BETWEEN_NODES_MIN
    found[:_GAMMA] = np.clip(found[:_GAMMA], SECONDS_MIN, SECONDS_MAX)
    return StepTime(**dict(zip(StepTime.__slots__, map(float, found), strict=True)))


class _Problem:
    """The points as arrays, and which parameters they say something of.

    A point of the search has six logarithms and gamma.
    """

    def __init__(self, points: Sequence[Measured]) -> None:
        nodes = np.array([p.nodes for p in points])
        self.replicas = np.array([p.replicas for p in points], dtype=np.float64)
        self.nodes = nodes.astype(np.float64)
        self.batch = np.array([p.local_batch for p in points], dtype=np.float64)
        self.compute = np.array([p.compute_s for p in points])
        self.step = np.array([p.step_s for p in points])
        self.logs = np.log(np.concatenate((self.compute, self.step)))
        self.between = nodes > 1
        self.inside = ~self.between & (self.replicas > 1)
        self.further = np.maximum(self.replicas - 2, 0.0)
        self.free = self._free()

    def solve(self, start: StepTime | None) -> Array:
        """Return the seven parameters, those that nothing was seen of at their priors."""
        first = self._first() if start is None else start.as_array()
        gammas = _GAMMAS_FIRST if start is None and _GAMMA in self.free else (first[_GAMMA],)
        # What is not free is at its prior, whatever an earlier fit of other points had found.
        held = [at for at in range(_GAMMA) if at not in self.free]
        first[held] = SECONDS_MIN
        if _ALPHA_C in held:
            # Half of it is taken to grow with the batch: larger ones look promising.
            first[_ALPHA_C] = np.median(self.compute) / 2
        steps = STEPS_MAX if start is None else STEPS_ON_MAX
        found = [self._descend(np.append(np.log(first[:_GAMMA]), g), steps) for g in gammas]
        best, _ = min(found, key=lambda pair: pair[1])
        return np.append(np.exp(best[:_GAMMA]), best[_GAMMA])

    def _free(self) -> list[int]:
        batches_differ = bool((self.batch != self.batch[0]).any())
        free = [_ALPHA_C, _BETA_C] if batches_differ else [_BETA_C]
        far = bool(self.further.any())
        if self.between.any():
            free += [_ALPHA_N, _BETA_N] if far else [_ALPHA_N]
        if self.inside.any():
            free += [_ALPHA_R, _BETA_R] if far else [_ALPHA_R]
        return [*free, *([_GAMMA] if len(free) > 1 + batches_differ else [])]

    def _first(self) -> Array:
        """Return a guess from medians: half of the compute grows, the rest is the network."""
        half = np.median(self.compute) / 2
        waited = np.maximum(self.step - self.compute, self.step * 1e-3)
        between = np.median(waited[self.between]) if self.between.any() else SECONDS_MIN
        inside = np.median(waited[self.inside]) if self.inside.any() else SECONDS_MIN
        grows = half / np.median(self.batch)
        return np.array((half, grows, between, between / 10, inside, inside / 10, 1.0))

    def _descend(self, at: Array, steps_max: int) -> tuple[Array, float]:
        """Return the end of the way down from ``at``, and how unlikely it is."""
        free, at, damping = self.free, np.clip(at, _LOW, _HIGH), 1e-3
        errors, slopes = self._errors(at)
        scale = _scale(errors)
        for _ in range(steps_max):
            prior, prior_slopes = _prior(at)
            weights = (_TAILS + 1) / (_TAILS * scale**2 + errors**2)
            of_points, of_prior = slopes[:, free], prior_slopes[:, free]
            curvature = (of_points.T * weights) @ of_points + of_prior.T @ of_prior
            curvature.flat[:: len(free) + 1] += _ENOUGH
            downhill = -(of_points.T @ (weights * errors) + of_prior.T @ prior)
            before = _unlikeliness(errors, prior, scale)
            for _ in range(_DAMPINGS_MAX):
                damped = curvature.copy()
                damped.flat[:: len(free) + 1] *= 1 + damping
                step = np.linalg.solve(damped, downhill)
                there = at.copy()
                there[free] += np.minimum(np.maximum(step, -_LOG_STEP_MAX), _LOG_STEP_MAX)
                there = np.minimum(np.maximum(there, _LOW), _HIGH)
                errors_there, slopes_there = self._errors(there)
                gained = before - _unlikeliness(errors_there, _prior(there)[0], scale)
                if gained > 0:
                    break
                damping *= 10
            else:
                break
            at, errors, slopes, damping = there, errors_there, slopes_there, damping / 5
            last, scale = scale, _scale(errors)
            if gained < _LIKELIER_MIN and abs(scale / last - 1) < _SCALE_CHANGE_MIN:
                break
        unlikely = _unlikeliness(errors, _prior(at)[0], scale) + len(errors) * math.log(scale)
        return at, unlikely

    def _errors(self, at: Array) -> tuple[Array, Array]:
        """Return predicted less measured logarithms, compute before steps, and their slopes."""
        parameters, gamma = np.append(np.exp(at[:_GAMMA]), at[_GAMMA]), at[_GAMMA]
        grown = parameters[_BETA_C] * self.batch
        compute = parameters[_ALPHA_C] + grown
        network = network_s(parameters, self.nodes, self.replicas)
        log_compute, log_network = np.log(compute), np.log(network)
        power = np.exp(gamma * (log_network - log_compute))
        share = 1 / (1 + power)  # of the compute in the step
        log_step = log_compute + np.log1p(power) / gamma
        count = len(compute)
        slopes = np.zeros((2 * count, 7))
        grows = grown / compute
        slopes[:count, _ALPHA_C], slopes[:count, _BETA_C] = 1 - grows, grows
        slopes[count:, _ALPHA_C], slopes[count:, _BETA_C] = share * (1 - grows), share * grows
        by_network = (1 - share) / network
        for alpha, beta, where in (
            (_ALPHA_N, _BETA_N, self.between),
            (_ALPHA_R, _BETA_R, self.inside),
        ):
            slopes[count:, alpha] = by_network * where * parameters[alpha]
            slopes[count:, beta] = by_network * where * parameters[beta] * self.further
        mixed = share * log_compute + (1 - share) * log_network
        slopes[count:, _GAMMA] = (mixed - log_step) / gamma
        return np.concatenate((log_compute, log_step)) - self.logs, slopes


def _prior(at: Array) -> tuple[Array, Array]:
    """Return how far both retrogressions and the overlap are from none, and the slopes."""
    values, slopes = np.zeros(3), np.zeros((3, 7))
    for row, alpha, beta in ((0, _ALPHA_N, _BETA_N), (1, _ALPHA_R, _BETA_R)):
        values[row] = math.exp(at[beta] - at[alpha]) / _RETROGRESSION_PRIOR
        slopes[row, beta], slopes[row, alpha] = values[row], -values[row]
    values[2] = (at[_GAMMA] - 1) / _OVERLAP_PRIOR
    slopes[2, _GAMMA] = 1 / _OVERLAP_PRIOR
    return values, slopes


def _scale(errors: Array) -> float:
    """Return the scale of the errors by their median, which outliers do not move."""
    middle = len(errors) // 2
    median = float(np.partition(np.abs(errors), middle)[middle])
    return max(_NORMAL_PER_MEDIAN * median, _SCALE_MIN)


def _unlikeliness(errors: Array, prior: Array, scale: float) -> float:
    tails = np.log1p((errors / scale) ** 2 / _TAILS).sum()
    return float((_TAILS + 1) / 2 * tails + prior @ prior / 2)
