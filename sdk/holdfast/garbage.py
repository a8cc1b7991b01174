"""Python's search for garbage, put off where many objects are made and none is garbage."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

FROZEN_BY_PYTHON_MAX = 1000
"""Python 3.12 begins with some hundred objects frozen; a script that freezes freezes thousands."""

_frozen_counts: list[int] = []
"""How many objects a script had frozen, when that was first seen; empty: none yet."""


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Look for no garbage meanwhile; also a decorator. Results are the same, only sooner.

    While many headers are parsed the searches take longer than the parsing. What was made meanwhile
    is not searched right afterwards either: it counts as old. Of several threads whoever stopped
    the search resumes it.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if not _has_frozen():  # what a script has frozen stays frozen
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def _has_frozen() -> bool:
    """Tell whether a script has frozen objects, or had: they are counted one by one, so only once.

    Where there are none that takes no time, so it is asked each time.
    """
    if not _frozen_counts and (count := gc.get_freeze_count()) > FROZEN_BY_PYTHON_MAX:
        _frozen_counts.append(count)
    return bool(_frozen_counts)
