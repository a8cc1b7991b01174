"""Which calls of ``step`` and ``zero_grad`` act where an update has several micro-batches.

A script calls both for each micro-batch, in whatever order it likes; ``step`` acts for the last one
alone, and ``zero_grad`` not while gradients of earlier ones are kept. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.elastic.running import Running


@dataclass(slots=True)
class UpdateGate:
    """What was done last: an update's first forward, the last one, a step that did not act, an end.

    Numbers of updates, with the index of the micro-batch.
    """

    forward_at: tuple[int, int] = (0, 0)
    last_at: tuple[int, int] = (0, -1)
    passed_at: tuple[int, int] = (0, 0)
    over: int = 0

    def forward(self, running: Running | None) -> bool:
        """Note that the model sees the micro-batch; tell whether for the first time."""
        if running is None:
            return True
        at = running.number, running.micro.index
        if self.forward_at[0] != running.number:
            self.forward_at = at
        before, self.last_at = self.last_at, at
        return before != at

    def reduced(self, running: Running | None) -> None:
        """Note that the gradients of the whole update are there."""
        if running is not None and running.micro.last:
            self.over = running.number

    def steps(self, running: Running | None) -> bool:
        """Tell whether a step of an optimizer acts."""
        if running is None:
            return True
        if running.micro.last:
            self.over = running.number
            return True
        self.passed_at = running.number, running.micro.index
        return False

    def zeroes(self, running: Running | None) -> bool:
        """Tell whether gradients may be set to zero: none of this update are there, or all were."""
        if running is None or self.over == running.number:
            return True
        at = running.number, running.micro.index
        number, index = self.forward_at
        earlier = number == running.number and index < running.micro.index
        return not earlier and self.passed_at != at
