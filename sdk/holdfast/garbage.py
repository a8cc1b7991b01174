"""Python's search for garbage, put off where many objects are made and none is garbage."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


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
            if not gc.get_freeze_count():  # what a script has frozen stays frozen
                gc.freeze()
                gc.unfreeze()
            gc.enable()
