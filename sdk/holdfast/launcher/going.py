"""A node that will be taken away: how long its launcher leaves the end of its ranks to metadata.

Metadata ends the round after a step that is saved, and what this node holds is copied elsewhere. Of
ranks that count no steps it knows nothing, and a metadata service of before knows no notices: there
a notice does what SIGTERM does.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.rounds import LaunchView, Place

HEARD_S_MAX = 5.0
"""So long a notice is not answered before ranks are told to save and to end."""
SPARE_S_MAX = 2.0
"""Less is told than is left, so that metadata ends the round first, and says what is lost."""
SPARE_PART = 0.25


@dataclass(frozen=True, slots=True)
class Going:
    """A notice that came at ``since_s`` and is over at ``over_s``, of the monotonic clock."""

    since_s: float
    over_s: float

    @property
    def told_s(self) -> float:
        """How much time metadata is told that there is."""
        left_s = self.over_s - self.since_s
        return left_s - min(SPARE_S_MAX, SPARE_PART * left_s)

    def waits_s(self, view: LaunchView, now_s: float) -> float:
        """Return how long it still waits for another view than ``view``."""
        heard = self.over_s if view.goes else min(self.over_s, self.since_s + HEARD_S_MAX)
        return heard - now_s

    def is_to_end(self, view: LaunchView, place: Place | None, now_s: float) -> bool:
        """Tell whether the launcher ends now, as after SIGTERM: ``place`` is what its ranks have.

        The round is over, or all are told to end, or nobody has answered, or no time is left.
        """
        round_over = view.place is None or place is None or view.place.nonce != place.nonce
        return round_over or view.stop or self.waits_s(view, now_s) <= 0
