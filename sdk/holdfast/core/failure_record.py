"""How often the attempts of a run have failed, as the catalogue tells a rank. Pure; seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass

FAILURES_COUNT_MAX = 1 << 31
TRAINED_S_MAX = 1e10


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRecord:
    """What became of the attempts of a run before this one.

    ``failures_count`` of them had begun to train and ended otherwise than in order: what they had
    done since their last save was lost. All of them together trained for ``trained_s``.
    """

    failures_count: int = 0
    trained_s: float = 0.0

    def mtbf_s(self, assumed_s: float, training_s: float = 0.0) -> float:
        """Return the mean time between failures, from what was seen and what was assumed before.

        The assumption counts as one failure in ``assumed_s`` of training: it is all there is at
        first, and the more was seen, the less it weighs. A job that has never failed will.

        Args:
            assumed_s: Mean time between failures, before anything was seen; above 0.
            training_s: How long the present attempt has trained without one.
        """
        seen_s = _within(self.trained_s, TRAINED_S_MAX) + _within(training_s, TRAINED_S_MAX)
        return (assumed_s + seen_s) / (1 + _within(self.failures_count, FAILURES_COUNT_MAX))


def _within(value: float, most: float) -> float:
    """Return ``value`` within 0 and ``most``: what a peer says may be anything."""
    return min(max(value, 0), most) if math.isfinite(value) else 0
