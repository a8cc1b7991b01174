"""How often Python looks for cycles: seldom, in a process that remembers a lot.

Values here have none. A snapshot of 1,280 nodes makes a hundred thousand of them, and by default
Python walks all that is remembered several times meanwhile: half of what the snapshot took.
"""

from __future__ import annotations

import gc

AFTER_COUNT = 20_000
"""How many new objects there are before the young ones are looked at; Python's own is 700."""


def look_for_cycles_seldom() -> None:
    """Have this process collect cycles so often, from here on."""
    gc.set_threshold(AFTER_COUNT, *gc.get_threshold()[1:])
