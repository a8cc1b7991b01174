"""Slots that ranks of this node fill for copies of other nodes' shards: bytes need not come then.

Data-parallel ranks have the same tensors, and of each one saves it. So a rank here has most of what
a copy for a peer's rank is made of. It is lent the slot that will get the next copy, whose last
content tells it what goes where. What it fills in is a hint: the copy's digests decide, part by
part, and what is not alike is fetched. Changes its draft. Source: architecture 4.5, ADR 0060.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast.core.ids import ShardId
from holdfast.core.shard import Shard
from holdfast.core.slot_names import SlotState
from holdfast_services.agent.domain import slot_rules
from holdfast_services.agent.domain.state import HoldWish, Session, Slot, State, Twin, Work

WAIT_S_MAX = 2.0
"""How long a copy that was asked for waits for a rank here that may fill its slot in."""
SAVING_S_MAX = 10.0
"""And for one that has begun to save that step."""
UNLIKE_COUNT_MAX = 3
"""So often in turn a rank's filling may be of no use; then it is lent no more slots."""
ALIKE_PART_MIN = 0.25
"""What of a copy must have been filled in right for the filling to have been of use."""


def lend(state: State) -> list[tuple[Slot, Twin]]:
    """Return free slots that ranks here should fill for a copy that is still to be asked for."""
    if not any(_may_fill(session) for session in state.sessions.values()):
        return []
    taken = {_rank(slot.twin.of) for slot in state.slots.values() if slot.twin is not None}
    found: list[tuple[Slot, Twin]] = []
    for slot in state.slots.values():
        if not slot.idle_free or slot.last is None or slot.last.owner == state.me.node:
            continue
        of = slot.last.shard.id
        session = _filler(state, of)
        if session is None or _rank(of) in taken or _is_asked(state, of):
            continue
        if _is_next_here(state, slot.last.shard):
            taken.add(_rank(of))
            found.append((slot, Twin(of=of, session=session.id)))
    return found


def is_lent(state: State, slot: Slot) -> bool:
    """Tell whether a rank may go on filling a slot; else it is taken back under its lock."""
    twin, last = slot.twin, slot.last
    if twin is None or last is None or twin.given_up:
        return False
    session = state.sessions.get(twin.session)
    if session is None or not _may_fill(session) or not _is_next_here(state, last.shard):
        return False
    asked = _asked(state, twin.of)
    return asked is None or not _has_passed(session, int(asked.shard.id.step))


def lent_to(state: State, session: Session) -> list[Slot]:
    """Return the slots that a rank may fill now."""
    return [
        slot
        for slot in state.slots.values()
        if slot.twin is not None
        and slot.twin.session == session.id
        and slot.name.state is SlotState.WRITING
        and slot.work is Work.NONE
        and is_lent(state, slot)
    ]


def is_awaited(state: State, shard: ShardId) -> bool:
    """Tell whether a copy that was asked for waits a moment: for the slot that is to get it."""
    hold = state.holds.get(shard)
    slot = _lent(state, shard)
    if hold is None or slot is None or slot.name.state is not SlotState.WRITING:
        return False
    assert slot.twin is not None
    session = state.sessions.get(slot.twin.session)
    saves = session is not None and int(shard.step) in session.report.saving
    return state.now_s < hold.asked_s + (SAVING_S_MAX if saves else WAIT_S_MAX)


def filled(state: State, shard: Shard) -> Slot | None:
    """Return the slot that a rank has filled in for a copy of ``shard``, of this step or another.

    Which step it was does not matter: the bytes will tell.
    """
    slot = _lent(state, shard.id)
    ready = slot is not None and slot.name.state is SlotState.CLOSED and slot.work is Work.NONE
    return slot if ready and slot and slot.length_bytes == shard.length_bytes else None


def gives_way(state: State) -> Slot | None:
    """Return a slot that may go when room is wanted: one that is filled first, which is idle."""
    lent = [slot for slot in state.slots.values() if slot.twin is not None]
    lent.sort(key=lambda slot: slot.name.state is not SlotState.CLOSED)
    return next(iter(lent), None)


def outlived(state: State) -> list[Slot]:
    """Return filled slots that no copy has asked for: their rank is gone, or is steps ahead."""
    return [
        slot
        for slot in state.slots.values()
        if slot.twin is not None
        and slot.name.state is SlotState.CLOSED
        and slot.work is Work.NONE
        and not _is_asked(state, slot.twin.of)
        and not _is_active(state, slot.twin.session)
    ]


def note_sealed(state: State, session: str) -> list[Slot]:
    """Note that a rank has sealed a step; return what it had filled in for one before."""
    passed: list[Slot] = []
    for key, slot in state.slots.items():
        twin = slot.twin
        if twin is None or twin.session != session or slot.name.state is not SlotState.CLOSED:
            continue
        if twin.sealed and not _is_asked(state, twin.of):
            passed.append(slot)
        state.slots[key] = replace(slot, twin=replace(twin, sealed=True))
    return passed


def learn(state: State, shard: Shard, alike_bytes: int) -> None:
    """Note how much of a copy its filling was."""
    key = _rank(shard.id)
    if alike_bytes >= ALIKE_PART_MIN * shard.length_bytes:
        state.unlike.pop(key, None)
        return
    runs = {one.run for one in state.sessions.values()}
    state.unlike = {known: count for known, count in state.unlike.items() if known[0] in runs}
    state.unlike[key] = state.unlike.get(key, 0) + 1


def _filler(state: State, of: ShardId) -> Session | None:
    """Return which rank here is taken to have most of a peer's rank's tensors.

    That in the same place on its node: with a mesh that replicates over nodes that is the one.
    """
    if of.volume or state.unlike.get(_rank(of), 0) >= UNLIKE_COUNT_MAX:
        return None
    mates = [
        session
        for session in state.sessions.values()
        if _may_fill(session) and (session.run, session.generation) == (of.run, of.generation)
    ]
    mates.sort(key=lambda session: session.spec.rank)
    return mates[of.rank % len(mates)] if mates else None


def _may_fill(session: Session) -> bool:
    asked = session.reservation
    return session.active and session.loaded and asked is not None and asked.twins


def _is_active(state: State, session: str) -> bool:
    known = state.sessions.get(session)
    return known is not None and known.active


def _is_next_here(state: State, last: Shard) -> bool:
    """Tell whether the next step of a peer's rank is likely to be held here too, and may be."""
    held = [slot for _, slot in slot_rules.copies_of_rank(state, last.id)]
    coming = sum(
        slot.filling is not None and slot_rules.is_of_rank(slot.filling, last.id)
        for slot in state.slots.values()
    )
    alike = any(slot.content and slot.content.shard.plan_hash == last.plan_hash for slot in held)
    return alike and len(held) + coming < slot_rules.steps_held(state.run(last.id.run))


def _lent(state: State, shard: ShardId) -> Slot | None:
    return next(
        (
            slot
            for slot in state.slots.values()
            if slot.twin is not None and slot_rules.is_of_rank(slot.twin.of, shard)
        ),
        None,
    )


def _asked(state: State, of: ShardId) -> HoldWish | None:
    """Return the copy of this rank, of whatever step, that was asked for and is not here yet."""
    found = (hold for key, hold in state.holds.items() if slot_rules.is_of_rank(key, of))
    return next(found, None)


def _is_asked(state: State, of: ShardId) -> bool:
    return _asked(state, of) is not None


def _has_passed(session: Session, step: int) -> bool:
    """Tell whether a rank has saved a step: what it has not filled in by then it will not."""
    return max(session.sealed_steps, default=-1) >= step


def _rank(shard: ShardId) -> tuple[str, int, int]:
    return shard.run, int(shard.generation), int(shard.rank)
