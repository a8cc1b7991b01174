"""Learning rates for a batch that is not the one they were chosen for.

A rule returns one factor per parameter group; whoever steps the optimizer multiplies its learning
rates by them for that one step. Pure arithmetic; knows nothing of torch.

Source: arXiv 2007.05105 (AdaScale), Pollux OSDI 2021 (its square root for Adam), arXiv 1706.02677
(linear), arXiv 1404.5997 (square root), arXiv 1901.08256 (LEGW).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from holdfast.elastic.noise_scale import NoiseScale
from holdfast.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What a rule may know of an update that is about to be made.

    ``scale``: its batch per initial batch. ``progress``: updates at the initial batch size that all
    before it were worth.
    """

    scale: float
    noise: NoiseScale
    progress: float
    groups_count: int


class ScalingRule(ABC):
    """How learning rates follow the batch size."""

    @abstractmethod
    def factors(self, update: Update) -> list[float]:
        """Return what each group's learning rate is multiplied by; 1 at the initial batch."""


class AdaScale(ScalingRule):
    """By the gain of each group: what its gradient has gained, the step is longer. For SGD."""

    def factors(self, update: Update) -> list[float]:
        """See ``ScalingRule``."""
        return update.noise.gains(update.scale)


class AdamScale(ScalingRule):
    """By a power of each group's gain, for optimizers that divide by the gradient's own size.

    Args:
        power: The square root by default.
        reset_moments: Have the optimizer forget its moments and its steps whenever the batch size
            changes, as the published code of Pollux does; what it knew is of the other batch.

    Raises:
        InvalidRequestError: ``power`` is not above 0.
    """

    def __init__(self, power: float = 0.5, *, reset_moments: bool = False) -> None:
        if not (math.isfinite(power) and power > 0):
            raise InvalidRequestError(f"AdamScale(power={power!r}): pass a number above 0")
        self.power = power
        self.reset_moments = reset_moments

    def factors(self, update: Update) -> list[float]:
        """See ``ScalingRule``."""
        return [gain**self.power for gain in update.noise.gains(update.scale)]


class LinearScale(ScalingRule):
    """As the batch grows: right as long as noise is all there is."""

    def factors(self, update: Update) -> list[float]:
        """See ``ScalingRule``."""
        return [update.scale] * update.groups_count


class SqrtScale(ScalingRule):
    """By the square root of the scale: keeps the variance of a step as it was."""

    def factors(self, update: Update) -> list[float]:
        """See ``ScalingRule``."""
        return [math.sqrt(update.scale)] * update.groups_count


class LEGWScale(ScalingRule):
    """By the square root of the scale, warmed up over epochs that are as many times longer.

    Args:
        base_warmup_epochs: How long the warm-up is at the initial batch size.
        data_size: Samples of an epoch.
        batch_size: The initial batch size.

    Raises:
        InvalidRequestError: one of them makes no sense; names it.
    """

    def __init__(self, base_warmup_epochs: float, data_size: int, batch_size: int) -> None:
        if not (math.isfinite(base_warmup_epochs) and base_warmup_epochs >= 0):
            raise InvalidRequestError(
                f"LEGWScale(base_warmup_epochs={base_warmup_epochs!r}): pass a number from 0"
            )
        for name, value in (("data_size", data_size), ("batch_size", batch_size)):
            if value < 1:
                raise InvalidRequestError(f"LEGWScale({name}={value!r}): pass a number from 1")
        self.base_warmup_epochs = base_warmup_epochs
        self.data_size = data_size
        self.batch_size = batch_size

    def factors(self, update: Update) -> list[float]:
        """See ``ScalingRule``."""
        updates = self.base_warmup_epochs * update.scale * self.data_size / self.batch_size
        warm = min(1.0, update.progress / updates) if updates else 1.0
        return [math.sqrt(update.scale) * warm] * update.groups_count
