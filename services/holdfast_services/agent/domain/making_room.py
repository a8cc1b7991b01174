"""How room is made for a new slot: what is free, what may be dropped, given back or refused.

Pure questions, like ``rules``. Source: architecture 4.5, 4.7, P8; ADR 0024.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.core.byte_sizes import format_bytes
from holdfast.core.ids import ShardId
from holdfast.core.inventory import HeldState
from holdfast.core.node_view import RunView, WantReason
from holdfast.core.shard import Shard
from holdfast.core.slot_names import SlotState
from holdfast.errors import ExhaustedError, PreconditionError
from holdfast_services.agent.domain import elements, slot_rules, twin_slots
from holdfast_services.agent.domain.state import AGENT, Session, Slot, State, Work


def room_bytes(state: State) -> int:
    """Return what more fits, at least 0, beside all that is held, leased, or will be.

    Free slots are dropped for it, and nothing else. Copies that are on their way count as room
    until they are here: metadata, which wants them, takes them off.
    """
    wants = state.view.wants if state.view else ()
    repairs = {want.shard.id for want in wants if want.reason is WantReason.REPAIR}
    coming = sum(slot.length_bytes for slot in state.slots.values() if slot.filling in repairs)
    free = sum(slot.length_bytes for slot in state.slots.values() if slot.idle_free)
    wanted = sum(
        session.reservation.length_bytes * slot_rules.quota_left(state, session)
        for session in state.sessions.values()
        if session.active and session.reservation is not None
    )
    return max(state.budget_bytes - state.used_bytes + free + coming - wanted, 0)


def to_drop(state: State, length_bytes: int) -> tuple[Slot, ...] | None:
    """Free slots to drop so that ``length_bytes`` more fit, longest first; None: no way.

    Who can use a free slot as it is asks for that first.
    """
    over = state.used_bytes + length_bytes - state.budget_bytes
    spare = (slot for slot in state.slots.values() if slot.idle_free)
    drop: list[Slot] = []
    for slot in sorted(spare, key=lambda s: s.length_bytes, reverse=True):
        if over <= 0:
            break
        drop.append(slot)
        over -= slot.length_bytes
    return tuple(drop) if over <= 0 else None


def free_slot(
    state: State, length_bytes: int, plan_hash: str = "", session: str = ""
) -> Slot | None:
    """A free slot of exactly this length; one that held a segment of this plan, if there is.

    Else one that was made for the rank of ``session``, or for none, before others.
    """

    def worth(slot: Slot) -> tuple[bool, bool, bool]:
        alike = slot.last is not None and slot.last.shard.plan_hash == plan_hash
        return alike, bool(session) and slot.made_for == session, not slot.made_for

    free = [s for s in state.slots.values() if s.idle_free and s.length_bytes == length_bytes]
    return max(free, key=worth, default=None)


def first_of(state: State, lacking: Mapping[str, int]) -> str:
    """Return the session that is leased a slot next, of those that lack some.

    In turn, who lacks most first: making a slot may take seconds, and each rank needs one. But who
    has one made for it takes that, before anybody else does.
    """
    made_for = {slot.made_for for slot in state.slots.values() if slot.idle_free}
    return max(lacking, key=lambda session: (session in made_for, lacking[session]))


def check_holdable(state: State, shard: Shard) -> None:
    """Refuse to hold a copy that no restore will need, or that has no room.

    Raises:
        PreconditionError: its checkpoint is abandoned, superseded or older than what is kept.
        ExhaustedError: the budget has no room for it now.
    """
    view = state.run(shard.id.run)
    if view is not None and slot_rules.outdated(view, shard.id):
        raise PreconditionError(f"shard {shard.id.key} is no longer wanted", node=state.me.node)
    length = shard.length_bytes
    if any(s.length_bytes == length for s in slot_rules.passed_copies(state, shard.id)):
        return
    coming = sum(slot_rules.is_of_rank(hold, shard.id) for hold in state.holds if hold != shard.id)
    held_max = slot_rules.steps_held(view)
    if _kept_copies(state, view, shard.id) + coming >= held_max:
        # More would take the room that the sum of P8 leaves for a restore, which would then wait
        # for what only it can let go.
        raise ExhaustedError(
            f"{held_max} steps of rank {shard.id.rank} are held here, and none may go yet",
            node=state.me.node,
        )
    room = free_slot(state, length) or dispensable(state) or twin_slots.gives_way(state)
    if not room and to_drop(state, length) is None:
        raise ExhaustedError(
            f"no room for a copy of {format_bytes(length)}: {format_bytes(state.used_bytes)} of "
            f"{format_bytes(state.budget_bytes)} are in use",
            node=state.me.node,
        )


def _kept_copies(state: State, view: RunView | None, shard: ShardId) -> int:
    """Return how many steps of a peer's rank must stay here, beside those that drain.

    One less if metadata is out and does not know that a commit was heard of here: its owner has a
    slot more then too, in what budget is left (``slot_rules.quota_left``). The ranks here
    come first.
    """
    pinned, drained = (view.pinned, view.drained) if view else ((), ())
    spared = state.view.spares if state.view and not state.lost else ()
    held = {
        key: slot
        for key, slot in slot_rules.copies_of_rank(state, shard)
        if slot.content is not None and slot.content.held is HeldState.SEALED
    }
    more = bool(state.lost) and any(slot_rules.unheard(state, slot) for slot in held.values())
    more = more and _is_left(state, max(slot.length_bytes for slot in held.values()))
    beside = {*drained, *spared}
    return sum(key.checkpoint not in pinned and key not in beside for key in held) - more


def _is_left(state: State, length_bytes: int) -> bool:
    """Tell whether that many bytes are left beside the slot that each rank here goes on with."""
    free = sum(slot.length_bytes for slot in state.slots.values() if slot.idle_free)
    wanted = sum(
        session.reservation.length_bytes
        for session in state.sessions.values()
        if session.active and session.reservation is not None and not _goes_on(state, session)
    )
    return state.used_bytes - free + wanted + length_bytes <= state.budget_bytes


def _goes_on(state: State, session: Session) -> bool:
    """Tell whether a rank has a slot to save into, or one that gives way to its next step."""
    return any(
        slot.session == session.id
        or (
            slot.content is not None
            and slot.content.owner == state.me.node
            and slot_rules.is_of(session, slot.content.shard.id)
            and slot_rules.replaceable(state, slot)
        )
        for slot in state.slots.values()
    )


def dispensable(state: State) -> Slot | None:
    """Return a slot that may go when room is wanted: its bytes are bad, or others keep copies.

    That they do is what metadata said last, so while it is out nothing is spare.
    """
    reading = frozenset().union(*(session.reading for session in state.sessions.values()))
    there: dict[ShardId, Slot] = {}
    for slot in state.slots.values():
        if slot.content is None or slot.work is not Work.NONE:
            continue
        if slot.content.shard.id in reading:
            continue
        if slot.content.held is HeldState.QUARANTINED:
            return slot
        there[slot.content.shard.id] = slot
    spared = state.view.spares if state.view and not state.lost else ()
    copy = next((there[shard] for shard in spared if shard in there), None)
    return copy or elements.spare(state)


def is_taken_back(slot: Slot) -> bool:
    """Tell whether a lease is over though nothing was written; its rank may still hold the lock."""
    leased = slot.name.state is SlotState.WRITING and slot.session not in ("", AGENT)
    return leased and not slot.plan_hash


def idle_lease(state: State) -> Slot | None:
    """Return a leased slot without any write: that of a rank which has not begun."""
    return next((slot for slot in state.slots.values() if _is_idle_lease(state, slot)), None)


def _is_idle_lease(state: State, slot: Slot) -> bool:
    session = slot_rules.holder(state, slot)
    written = slot.name.state is not SlotState.WRITING or slot.work is not Work.NONE
    idle = session is not None and not session.loaded and not written
    return idle and not is_taken_back(slot)
