"""Statistical efficiency: how much progress a sample of a larger batch still makes.

Knows nothing of time. Source: the gradient noise scale, arXiv 1812.06162; the gain of AdaScale,
arXiv 2007.05105.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from holdfast.errors import InvalidRequestError
from holdfast.goodput.step_time import Array

RATIO_MAX = 1e12
"""More noise than this per signal is all noise: the gain is the scale to twelve digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientNoise:
    """The squared norm of the gradient and the variance of its estimate at the initial batch size.

    Raises:
        InvalidRequestError: one of them is negative or not finite; names it.
    """

    sqr: float
    var: float

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InvalidRequestError(f"{name} of gradients is {value!r}, not at least 0")

    @property
    def ratio(self) -> float:
        """The variance per squared norm, between 0 and ``RATIO_MAX``; of nothing at all it is 0."""
        if self.var <= 0:
            return 0.0
        return min(self.var / self.sqr, RATIO_MAX) if self.sqr > self.var / RATIO_MAX else RATIO_MAX

    def gain(self, scale: float) -> float:
        """Return how many steps at the initial batch size one at ``scale`` times it is worth.

        >>> GradientNoise(sqr=1.0, var=3.0).gain(3)
        2.0
        """
        return (self.ratio + 1) / (self.ratio / scale + 1)


def efficiency(ratio: Array | float, scale: Array) -> Array:
    """Return the progress per sample beside that at the initial batch size: 1 at scale 1.

    Args:
        ratio: Variance per squared norm, as ``GradientNoise.ratio`` has it.
        scale: Batch size per initial batch size, > 0; the shapes broadcast.
    """
    return (ratio + 1) / (ratio + scale)
