"""Elements of parity here: which should be made, from whom, and which may go. Pure questions."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.sources import Rebuilt
from holdfast.core.stripes import Element
from holdfast_services.agent.domain import slot_rules
from holdfast_services.agent.domain.state import Rebuilding, Slot, State, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementWish:
    """An element that should be made here, and from what."""

    element: Element
    members: Rebuilding


def wishes(state: State) -> list[ElementWish]:
    """Return the elements that should and can be made: not here, all members with somebody."""
    wants = state.view.elements if state.view else ()
    there = state.elements() if wants else {}
    found = []
    for want in wants:
        if want.element.key in there:
            continue
        members = state.rebuilding(Rebuilt(want.element.stripe, want.pieces))
        if members is not None:
            found.append(ElementWish(element=want.element, members=members))
    return found


def freeable(state: State, slot: Slot) -> bool:
    """Tell whether an element may be freed: by what the catalogue said, as its members' copies."""
    assert slot.element is not None, "only elements are asked about"
    shard = slot.element.element.stripe.members[0].id
    view = state.run(shard.run)
    return (
        view is not None
        and slot_rules.spent(state, view, shard)
        and shard.checkpoint not in view.pinned
    )


def spare(state: State) -> Slot | None:
    """Return an element that nothing needs, by the last word of metadata while it answers."""
    spared = state.view.spare_elements if state.view and not state.lost else ()
    there = state.elements() if spared else {}
    return next(
        (there[key] for key in spared if key in there and there[key].work is Work.NONE), None
    )
