"""What is known of the speed of a job, or of all jobs of a family: a fit, and what was measured.

The fit fills in what nobody has run. Where a configuration was run its speed is believed: the fit
is corrected there by what was measured per what it says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from holdfast.errors import InvalidRequestError
from holdfast.goodput.fit import Measured, fit
from holdfast.goodput.step_time import StepTime

CORRECTION_MAX = 4.0
"""A fit that is further off than this says nothing; the measured point may be a lie as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A step-time model with its corrections.

    ``corrections``: (nodes, replicas) -> measured speed per predicted one, where it was measured.
    ``replicas_max``: the most that were ever measured.

    Raises:
        InvalidRequestError: a correction is out of bounds, or ``replicas_max`` is below 1.
    """

    step_time: StepTime
    corrections: Mapping[tuple[int, int], float] = field(default_factory=dict)
    replicas_max: int = 1

    def __post_init__(self) -> None:
        for (nodes, replicas), factor in self.corrections.items():
            if not 1 / CORRECTION_MAX <= factor <= CORRECTION_MAX:
                raise InvalidRequestError(
                    f"correction of a profile at {nodes} nodes, {replicas} replicas is {factor!r}, "
                    f"not within {1 / CORRECTION_MAX:g} and {CORRECTION_MAX:g}"
                )
        if self.replicas_max < 1:
            raise InvalidRequestError(f"a profile of {self.replicas_max} replicas measured nothing")


def profile_of(points: Sequence[Measured], start: StepTime | None = None) -> Profile:
    """Return the profile that ``points`` make; what cannot be so is left out.

    Args:
        points: The last of each configuration counts as much as the first.
        start: An earlier fit of most of these points.

    Raises:
        InvalidRequestError: no point can be so.
    """
    believed = [point for point in points if point.is_believable()]
    model = fit(points, start)
    speeds: dict[tuple[int, int], list[float]] = {}
    for point in believed:
        predicted_s = model.step_s(point.nodes, point.replicas, point.local_batch)
        speeds.setdefault((point.nodes, point.replicas), []).append(predicted_s / point.step_s)
    return Profile(
        step_time=model,
        corrections={
            where: float(np.clip(np.median(found), 1 / CORRECTION_MAX, CORRECTION_MAX))
            for where, found in speeds.items()
        },
        replicas_max=max(point.replicas for point in believed),
    )
