"""How training goes on: steps as the training thread counts them; times are the caller's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from holdfast import last_step
from holdfast.core.announcements import SaveReason
from holdfast.core.reports import RankReport
from holdfast.core.save_interval import Wish
from holdfast.training.hint_sources import HintSources


@dataclass(slots=True)
class Progress:
    """The newest step, when it was completed, and the seconds of one as a moving average."""

    step: int = -1
    at_s: float = 0.0
    step_s: float = 0.0
    sources: HintSources = field(default_factory=lambda: HintSources({}))

    @classmethod
    def of(cls, state: Mapping[str, object]) -> Progress:
        """Return the progress of a job with this state; nothing is done yet."""
        return cls(sources=HintSources(state))

    def advance(self, step: int, now_s: float) -> None:
        """Note that ``step`` has been completed at ``now_s``."""
        if self.at_s and step > self.step >= 0:
            latest = (now_s - self.at_s) / (step - self.step)
            self.step_s = latest if not self.step_s else 0.8 * self.step_s + 0.2 * latest
        self.step, self.at_s = step, now_s
        last_step.keep(step)

    def is_behind(self, step: int) -> bool:
        """Tell whether ``step`` counts less than was done; a repeat of the newest does not.

        A repeat of a restored step does: the first step after it is another one.
        """
        return step < self.step or (step == self.step and not self.at_s)

    def told(
        self,
        before: RankReport,
        *,
        wish: Wish,
        wants_save: SaveReason,
        stall_s: float,
        stalled_s: float,
    ) -> RankReport:
        """Return a rank's report with where it is, what saves cost it, and what it asks for.

        With what the state knows of how the job scales.

        Args:
            before: What it said last.
            wish: After what time it wishes the next save, and why.
            wants_save: Why it asks for a save now, if so.
            stall_s: What the newest save has cost.
            stalled_s: What all of them have cost.
        """
        return replace(
            before,
            step=self.step,
            step_s=self.step_s,
            save_interval_s=wish.interval_s,
            interval_reason=wish.reason,
            interval_why=wish.why,
            wants_save=wants_save,
            costs=replace(before.costs, stall_s=stall_s, stalled_s=stalled_s),
            hints=self.sources.hints(),
        )


def closed(report: RankReport) -> RankReport:
    """Return the report of a rank whose script has ended its saves in order."""
    return replace(report, closed=True)
