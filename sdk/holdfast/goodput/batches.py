"""The batch size that makes the most goodput, for many jobs and configurations at once.

A batch is ``replicas * local_batch * (accumulation + 1)`` samples. Candidates are 50 sizes between
the least and the most that a job allows, evenly spaced by their ratio.

Source: Pollux, section 4.1, and the grid of its published code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from holdfast.errors import InvalidRequestError
from holdfast.goodput.curves import Curve
from holdfast.goodput.efficiency import GradientNoise, efficiency
from holdfast.goodput.step_time import Array, StepTime, predict

CANDIDATES = 50
BATCH_MAX = 2**40
_PAIRS_AT_ONCE = 512
"""So that a block of candidates stays in the cache of a core."""
_EPSILON = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Which batches a job allows, in samples.

    ``initial`` is what its learning rate was chosen for, the unit of progress. ``minimum`` is the
    least batch, by default the initial one; with ``minimum == maximum`` the batch is fixed.
    ``local_min`` and ``local_max`` bound one micro-batch on one GPU.

    Raises:
        InvalidRequestError: no batch keeps them all; says which two do not fit.
    """

    initial: int
    maximum: int
    local_min: int = 1
    local_max: int | None = None
    minimum: int | None = None
    accumulation: bool = False

    def __post_init__(self) -> None:
        ordered = (
            ("1", 1, "local_min", self.local_min),
            ("local_min", self.local_min, "local_max", self.largest_local),
            ("1", 1, "initial", self.initial),
            ("1", 1, "minimum", self.least),
            ("minimum", self.least, "maximum", self.maximum),
            ("local_min", self.local_min, "maximum", self.maximum),
            ("maximum", self.maximum, "the most that is believed", BATCH_MAX),
        )
        for low_name, low, high_name, high in ordered:
            if not low <= high:
                raise InvalidRequestError(
                    f"batch limits: {low_name} {low} is more than {high_name} {high}"
                )

    @property
    def least(self) -> int:
        """The least batch."""
        return self.initial if self.minimum is None else self.minimum

    @property
    def largest_local(self) -> int:
        """The largest micro-batch."""
        return self.maximum if self.local_max is None else self.local_max

    @property
    def replicas_max(self) -> int:
        """On more replicas than this each would have less than the least micro-batch."""
        return max(1, self.maximum // self.local_min)

    def first(self, replicas: int) -> Batch:
        """Return the batch of a job of which nothing has been measured yet: the least one."""
        local = -(-max(self.least, self.local_min * replicas) // replicas)
        accumulation = -(-local // self.largest_local) - 1 if self.accumulation else 0
        if self.accumulation and replicas == 1 and local > self.initial:
            accumulation = max(1, accumulation)
        local = -(-local // (accumulation + 1))
        most = self.maximum // (replicas * (accumulation + 1))
        return Batch(local=max(1, min(local, most, self.largest_local)), accumulation=accumulation)

    def as_array(self) -> Array:
        """Return (initial, least, maximum, local_min, local_max, accumulation)."""
        return np.array(
            (self.initial, self.least, self.maximum, self.local_min, self.largest_local,
             self.accumulation),
            dtype=np.float64,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch as one GPU sees it: samples of a micro-batch, and how many more are accumulated."""

    local: int
    accumulation: int

    def size(self, replicas: int) -> int:
        """Return the samples of one optimizer step."""
        return replicas * self.local * (self.accumulation + 1)


@dataclass(frozen=True, slots=True)
class Best:
    """The best batch of each pair, arrays of shape ``(pairs,)``; goodput 0: no batch is allowed."""

    goodput: Array
    local: npt.NDArray[np.int64]
    accumulation: npt.NDArray[np.int64]

    def batch(self, pair: int) -> Batch:
        """Return the batch of one pair."""
        return Batch(local=int(self.local[pair]), accumulation=int(self.accumulation[pair]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """One job as it is now: its step time, the noise of its gradients, the batches it allows.

    ``curves``: how far the step time is off, see ``Profile``.
    """

    step_time: StepTime
    noise: GradientNoise
    limits: BatchLimits
    curves: Mapping[tuple[int, int], Curve] = field(default_factory=dict)

    def throughput(self, nodes: int, replicas: int, batch: Batch) -> float:
        """Return samples per second."""
        step_s = self.step_time.step_s(nodes, replicas, batch.local, batch.accumulation)
        known = self.curves.get((nodes, replicas))
        factor = float(known.at(np.array(float(batch.local)))) if known else 1.0
        return batch.size(replicas) / step_s * factor

    def efficiency(self, batch_size: int) -> float:
        """Return the progress per sample of a batch, beside that of the initial one."""
        scale = batch_size / self.limits.initial
        return self.noise.gain(scale) / scale

    def at(self, nodes: int, replicas: int, batch: Batch) -> float:
        """Return the goodput of a batch, in samples of the initial batch size per second."""
        return self.throughput(nodes, replicas, batch) * self.efficiency(batch.size(replicas))

    def best(self, nodes: int, replicas: int) -> tuple[float, Batch]:
        """Return the best goodput on so many GPUs and its batch; 0 if none is allowed there."""
        best = best_batches([self], [nodes], [replicas])
        return float(best.goodput[0]), best.batch(0)


def best_batches(jobs: Sequence[Goodput], nodes: Sequence[int], replicas: Sequence[int]) -> Best:
    """Return the best batch of each job on its own number of nodes and replicas, pair by pair."""
    places = enumerate(zip(jobs, nodes, replicas, strict=True))
    known = {at: job.curves[n, r] for at, (job, n, r) in places if (n, r) in job.curves}
    return best_of_pairs(
        np.stack([job.step_time.as_array() for job in jobs], axis=1),
        np.array([job.noise.ratio for job in jobs]),
        np.stack([job.limits.as_array() for job in jobs], axis=1),
        np.array(nodes, dtype=np.float64),
        np.array(replicas, dtype=np.float64),
        known,
    )


def best_of_pairs(
    parameters: Array, ratios: Array, limits: Array, nodes: Array, replicas: Array,
    curves: Mapping[int, Curve],
) -> Best:  # fmt: skip
    """Return the best batch of each pair of a job and a configuration.

    Args:
        parameters: Shape ``(7, pairs)``, as ``StepTime.as_array`` has them.
        ratios: Shape ``(pairs,)``, as ``GradientNoise.ratio`` has it.
        limits: Shape ``(6, pairs)``, as ``BatchLimits.as_array`` has them.
        nodes: Shape ``(pairs,)``, at least 1.
        replicas: As ``nodes``, and at least as many.
        curves: How far the step time is off, for the pairs where that is known.
    """
    count = len(ratios)
    goodput, local, accumulation = np.zeros(count), np.ones(count), np.zeros(count)
    for begin in range(0, count, _PAIRS_AT_ONCE):
        part = slice(begin, begin + _PAIRS_AT_ONCE)
        known = [(at - begin, one) for at, one in curves.items() if begin <= at < part.stop]
        goodput[part], local[part], accumulation[part] = _best_of_block(
            parameters[:, part], ratios[part], limits[:, part], nodes[part], replicas[part], known
        )
    return Best(goodput, local.astype(np.int64), accumulation.astype(np.int64))


_GRID = np.linspace(0.0, 1.0, CANDIDATES)[:, None]


def _best_of_block(
    parameters: Array, ratios: Array, limits: Array, nodes: Array, replicas: Array,
    curves: Sequence[tuple[int, Curve]],
) -> tuple[Array, Array, Array]:  # fmt: skip
    initial, least, maximum, local_min, local_max, accumulates = limits
    low = np.maximum(least, local_min * replicas)
    growth = np.maximum(maximum / low, 1.0)
    asked = low * growth**_GRID / replicas
    spread = np.maximum(np.ceil(asked / local_max - _EPSILON) - 1, 0.0)
    # With one micro-batch on one replica noise cannot be told from signal: take two.
    alone = (replicas == 1) & (asked > initial + _EPSILON)
    spread = np.where(alone, np.maximum(spread, 1.0), spread)
    accumulation = np.where(accumulates > 0, spread, 0.0)
    parts = accumulation + 1
    local = np.ceil(asked / parts - _EPSILON)
    local = np.minimum(local, np.floor(maximum / (replicas * parts) + _EPSILON))
    # Without accumulation one replica keeps the least batch, for the same reason.
    stays = (replicas == 1) & (accumulates == 0)
    local = np.where(stays, np.minimum(least, local), local)
    compute, step = predict(parameters, nodes, replicas, np.maximum(local, 1.0))
    size = replicas * local * parts
    rate = size / (step + accumulation * compute) * efficiency(ratios, size / initial)
    for at, known in curves:
        rate[:, at] *= known.at(np.maximum(local[:, at], 1.0))
    valid = (local >= local_min) & (local <= local_max) & (low <= maximum)
    rate = np.where(valid, rate, 0.0)
    best = np.argmax(rate, axis=0)
    pairs = np.arange(rate.shape[1])
    return rate[best, pairs], np.maximum(local[best, pairs], 1.0), accumulation[best, pairs]
