"""The step-time model: seven parameters that say how long a step takes on so many GPUs.

A micro-batch of ``m`` samples takes ``alpha_c + beta_c * m`` seconds on each GPU. The gradients of
``R`` replicas take ``alpha + beta * (R - 2)`` seconds to be summed up: ``_n`` between nodes, ``_r``
inside of one. ``gamma`` says how far the two overlap: 1 is not at all, 10 nearly whole. Knows
nothing of batch sizes that a job may have, nor how the parameters are found. Units: seconds.

Source: Pollux, section 3.2; the form of the overlap is theirs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from holdfast.errors import InvalidRequestError

Array = npt.NDArray[np.float64]

SECONDS_MIN, SECONDS_MAX = 1e-8, 1e6
"""What a parameter may be: a step of eleven days is a lie, and stands for 'never'."""
GAMMA_MIN, GAMMA_MAX = 1.0, 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The parameters of one job on one type of GPU.

    Raises:
        InvalidRequestError: one of them is not a number within its bounds; names it.
    """

    alpha_c: float
    beta_c: float
    alpha_n: float
    beta_n: float
    alpha_r: float
    beta_r: float
    gamma: float

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            low, high = _bounds(name)
            if not (math.isfinite(value) and low <= value <= high):
                raise InvalidRequestError(
                    f"{name} of a step-time model is {value!r}, not within {low:g} and {high:g}"
                )

    def as_array(self) -> Array:
        """Return the seven numbers in the order of the fields."""
        return np.array(
            (self.alpha_c, self.beta_c, self.alpha_n, self.beta_n, self.alpha_r, self.beta_r,
             self.gamma)
        )  # fmt: skip

    def compute_s(self, local_batch: float) -> float:
        """Return how long forward and backward of one micro-batch take, without the network."""
        return self.alpha_c + self.beta_c * local_batch

    def step_s(self, nodes: int, replicas: int, local_batch: float, accumulation: int = 0) -> float:
        """Return how long one optimizer step takes.

        Args:
            nodes: How many nodes the replicas lie on.
            replicas: All of them, at least ``nodes``.
            local_batch: Samples of one micro-batch on one GPU.
            accumulation: Micro-batches of a step beside the one whose gradients are summed up.
        """
        compute, step = self._times_s(nodes, replicas, local_batch)
        return step + accumulation * compute

    def _times_s(self, nodes: int, replicas: int, local_batch: float) -> tuple[float, float]:
        """Return what ``predict`` does; of one number NumPy takes twenty times as long."""
        compute, further = self.compute_s(local_batch), max(replicas - 2, 0)
        network = SECONDS_MIN
        if nodes > 1:
            network = self.alpha_n + self.beta_n * further
        elif replicas > 1:
            network = self.alpha_r + self.beta_r * further
        power = math.exp(self.gamma * math.log(network / compute))
        return compute, compute * math.exp(math.log1p(power) / self.gamma)


def _bounds(name: str) -> tuple[float, float]:
    return (GAMMA_MIN, GAMMA_MAX) if name == "gamma" else (SECONDS_MIN, SECONDS_MAX)


def network_s(
    parameters: Array, nodes: Array | np.float64, replicas: Array | np.float64
) -> Array | np.float64:
    """Return how long gradients take to be summed up; ``SECONDS_MIN`` with one replica.

    Args:
        parameters: Shape ``(7, ...)``, in the order of the fields of ``StepTime``.
        nodes: How many, of a shape that broadcasts with ``parameters[0]``.
        replicas: As ``nodes``.
    """
    _, _, alpha_n, beta_n, alpha_r, beta_r, _ = parameters
    further = np.maximum(replicas - 2.0, 0.0)
    between, inside = alpha_n + beta_n * further, alpha_r + beta_r * further
    return np.where(nodes > 1, between, np.where(replicas > 1, inside, SECONDS_MIN))


def predict(
    parameters: Array,
    nodes: Array | np.float64,
    replicas: Array | np.float64,
    local_batch: Array | np.float64,
) -> tuple[Array | np.float64, Array | np.float64]:
    """Return the seconds of a micro-batch, and of one whose gradients are summed up.

    Args:
        parameters: Shape ``(7, ...)``, within the bounds of ``StepTime``.
        nodes: How many, of a shape that broadcasts with ``parameters[0]``.
        replicas: As ``nodes``.
        local_batch: As ``nodes``; samples of a micro-batch.
    """
    compute = parameters[0] + parameters[1] * local_batch
    gamma = parameters[6]
    # By logarithms of the ratio: neither power can overflow within the bounds.
    ratio = np.log(network_s(parameters, nodes, replicas) / compute)
    return compute, compute * np.exp(np.log1p(np.exp(gamma * ratio)) / gamma)
