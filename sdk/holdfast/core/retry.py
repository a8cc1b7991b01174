"""Waits as data: before each further try, and as long as a peer may ask for. Sleeps nowhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

_GROWTHS_MAX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Exponential waits between tries, bounded in length and, with ``tries_max``, in number.

    ``tries_max`` counts tries, so there are ``tries_max - 1`` waits. Without it there is no end:
    what must happen is tried for ever, ever more rarely.
    """

    first_s: float
    wait_s_max: float
    factor: float = 2.0
    tries_max: int | None = None

    def wait_s(self, tries: int) -> float:
        """Return how long to wait after so many tries have failed in a row."""
        growths = min(max(tries - 1, 0), _GROWTHS_MAX)
        return min(self.first_s * self.factor**growths, self.wait_s_max)

    def __iter__(self) -> Iterator[float]:
        """Yield the wait before the second, third, … try."""
        tries = count(1) if self.tries_max is None else range(1, self.tries_max)
        return map(self.wait_s, tries)


def worth_telling(failures: int) -> bool:
    """Tell whether to tell people of this failure in a row: the 1st, 2nd, 4th, 8th and so on."""
    return failures > 0 and failures & (failures - 1) == 0


def bounded(wait_s: float, wait_s_max: float) -> float:
    """Return a wait that a peer asked for, within 0 and ``wait_s_max``; NaN asks for none."""
    if wait_s >= wait_s_max:
        return wait_s_max
    return wait_s if wait_s > 0 else 0.0
