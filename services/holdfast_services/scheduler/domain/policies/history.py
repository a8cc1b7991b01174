"""What jobs of one family have measured, gathered while they run, and after they have ended.

A step-time model is fitted to the points of all of them, by type of GPU; a point that the model has
foreseen within ``FORESEEN`` does not make it anew. What is kept is bounded.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from holdfast.goodput.efficiency import GradientNoise
from holdfast.goodput.fit import Measured
from holdfast.goodput.profile import Profile, profile_of
from holdfast.goodput.step_time import StepTime
from holdfast_services.scheduler.domain.policies.facts import Family

FORESEEN = 0.01
POINTS_MAX = 512
WORKS_MAX = 64
"""Jobs that have ended, whose median work is that of the next one."""


MakesProfile = Callable[[Sequence[Measured], StepTime | None], Profile]


class Measurements:
    """Points of one type of GPU, by configuration, and the profile that they make.

    The last point of a configuration counts. With more than ``POINTS_MAX`` the oldest go. ``make``
    makes the profile anew when a point was not foreseen within ``foreseen``.
    """

    def __init__(self, make: MakesProfile = profile_of, foreseen: float = FORESEEN) -> None:
        self._make, self._foreseen_within = make, foreseen
        self._points: dict[tuple[int, int, int], Measured] = {}
        self._profile: Profile | None = None
        self._surprised = False

    def add(self, point: Measured) -> None:
        """Take a point; one that cannot be so is left out."""
        if not point.is_believable():
            return
        key = (point.nodes, point.replicas, point.local_batch)
        if self._points.get(key) == point:
            return
        self._points.pop(key, None)
        self._points[key] = point
        if len(self._points) > POINTS_MAX:
            del self._points[next(iter(self._points))]
        self._surprised = self._surprised or not self._foreseen(point)

    def profile(self) -> Profile | None:
        """Return what the points say; None if there are none."""
        if self._surprised:
            start = self._profile.step_time if self._profile else None
            self._profile = self._make(list(self._points.values()), start)
            self._surprised = False
        return self._profile

    def __contains__(self, key: tuple[int, int, int]) -> bool:
        return key in self._points

    def _foreseen(self, point: Measured) -> bool:
        if self._profile is None:
            return False
        model = self._profile.step_time
        step_s = model.step_s(point.nodes, point.replicas, point.local_batch)
        compute_s = model.compute_s(point.local_batch)
        known_place = (point.nodes, point.replicas) in self._profile.curves
        return known_place and all(
            abs(math.log(predicted / found)) <= self._foreseen_within
            for predicted, found in ((step_s, point.step_s), (compute_s, point.compute_s))
        )


class History:
    """What is known of a family; ``family()`` says it as a fact."""

    def __init__(self) -> None:
        self._by_type: dict[str, Measurements] = {}
        self._noise: GradientNoise | None = None
        self._works: deque[float] = deque(maxlen=WORKS_MAX)

    def measured(self, gpu_type: str, points: Iterable[Measured]) -> None:
        """Take points that a job of the family has measured."""
        kept = self._by_type.setdefault(gpu_type, Measurements())
        for point in points:
            kept.add(point)

    def began(self, noise: GradientNoise) -> None:
        """Take the noise that a job measured first; the first job's counts."""
        self._noise = self._noise or noise

    def ended(self, work: float) -> None:
        """Take the samples that a job took in all."""
        self._works.append(work)

    def family(self) -> Family:
        """Return what is known now."""
        profiles = {kind: kept.profile() for kind, kept in sorted(self._by_type.items())}
        return Family(
            profiles={kind: profile for kind, profile in profiles.items() if profile},
            noise=self._noise,
            work=statistics.median(self._works) if self._works else None,
        )
