"""The one counter of plans, grants and starts, as a decision draws from it."""

from __future__ import annotations


class Numbers:
    """Gives numbers above ``last``; what it has given is kept by whoever writes the decision."""

    def __init__(self, last: int) -> None:
        self.last = last

    def next(self) -> int:
        """Return a number that nobody has."""
        self.last += 1
        return self.last
