"""How far a step-time model is off, by micro-batch, where it was measured.

Between two measured micro-batches the error is linear in their logarithms; beyond them it fades, by
a factor of e for each factor of e in the micro-batch. Knows nothing of how a model is fitted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from holdfast.errors import InvalidRequestError
from holdfast.goodput.step_time import Array

FACTOR_MAX = 4.0
"""A model that is further off than this says nothing; the measured point may be a lie as well."""
POINTS_MAX = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Measured speed per predicted one on one number of nodes and replicas.

    Logarithms, by ascending micro-batch; make one with ``curve``.

    Raises:
        InvalidRequestError: they are not of one length, not in order, or out of bounds.
    """

    log_local: tuple[float, ...]
    log_factor: tuple[float, ...]

    def __post_init__(self) -> None:
        rising = all(
            low < high for low, high in zip(self.log_local, self.log_local[1:], strict=False)
        )
        if not (rising and 1 <= len(self.log_local) == len(self.log_factor) <= POINTS_MAX):
            raise InvalidRequestError(
                f"a curve of {len(self.log_local)} micro-batches and {len(self.log_factor)} "
                f"factors: 1 to {POINTS_MAX}, by ascending micro-batch"
            )
        for value in self.log_factor:
            if not abs(value) <= math.log(FACTOR_MAX) + 1e-9:
                raise InvalidRequestError(
                    f"a factor of a curve is e^{value!r}, not within {1 / FACTOR_MAX:g} and "
                    f"{FACTOR_MAX:g}"
                )

    def at(self, local: Array) -> Array:
        """Return the factors of micro-batches of at least 1."""
        asked = np.log(local)
        beyond = np.maximum(self.log_local[0] - asked, asked - self.log_local[-1])
        found = np.interp(asked, self.log_local, self.log_factor)
        return np.exp(found * np.exp(-np.maximum(beyond, 0.0)))


def curve(points: Iterable[tuple[int, float]]) -> Curve:
    """Return the curve through (micro-batch, measured speed per predicted one).

    Factors are held within bounds; of more than ``POINTS_MAX`` micro-batches some are left out.
    """
    kept = sorted(dict(points).items())
    kept = kept[:: -(-len(kept) // POINTS_MAX)]
    limit = math.log(FACTOR_MAX)
    return Curve(
        log_local=tuple(math.log(local) for local, _ in kept),
        log_factor=tuple(max(-limit, min(math.log(factor), limit)) for _, factor in kept),
    )
