"""How long steps took, by configuration: what a model of step times is fitted to.

Of each the last times are kept and their median is told, which a pause does not move. Pure; the
caller has the clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from holdfast.core.hints import POINTS_COUNT_MAX, SECONDS_MAX, SECONDS_MIN, StepPoint

TIMES_COUNT_MAX = 16
"""Of one configuration."""


def _times() -> deque[float]:
    return deque(maxlen=TIMES_COUNT_MAX)


@dataclass(slots=True)
class _Times:
    """Micro-batches without the network, and those whose gradients were averaged; how many ever."""

    compute: deque[float] = field(default_factory=_times)
    step: deque[float] = field(default_factory=_times)
    count: int = 0


class Profiles:
    """Times by (nodes, replicas, samples of a micro-batch), those that were used last."""

    def __init__(self) -> None:
        self._by: dict[tuple[int, int, int], _Times] = {}

    def add(
        self, where: tuple[int, int, int], seconds: float, *, synced: bool, sync_s: float = 0.0
    ) -> None:
        """Note one micro-batch.

        Args:
            where: Nodes, replicas, samples of a micro-batch.
            seconds: From its begin to that of the next one.
            synced: Its gradients were averaged over the ranks.
            sync_s: What of the time was a wait for that.
        """
        compute_s = seconds - sync_s if synced else seconds
        if not (compute_s >= SECONDS_MIN and seconds <= SECONDS_MAX):
            return
        times = self._by.pop(where, None) or _Times()
        self._by[where] = times  # last: the one that is used
        times.compute.append(compute_s)
        if synced:
            times.step.append(seconds)
            times.count += 1
        while len(self._by) > POINTS_COUNT_MAX:
            del self._by[next(iter(self._by))]

    def points(self) -> tuple[StepPoint, ...]:
        """Return what is known of each configuration, the one that is used last."""
        return tuple(
            StepPoint(
                nodes=nodes,
                replicas=replicas,
                local_batch=local_batch,
                compute_s=median(times.compute),
                step_s=median(times.step),
                count=times.count,
            )
            for (nodes, replicas, local_batch), times in self._by.items()
            if times.step
        )

    def state_dict(self) -> list[object]:
        """Return the times as plain data."""
        return [
            [list(where), list(times.compute), list(times.step), times.count]
            for where, times in self._by.items()
        ]

    def load_state_dict(self, state: list[Any] | tuple[Any, ...]) -> None:
        """Go on with saved times."""
        self._by = {}
        for (nodes, replicas, local_batch), compute, step, count in state:
            times = _Times(count=int(count))
            times.compute.extend(map(float, compute))
            times.step.extend(map(float, step))
            self._by[int(nodes), int(replicas), int(local_batch)] = times
