"""How long a failed item rests, and how often people hear of it. Units: seconds."""

from __future__ import annotations

FIRST_S = 0.5
REST_S_MAX = 60.0
_DOUBLINGS_MAX = 16


def rest_s(failures: int) -> float:
    """Return how long an item rests that has failed ``failures`` times: doubling, bounded."""
    return min(REST_S_MAX, FIRST_S * 2.0 ** min(max(failures - 1, 0), _DOUBLINGS_MAX))


def worth_telling(failures: int) -> bool:
    """Tell whether this failure becomes an event: the 1st, 2nd, 4th, 8th, … do."""
    return failures > 0 and failures & (failures - 1) == 0
