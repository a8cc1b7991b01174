"""How long a job would take alone on so many GPUs, with its own agent and no moves.

What a fair share would have been is read from this: the finish-time fairness of a job is its time
beside the best that it could have had alone on its share of the cluster.
"""

from __future__ import annotations

from holdfast.goodput.batches import BatchLimits
from holdfast_services.scheduler.domain.policies.facts import Allocation
from holdfast_services.scheduler.domain.policies.history import Measurements
from holdfast_services.scheduler.simulator.simulated_job import SimulatedJob
from holdfast_services.scheduler.simulator.trace import TraceJob
from holdfast_services.scheduler.simulator.truth import Truth

ROUND_S = 60.0
"""So often the batch size is chosen anew."""


def allocation(gpus: int, per_node: int) -> Allocation:
    """Return ``gpus`` on whole nodes, and a last one with the rest."""
    whole, rest = divmod(gpus, per_node)
    counts = [per_node] * whole + ([rest] if rest else [])
    return tuple((f"alone{at}", count) for at, count in enumerate(counts))


def alone_s(truth: Truth, gpus: int, per_node: int, own: Measurements | None = None) -> float:
    """Return the seconds that a job of ``truth`` takes on ``gpus``, by what it measures itself."""
    job = SimulatedJob(TraceJob(name="alone", truth=truth, submitted_s=0.0), own=own)
    job.move(allocation(gpus, per_node), 0.0, 0.0)
    now_s = 0.0
    while job.ended_s is None:
        job.advance(now_s, ROUND_S)
        now_s += ROUND_S
    return job.ended_s


class Alone:
    """Times alone, each found once. The best of a share is that of any size within it."""

    def __init__(self, per_node: int) -> None:
        self._per_node = per_node
        self._found: dict[tuple[int, int], float] = {}
        self._truths: list[Truth] = []
        """Kept, so that no other one gets the identity of one that was asked about."""

    def seconds(self, truth: Truth, gpus: int) -> float:
        """Return the time on ``gpus``."""
        key = (id(truth), gpus)
        if key not in self._found:
            self._truths.append(truth)
            self._found[key] = alone_s(truth, gpus, self._per_node)
        return self._found[key]

    def best_s(self, truth: Truth, share: int) -> float:
        """Return the least time on at most ``share`` GPUs."""
        return min(self.seconds(truth, gpus) for gpus in self._sizes(truth, share))

    def _sizes(self, truth: Truth, share: int) -> list[int]:
        """Return powers of two, in whole nodes where there are several, that the job may have."""
        limits: BatchLimits = truth.limits
        most = min(share, truth.replicas_max, limits.replicas_max)
        sizes = [1]
        while 2 * sizes[-1] <= most:
            sizes.append(2 * sizes[-1])
        return [size for size in sizes if size <= self._per_node or size % self._per_node == 0]
