"""Backoff as data: how long to wait before each further try. Sleeps nowhere."""

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
