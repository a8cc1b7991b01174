"""One simulated job: it makes progress by what is true, and measures what it runs on.

Its own agent fits the step-time model to what was measured and chooses the batch size anew each
round and at each end of an epoch. Source: the simulator published with Pollux.
"""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass

from holdfast.goodput.batches import Batch, BatchLimits, Goodput
from holdfast.goodput.efficiency import GradientNoise
from holdfast.goodput.fit import Measured
from holdfast.goodput.profile import Profile
from holdfast_services.scheduler.domain.policies.facts import Allocation
from holdfast_services.scheduler.domain.policies.history import Measurements
from holdfast_services.scheduler.simulator.trace import TraceJob
from holdfast_services.scheduler.simulator.truth import Placement

OUTLIER = 5.0
SAMPLES_MAX = 9
"""Of so many measurements of a configuration the median counts, where they vary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """How step times vary: sigma of their logarithm, and the share of slow measurements."""

    sigma: float = 0.0
    outliers: float = 0.0


STEADY = Noise()


class SimulatedJob:
    """A job of a trace, and what has become of it. Times are of the simulation, in seconds."""

    def __init__(
        self, job: TraceJob, *, declared: float | None = None, fixed: bool = False,
        noise: Noise = STEADY, seed: int = 0, own: Measurements | None = None,
    ) -> None:  # fmt: skip
        self.name, self.truth, self.submitted_s = job.name, job.truth, job.submitted_s
        self.declared = declared
        self.limits = _fixed(job) if fixed else job.truth.limits
        self.replicas_min, self.replicas_max = _replicas(job, fixed=fixed)
        self.allocation: Allocation = ()
        self.held_by: frozenset[str] = frozenset()
        self.since_s, self.waited_s = job.submitted_s, 0.0
        self.ended_s: float | None = None
        self.starts, self.gpu_s, self.lost_s = 0, 0.0, 0.0
        self.steps, self.epoch = 0.0, 0
        self.noise: GradientNoise | None = None
        self.first_noise: GradientNoise | None = None
        self.family_profile: Profile | None = None
        self.new_points: list[Measured] = []
        self._moving_s = 0.0
        self._batch: Batch | None = None
        self._chosen_for: object = None
        self._own = own or Measurements()
        self._samples: dict[tuple[int, int, int], list[tuple[float, float]]] = {}
        self._noise_of_steps = noise
        self._drawn = random.Random(f"{seed}:{job.name}")  # noqa: S311 - no secret
        self._slower = 1.0

    @property
    def placement(self) -> Placement:
        """Replicas on each node."""
        return tuple(gpus for _, gpus in self.allocation)

    @property
    def done(self) -> float:
        """Samples of the initial batch size that it has trained."""
        return self.steps * self.truth.limits.initial

    @property
    def profile(self) -> Profile | None:
        """What it has measured itself."""
        return self._own.profile()

    def move(self, allocation: Allocation, now_s: float, restart_s: float) -> None:
        """Give it other GPUs, or none."""
        if bool(allocation) != bool(self.allocation):
            if allocation:
                self.waited_s = now_s - self.since_s
            self.since_s = now_s
        self.allocation = allocation
        if allocation:
            self._moving_s = restart_s + self.lost_s
            self.lost_s = 0.0
            self.starts += 1
            self.held_by = frozenset(name for name, _ in allocation)
            self._choose_batch()

    def fail(self, now_s: float, repeats_s: float) -> None:
        """Take its GPUs, since a node was lost; what it had not saved is done again."""
        self.move((), now_s, 0.0)
        self.lost_s = repeats_s

    def advance(self, begin_s: float, seconds: float) -> None:
        """Let it run for so long, from ``begin_s`` on; it may end meanwhile."""
        if not self.allocation or self.ended_s is not None:
            return
        gpus = sum(self.placement)
        waited_s = min(self._moving_s, seconds)
        self._moving_s -= waited_s
        self.gpu_s += waited_s * gpus
        now_s, left_s = begin_s + waited_s, seconds - waited_s
        if self._noise_of_steps.sigma:
            self._slower = math.exp(self._drawn.gauss(0.0, self._noise_of_steps.sigma))
        while left_s > 0 and self.ended_s is None:
            rate = self._measured_rate()
            end = self.truth.ends_at(self.epoch)
            if self.steps + rate * left_s < end:
                took_s = left_s
                self.steps += rate * left_s
            else:
                # To whole seconds, as the published simulator has it.
                took_s = min(float(round((end - self.steps) / rate)), left_s)
                self.steps, self.epoch = end, self.epoch + 1
                if self.epoch == self.truth.epochs:
                    self.ended_s = now_s + took_s
            now_s, left_s = now_s + took_s, left_s - took_s
            self.gpu_s += took_s * gpus
            if self.ended_s is None:
                self._choose_batch()

    def _measured_rate(self) -> float:
        """Return the steps at the initial batch size per second, and note what was measured."""
        batch, placement = self._batch, self.placement
        assert batch is not None
        replicas = sum(placement)
        compute_s, step_s = self.truth.times_s(placement, batch.local)
        size = batch.size(replicas)
        self.noise = self.truth.noise(size, self.epoch)
        self.first_noise = self.first_noise or self.noise
        self._measure(len(placement), replicas, batch.local, compute_s, step_s)
        took_s = self._slower * (step_s + batch.accumulation * compute_s)
        return self.noise.gain(size / self.truth.limits.initial) / took_s

    def _measure(
        self, nodes: int, replicas: int, local: int, compute_s: float, step_s: float
    ) -> None:
        key, noise = (nodes, replicas, local), self._noise_of_steps
        if not noise.sigma and key in self._own:
            return
        if noise.sigma:
            slower = self._slower
            if noise.outliers and self._drawn.random() < noise.outliers:
                slower *= OUTLIER
            samples = self._samples.setdefault(key, [])
            samples.append((compute_s * slower, step_s * slower))
            del samples[:-SAMPLES_MAX]
            if len(samples) & (len(samples) - 1):  # only the 1st, 2nd, 4th, 8th is news
                return
            compute_s = statistics.median(one for one, _ in samples)
            step_s = statistics.median(one for _, one in samples)
        point = Measured(
            nodes=nodes, replicas=replicas, local_batch=local, compute_s=compute_s, step_s=step_s
        )
        self._own.add(point)
        self.new_points.append(point)

    def _choose_batch(self) -> None:
        placement = self.placement
        profile = self.family_profile or self.profile
        asked = (placement, profile, self.noise)
        if asked == self._chosen_for:
            return
        self._chosen_for = asked
        replicas = sum(placement)
        if profile is None or self.noise is None:
            self._batch = self.limits.first(replicas)
            return
        job = Goodput(
            step_time=profile.step_time, noise=self.noise, limits=self.limits,
            curves=profile.curves,
        )  # fmt: skip
        _, self._batch = job.best(len(placement), replicas)


def _fixed(job: TraceJob) -> BatchLimits:
    """Return the limits of a job whose batch is the one that its user asked for."""
    limits = job.truth.limits
    batch = max(min(job.asked_batch or limits.initial, limits.maximum), limits.least)
    return BatchLimits(
        initial=limits.initial, minimum=batch, maximum=batch, local_min=1,
        local_max=limits.local_max, accumulation=True,
    )  # fmt: skip


def _replicas(job: TraceJob, *, fixed: bool) -> tuple[int, int]:
    most = job.truth.replicas_max
    if not fixed:
        return 1, most
    asked = max(1, min(job.asked_gpus or 1, most))
    return asked, asked
