"""Makes the state of an agent that starts from the slots that it finds in its arena.

Sealed slots are trusted to their sidecar; one without is hashed again as if just closed. Closed
ones are sealed by the machine's first turn; open ones are freed unless a writer holds the lock.
"""

from __future__ import annotations

import logging

from holdfast.core.inventory import Peer
from holdfast.core.slot_names import SlotName, SlotState
from holdfast.errors import CheckpointError
from holdfast_services.agent import element_sidecar, sealer
from holdfast_services.agent.arena import Arena
from holdfast_services.agent.domain import Slot, State
from holdfast_services.transport import ServedSegments

log = logging.getLogger(__name__)


def adopt(arena: Arena, served: ServedSegments, me: Peer) -> State:
    """Return the state that the arena's files stand for; sealed ones are served from now on."""
    state = State(me=me, budget_bytes=arena.budget_bytes)
    arena.sweep_sessions()
    # Names that could not be adopted (links, others' files) are not used either; nor are those of
    # partial slots, which are removed: a rank may have been shown one, and would read in a file
    # of that name what is not there yet.
    taken = arena.names()
    for name, length_bytes in arena.adopt():
        slot = Slot(name=name, length_bytes=length_bytes)
        if name.state is SlotState.SEALED:
            slot = _sealed(arena, slot, me.node)
        elif name.state is SlotState.ELEMENT:
            slot = _element(arena, slot)
        state.slots[name.slot] = slot
    for shard in {slot.content.shard.id for slot in state.slots.values() if slot.content}:
        held = state.held(shard)  # of two copies the one that the machine keeps
        if held is not None:
            served.put(shard.key, held.name, arena.file(held.name.slot).view)
    for key, slot in state.elements().items():
        served.put(key, slot.name, arena.file(slot.name.slot).view)
    state.next_slot = 1 + max((int(slot[1:]) for slot in taken), default=0)
    return state


def _element(arena: Arena, slot: Slot) -> Slot:
    """Return an element as its sidecar says; without one its bytes are worth nothing."""
    data = arena.read_sidecar(slot.name)
    try:
        held = element_sidecar.decode(data or b"", slot.length_bytes)
    except CheckpointError as error:
        log.warning("slot %s is no element: %s", slot.name.file_name, error)
        free = slot.name.to(SlotState.FREE)
        arena.rename(slot.name, free)
        return Slot(name=free, length_bytes=slot.length_bytes)
    return Slot(name=slot.name, length_bytes=slot.length_bytes, element=held)


def _sealed(arena: Arena, slot: Slot, node: str) -> Slot:
    content = sealer.recall(arena, slot.name, slot.length_bytes)
    if content is None:
        try:
            content = sealer.describe(arena.file(slot.name.slot).view, owner=node)
        except CheckpointError as error:
            # Nobody can say any more what this was: the bytes are worth nothing, the slot is.
            log.warning("sealed slot %s is not a segment: %s", slot.name.file_name, error)
            free = SlotName(slot.name.slot, slot.name.incarnation, SlotState.FREE)
            arena.rename(slot.name, free)
            return Slot(name=free, length_bytes=slot.length_bytes)
        sealer.note(arena, slot.name, content)
    return Slot(name=slot.name, length_bytes=slot.length_bytes, content=content)
