"""How training goes on: steps as the training thread counts them. Pure; times are the caller's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Progress:
    """The newest step, when it was completed, and the seconds of one as a moving average."""

    step: int = -1
    at_s: float = 0.0
    step_s: float = 0.0

    def advance(self, step: int, now_s: float) -> None:
        """Note that ``step`` has been completed at ``now_s``."""
        if self.at_s and step > self.step >= 0:
            latest = (now_s - self.at_s) / (step - self.step)
            self.step_s = latest if not self.step_s else 0.8 * self.step_s + 0.2 * latest
        self.step, self.at_s = step, now_s
