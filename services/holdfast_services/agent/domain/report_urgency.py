"""Whether metadata must hear of this node at once, or with the next report. Pure."""

from __future__ import annotations

from dataclasses import replace

from holdfast.core.inventory import Inventory
from holdfast.core.node_view import NodeView


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


def asks_to_report(before: NodeView | None, now: NodeView | None) -> bool:
    """Tell whether a view asks for a report that the one before has not asked for."""
    known = before.awaited_by if before else ()
    return now is not None and not set(known).issuperset(now.awaited_by)
