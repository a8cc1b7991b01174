"""What is known of the speed of a job, or of all jobs of a family: a fit, and what was measured.

The fit fills in what nobody has run. Where a configuration was run its speed is believed: the fit
is corrected there by what was measured per what it says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.errors import InvalidRequestError
from holdfast.goodput.curves import Curve, curve
from holdfast.goodput.fit import Measured, fit
from holdfast.goodput.step_time import StepTime


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A step-time model with its corrections.

    ``curves``: (nodes, replicas) -> how far the model is off there, where it was measured.
    ``replicas_max``: the most that were ever measured.

    Raises:
        InvalidRequestError: ``replicas_max`` is below 1.
    """

    step_time: StepTime
    curves: Mapping[tuple[int, int], Curve] = field(default_factory=dict)
    replicas_max: int = 1

    def __post_init__(self) -> None:
        if self.replicas_max < 1:
            raise InvalidRequestError(f"a profile of {self.replicas_max} replicas measured nothing")


def profile_of(points: Sequence[Measured], start: StepTime | None = None) -> Profile:
    """Return the profile that ``points`` make; what cannot be so is left out.

    Args:
        points: Of one configuration the last one counts.
        start: An earlier fit of most of these points.

    Raises:
        InvalidRequestError: no point can be so.
    """
    believed = [point for point in points if point.is_believable()]
    model = fit(points, start)
    speeds: dict[tuple[int, int], dict[int, float]] = {}
    for point in believed:
        predicted_s = model.step_s(point.nodes, point.replicas, point.local_batch)
        where = (point.nodes, point.replicas)
        speeds.setdefault(where, {})[point.local_batch] = predicted_s / point.step_s
    return Profile(
        step_time=model,
        curves={where: curve(found.items()) for where, found in speeds.items()},
        replicas_max=max(point.replicas for point in believed),
    )
