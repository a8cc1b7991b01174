"""Waits as data: before each further try, and as long as a peer may ask for. Sleeps nowhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Exponential waits, bounded in length and number.

    ``tries_max`` counts tries, so there are ``tries_max - 1`` waits.
    """

    first_s: float = 0.05
    factor: float = 2.0
    wait_s_max: float = 2.0
    tries_max: int = 5

    def waits(self) -> Iterator[float]:
        """Yield the wait before the second, third, … try."""
        wait_s = self.first_s
        for _ in range(self.tries_max - 1):
            yield min(wait_s, self.wait_s_max)
            wait_s *= self.factor


def bounded(wait_s: float, wait_s_max: float) -> float:
    """Return a wait that a peer asked for, within 0 and ``wait_s_max``; NaN asks for none."""
    if wait_s >= wait_s_max:
        return wait_s_max
    return wait_s if wait_s > 0 else 0.0
