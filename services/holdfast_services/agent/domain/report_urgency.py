"""Whether metadata must hear of a change at once, or with the next report. Pure."""

from __future__ import annotations

from dataclasses import replace

from holdfast.core.inventory import Inventory


def pressing(before: Inventory | None, now: Inventory) -> bool:
    """Tell whether the catalogue should hear of a change at once.

    The progress of training can wait for the next report, and so can that a slot was freed:
    nothing is freed but by the catalogue's own word.
    """
    if before is None:
        return True
    if now.shards != before.shards and set(now.shards) - set(before.shards):
        return True
    if set(now.elements) - set(before.elements):
        return True
    kept = replace(now, shards=before.shards, elements=before.elements)
    return kept.lasting() != before.lasting()
