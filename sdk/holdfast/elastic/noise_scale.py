"""How noisy the gradients of a job are, and what a larger batch is worth: per parameter group.

Of one update ``Norms`` are measured; ``NoiseScale`` averages the estimates that follow from them.
Pure arithmetic on a few numbers; knows nothing of torch, ranks or optimizers.

With initial batch size B0, true gradient G and per-sample covariance Sigma: ``sqr`` estimates
|G|^2, ``var`` estimates tr(Sigma) / B0, so that B0 * var / sqr is the noise scale in samples.

Source: arXiv 1812.06162, appendix A.1 (both estimators); arXiv 2007.05105 (gain); floors, start and
smoothing as in the published code of Pollux (OSDI 2021).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SMOOTHING = 0.999
"""Weight of what was known before, for an update at the initial batch size."""
SQR_MIN = 0.0
VAR_MIN = 1e-6
"""Floors of the averages where they are used: an estimate may be negative by chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Norms:
    """Squared norms of ``count`` gradients of one update, one number per parameter group.

    Of unequal shares ``count`` is that of equal ones with as much noise.

    ``local`` is the mean of their squared norms, ``total`` that of their mean. ``scale``
    is how many initial batches the mean is of. ``biased``: the gradients are of different updates,
    so that what the parameters moved between them counts as noise.
    """

    local: tuple[float, ...]
    total: tuple[float, ...]
    count: float
    scale: float
    biased: bool = False


@dataclass(slots=True)
class _Average:
    """A debiased moving average of two numbers: weighted sums, and the weight itself."""

    sqr: float = 0.0
    var: float = 0.0
    weight: float = 0.0

    def take(self, sqr: float, var: float, kept: float) -> None:
        self.sqr = kept * self.sqr + (1 - kept) * sqr
        self.var = kept * self.var + (1 - kept) * var
        self.weight = kept * self.weight + (1 - kept)


class NoiseScale:
    """Averages of ``sqr`` and ``var`` of each parameter group.

    Invariants: before any estimate a group has sqr 1 and var 0, so that its gain is 1; one estimate
    that is not finite in any group changes nothing. ``biased`` says that the averages are of
    differences between updates; the first estimate that is not drops them.
    """

    def __init__(self, groups_count: int) -> None:
        self._groups = [_Average() for _ in range(groups_count)]
        self.biased = False

    def add_groups(self, groups_count: int) -> None:
        """Have at least ``groups_count`` groups; new ones have no estimate yet."""
        self._groups += [_Average() for _ in range(groups_count - len(self._groups))]

    def update(self, norms: Norms) -> bool:
        """Take the norms of one update; tell whether they gave an estimate.

        They give none if any number is not finite, or there are not two gradients to compare.
        """
        if norms.count < 2 or not _all_finite((*norms.local, *norms.total, norms.scale)):
            return False
        estimates = [
            estimate(local, total, norms.count, norms.scale)
            for local, total in zip(norms.local, norms.total, strict=True)
        ]
        if not _all_finite(number for pair in estimates for number in pair):
            return False
        if self.biased and not norms.biased:
            self._groups = [_Average() for _ in self._groups]
        self.biased = norms.biased
        kept = SMOOTHING**norms.scale
        for group, (sqr, var) in zip(self._groups, estimates, strict=True):
            group.take(sqr, var, kept)
        return True

    @property
    def known(self) -> bool:
        """Whether there was an estimate."""
        return any(group.weight for group in self._groups)

    @property
    def sqr_by_group(self) -> list[float]:
        """The squared norm of the gradient of each group, at least ``SQR_MIN``."""
        return [max(_of(g.sqr, g.weight, unknown=1.0), SQR_MIN) for g in self._groups]

    @property
    def var_by_group(self) -> list[float]:
        """The variance of each group's gradient at the initial batch, at least ``VAR_MIN``."""
        return [max(_of(g.var, g.weight, unknown=0.0), VAR_MIN) for g in self._groups]

    @property
    def sqr(self) -> float:
        """The squared norm of the whole gradient."""
        return math.fsum(self.sqr_by_group)

    @property
    def var(self) -> float:
        """The variance of the whole gradient at the initial batch size."""
        return math.fsum(self.var_by_group)

    def gain(self, scale: float) -> float:
        """Return how many updates at the initial batch one at ``scale`` times it is worth."""
        return gain(self.sqr, self.var, scale)

    def gains(self, scale: float) -> list[float]:
        """Return the gain of each group by itself."""
        pairs = zip(self.sqr_by_group, self.var_by_group, strict=True)
        return [gain(sqr, var, scale) for sqr, var in pairs]

    def state_dict(self) -> dict[str, object]:
        """Return the averages as plain data."""
        groups = [[group.sqr, group.var, group.weight] for group in self._groups]
        return {"groups": groups, "biased": self.biased}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with saved averages; groups that are only here have no estimate yet."""
        count = len(self._groups)
        self._groups = [_Average(*map(float, group)) for group in state["groups"]]
        self.add_groups(count)
        self.biased = bool(state["biased"])


def estimate(local: float, total: float, count: float, scale: float) -> tuple[float, float]:
    """Return (sqr, var) without bias, from the norms of ``count`` gradients of equal batches.

    >>> estimate(local=7.0, total=4.0, count=4, scale=1.0)
    (3.0, 1.0)
    """
    return (count * total - local) / (count - 1), (local - total) * scale / (count - 1)


def gain(sqr: float, var: float, scale: float) -> float:
    """Return how many updates at the initial batch one at ``scale`` times it is worth.

    Between 1 and ``scale``: 1 if there is no noise, ``scale`` if there is nothing else.

    >>> gain(sqr=1.0, var=3.0, scale=3.0)
    2.0
    """
    if var <= 0:
        return 1.0
    return (var + sqr) / (var / scale + sqr)


def _of(total: float, weight: float, *, unknown: float) -> float:
    return total / weight if weight else unknown


def _all_finite(numbers: Iterable[float] | Sequence[float]) -> bool:
    return all(map(math.isfinite, numbers))
