"""What a job is known to have said of itself, and what follows from that for a policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from holdfast.core.hints import JobHints
from holdfast.errors import InvalidRequestError
from holdfast.goodput.batches import BATCH_MAX, BatchLimits
from holdfast.goodput.efficiency import GradientNoise
from holdfast.goodput.fit import Measured
from holdfast.goodput.profile import Profile, profile_of

PROFILES_COUNT_MAX = 512
"""Fits that are remembered: most families have said nothing new since the last plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knowledge:
    """What the metadata service has of a job: what its rank 0 said, and what saves have cost.

    ``at_s``: when that was said, by the database's clock. ``costs``: as measured, in seconds.
    ``step``: the last that it has done. ``family``: as ``families`` names it. ``began``: the noise
    of its gradients when that was first known. ``ended``: it has done all that it wanted.
    """

    step: int = 0
    hints: JobHints | None = None
    at_s: float = 0.0
    gpu_type: str = ""
    costs: Mapping[str, float] = field(default_factory=dict)
    family: str = ""
    began: GradientNoise | None = None
    ended: bool = False


NOTHING = Knowledge()


def measured(hints: JobHints | None) -> list[Measured]:
    """Return the step times that a job has said."""
    return [
        Measured(
            nodes=point.nodes,
            replicas=point.replicas,
            local_batch=point.local_batch,
            compute_s=point.compute_s,
            step_s=point.step_s,
        )
        for point in (hints.points if hints is not None else ())
    ]


def samples(hints: JobHints | None) -> float:
    """Return how many samples of the initial batch a job has done by its own word."""
    return hints.progress * hints.initial_batch if hints is not None else 0.0


def batches_of(hints: JobHints) -> BatchLimits | None:
    """Return the batches that a job allows; without bounds the batch is as it is."""
    fixed = not hints.batch_max
    maximum = hints.batch or hints.initial_batch if fixed else hints.batch_max
    try:
        return BatchLimits(
            initial=hints.initial_batch,
            maximum=min(maximum, BATCH_MAX),
            local_min=max(1, hints.local_min),
            local_max=hints.local_max or None,
            minimum=maximum if fixed else None,
            accumulation=hints.accumulates,
        )
    except InvalidRequestError:
        return None


def noise(hints: JobHints | None) -> GradientNoise | None:
    """Return the noise of a job's gradients; None: not known yet."""
    if hints is None or (hints.sqr == 0 and hints.var == 0):
        return None
    return GradientNoise(sqr=hints.sqr, var=hints.var)


@lru_cache(PROFILES_COUNT_MAX)
def profile(points: tuple[Measured, ...]) -> Profile | None:
    """Return what ``points`` say; None: nothing that can be so."""
    try:
        return profile_of(points)
    except InvalidRequestError:
        return None
