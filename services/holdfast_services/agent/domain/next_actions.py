"""What the agent does next: compares its slots with what should be. Pure; changes its draft.

The order matters: fencing and freeing come first, so that what they give back can be leased and
fetched into in the same turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from holdfast.core import user_events
from holdfast.core.decision import DecisionState
from holdfast.core.ids import ShardId
from holdfast.core.inventory import HeldState, Peer
from holdfast.core.shard import Shard
from holdfast.core.slot_names import SlotName, SlotState
from holdfast_services.agent.domain import elements, making_room, slot_rules, twin_slots
from holdfast_services.agent.domain import events as ev
from holdfast_services.agent.domain.fetch_wishes import Wish, backups_of, wishes
from holdfast_services.agent.domain.restore_readiness import verified
from holdfast_services.agent.domain.state import (
    AGENT,
    Session,
    Slot,
    State,
    Tries,
    Work,
)
from holdfast_services.agent.domain.wanted_parts import WantedParts

FETCHES_COUNT_MAX = 4
MAKES_COUNT_MAX = 1
"""Elements at a time: each is fed by all members of its stripe at once."""
ASKS_COUNT_MAX = 4
SAID_COUNT_MAX = 1024
REPLACED_COUNT_MAX = 64


def decide(state: State) -> list[ev.Action]:
    """Return the actions that are due now; the draft marks them as under way."""
    _fence(state)
    return [
        *_free(state),
        *_reclaim(state),
        *_seal(state),
        *_verify(state),
        *_restore_progress(state),
        *_fetch(state),
        *_lease(state),
        *_lend(state),
        *_replicate(state),
        *_make_elements(state),
    ]


def say(state: State, kind: str, severity: str, message: str, *, job: str = "") -> list[ev.Action]:
    """Tell people once; the same message is not repeated until many others were told."""
    if message in state.said:
        return []
    known = state.said if len(state.said) < SAID_COUNT_MAX else frozenset()
    state.said = known | {message}
    return tell(kind, severity, message, state, job=job)


def tell(kind: str, severity: str, message: str, state: State, *, job: str = "") -> list[ev.Action]:
    """Tell people, each time that it is called."""
    event = user_events.Event(
        kind=kind, severity=severity, message=message, job=job, context={"node": state.me.node}
    )
    return [ev.Emit(event)]


def _fence(state: State) -> None:
    """A session of an older attempt than the newest known of its run is fenced."""
    newest = {view.run: view.generation for view in (state.view.runs if state.view else ())}
    for session in state.sessions.values():
        newest[session.run] = max(newest.get(session.run, 0), session.generation)
    for key, session in state.sessions.items():
        if not session.fenced and session.generation < newest[session.run]:
            state.sessions[key] = replace(session, fenced=True)


def _free(state: State) -> list[ev.Action]:
    actions: list[ev.Action] = []
    copies = state.copies()
    for slot in list(state.slots.values()):
        if slot.element and slot.work is Work.NONE and elements.freeable(state, slot):
            actions.append(_give_back(state, slot))
        if slot.content is None or slot.work is not Work.NONE:
            continue
        if slot_rules.freeable(state, slot) or _second_copy(copies, slot):
            actions.append(_give_back(state, slot))
    actions += [_give_back(state, slot) for slot in twin_slots.outlived(state)]
    actions += _replace(state)
    actions += _drop(state, _parts_that_served(state))
    live = {slot.content.shard.id for slot in state.slots.values() if slot.content}
    for key in [key for key in state.asks if key[0] not in live]:
        del state.asks[key]
    return actions


def _parts_that_served(state: State) -> list[Slot]:
    partial = [slot for slot in state.slots.values() if slot.partial is not None]
    wanted = WantedParts(state) if partial else None
    return [slot for slot in partial if wanted and not wanted.serve(state, slot)]


def _give_back(state: State, slot: Slot) -> ev.Action:
    freed = slot.freed()
    state.slots[slot.name.slot] = freed
    return ev.RenameSlot(slot.name, freed.name)


def _replace(state: State) -> list[ev.Action]:
    """While metadata is out: let ranks that want a slot go on with that of an uncommitted step.

    Copies held for peers follow: their owners have no more slots than copies are kept here.
    """
    actions: list[ev.Action] = []
    for key, session in list(state.sessions.items()):
        slot = slot_rules.gives_way(state, session)
        if slot is None or slot.content is None:
            continue
        steps = (*session.replaced, int(slot.content.shard.id.step))[-REPLACED_COUNT_MAX:]
        state.sessions[key] = replace(session, replaced=steps)
        state.replaced_count += 1
        actions.append(_give_back(state, slot))
    good = (s.content for s in state.slots.values() if s.content and state.lost)
    for shard in [c.shard.id for c in good if c.held is HeldState.SEALED]:
        actions += [_give_back(state, slot) for slot in slot_rules.surplus_copies(state, shard)]
    return actions


def _second_copy(copies: Mapping[ShardId, Slot], slot: Slot) -> bool:
    """Tell whether a good copy of the same shard lies in another slot (saved or fetched twice)."""
    assert slot.content is not None, "only sealed slots are asked about"
    sealed = slot.content.held is HeldState.SEALED
    return sealed and copies.get(slot.content.shard.id) is not slot


def _reclaim(state: State) -> list[ev.Action]:
    actions: list[ev.Action] = []
    for key, slot in state.slots.items():
        if slot.name.state is not SlotState.WRITING or slot.work is not Work.NONE or slot.blocked:
            continue
        if slot_rules.leased(state, slot) or twin_slots.is_lent(state, slot):
            continue
        lent_to = state.sessions.get(slot.twin.session) if slot.twin else None
        session = slot_rules.holder(state, slot) or lent_to
        state.slots[key] = replace(slot, work=Work.RECLAIMING)
        # A held lock is a right to go on, of a session we do not know (we were restarted) and of
        # one that may still copy by its last plan; not of one that was fenced or has ended.
        taken = session is not None and not session.active
        actions.append(ev.ReclaimSlot(slot.name, replace=taken))
    return actions


def _seal(state: State) -> list[ev.Action]:
    actions: list[ev.Action] = []
    for key, slot in state.slots.items():
        idle = slot.work is Work.NONE and not slot.blocked and slot.twin is None
        if slot.name.state is SlotState.CLOSED and idle:
            session = slot_rules.holder(state, slot)
            expected = (session.run, session.generation, session.spec.rank) if session else None
            state.slots[key] = replace(slot, work=Work.SEALING)
            actions.append(ev.SealSlot(slot.name, expected))
    return actions


def _verify(state: State) -> list[ev.Action]:
    """Hash held shards again, once per decision that a rank here still has to load."""
    actions: list[ev.Action] = []
    for session in state.sessions.values():
        decision = slot_rules.decision_for(state, session)
        if decision is None or not slot_rules.restoring(decision) or not _waits(session):
            continue
        copies = state.copies()
        for shard in decision.shards:
            slot = copies.get(shard.id)
            if slot is None or slot.content is None or slot.work is not Work.NONE or slot.blocked:
                continue
            if slot.content.verified_decision != decision.number:
                state.slots[slot.name.slot] = replace(slot, work=Work.VERIFYING)
                actions.append(ev.VerifySlot(slot.name, slot.content, decision.number))
    return actions


def _waits(session: Session) -> bool:
    return session.active and not session.loaded


def _restore_progress(state: State) -> list[ev.Action]:
    """Note when a decision was proposed and when all of it was here; hold what is to be read."""
    for key, session in list(state.sessions.items()):
        decision = slot_rules.decision_for(state, session)
        if decision is None or not _waits(session):
            continue
        if decision.state is DecisionState.PENDING or decision.state is DecisionState.LOST:
            continue
        proposed_s = session.proposed_s if session.proposed_s is not None else state.now_s
        session = replace(session, proposed_s=proposed_s)  # noqa: PLW2901 - the draft of it
        slots = verified(state, session, decision) if slot_rules.restoring(decision) else None
        if slots is not None:
            confirmed = decision.state is DecisionState.CONFIRMED
            shards = frozenset(slot.loadable.shard.id for slot in slots if slot.loadable)
            session = replace(  # noqa: PLW2901
                session,
                ready_decision=decision.number,
                ready_s=state.now_s if session.ready_s is None else session.ready_s,
                reading=shards if confirmed else frozenset(),
            )
        elif session.ready_decision:
            session = replace(session, ready_decision=0)  # noqa: PLW2901
        state.sessions[key] = session
    return []


def _fetch(state: State) -> list[ev.Action]:
    actions: list[ev.Action] = []
    running = sum(1 for tries in state.fetches.values() if tries.under_way)
    wished: set[ShardId] = set()
    found = wishes(state)
    actions += _pace(state, found)
    for wish in found:
        shard = wish.shard
        wished.add(shard.id)
        tries = state.fetches.get(shard.id, Tries())
        if tries.under_way or tries.next_s > state.now_s or running >= FETCHES_COUNT_MAX:
            continue
        twin = twin_slots.filled(state, shard) if wish.asked else None
        slot, made = _filled(state, twin) if twin else _place_for(state, wish)
        actions += made
        if slot is None:
            continue
        running += 1
        state.fetches[shard.id] = replace(tries, under_way=True)
        actions += _begin_fetch(state, slot, wish, filled=twin is not None)
    for key, tries in list(state.fetches.items()):
        if key not in wished and not tries.under_way:
            del state.fetches[key]
    return actions


def _filled(state: State, twin: Slot) -> tuple[Slot, list[ev.Action]]:
    """Return a slot that a rank has filled in for a copy, as one to fetch the rest into."""
    given = _give_back(state, twin)
    return state.slots[twin.name.slot], [given]


def _place_for(state: State, wish: Wish) -> tuple[Slot | None, list[ev.Action]]:
    """Return the slot that a copy is fetched into, or None, and what makes room."""
    if wish.asked and twin_slots.is_awaited(state, wish.shard.id):
        return None, []
    made = _make_way(state, wish.shard) if wish.asked else []
    if wish.restore and not wish.asked:
        _take_back(state, wish.length_bytes)
    if wish.parts:
        slot, more = _partial_slot(state, wish)
    else:
        slot, more = _slot_for(state, wish.length_bytes, wish.shard.plan_hash)
    return slot, [*made, *more]


def _pace(state: State, wished: Sequence[Wish]) -> list[ev.Action]:
    """Lift the rate for copies while a restore waits for a fetch.

    For all of them: it may wait for one that began as a copy, or for the room that another takes.
    """
    hurried = any(wish.restore for wish in wished)
    if hurried == state.hurried:
        return []
    state.hurried = hurried
    return [ev.PaceFetches(limited=not hurried)]


def _make_way(state: State, shard: Shard) -> list[ev.Action]:
    """Give back a copy that this one replaces if there is no other room for it."""
    length = shard.length_bytes
    if making_room.free_slot(state, length) or making_room.to_drop(state, length) is not None:
        return []
    passed = (s for s in slot_rules.passed_copies(state, shard.id) if s.length_bytes == length)
    return [_give_back(state, slot) for slot in islice(passed, 1)]


def _take_back(state: State, length_bytes: int) -> None:
    """End an idle lease for a restore that has no room: its rank begins after it, not before."""
    coming = any(
        slot.work in (Work.CREATING, Work.RECLAIMING)
        or (making_room.is_taken_back(slot) and not slot.blocked)
        for slot in state.slots.values()
    )
    free = making_room.free_slot(state, length_bytes) or making_room.dispensable(state)
    free = free or twin_slots.gives_way(state)
    if coming or free or making_room.to_drop(state, length_bytes) is not None:
        return
    slot = making_room.idle_lease(state)
    if slot is not None:
        # Reclaimed once its rank has let go of the lock: it hears that the lease is over.
        state.slots[slot.name.slot] = replace(slot, plan_hash="")


def _partial_slot(state: State, wish: Wish) -> tuple[Slot | None, list[ev.Action]]:
    """Return a new partial slot, or None if there is no room for it, and what makes room."""
    length_bytes = wish.length_bytes
    made: list[ev.Action] = []
    while (drop := making_room.to_drop(state, length_bytes)) is None:
        spare = making_room.dispensable(state) or twin_slots.gives_way(state)
        if spare is None:
            return None, [*made, *_say_full(state, length_bytes)]
        if not (given := _give_way(state, spare)):
            return None, made
        made += given
    made += _drop(state, drop)
    name = _new_name(state, SlotState.PARTIAL)
    state.slots[name.slot] = slot = Slot(name=name, length_bytes=length_bytes, parts=wish.parts)
    return slot, made


def _give_way(state: State, slot: Slot) -> list[ev.Action]:
    """Give a slot back; nothing yet if a rank may be filling it in: it is told to let go."""
    if slot.twin is None or slot.name.state is SlotState.CLOSED:
        return [_give_back(state, slot)]
    state.slots[slot.name.slot] = replace(slot, twin=replace(slot.twin, given_up=True))
    return []


def _begin_fetch(state: State, slot: Slot, wish: Wish, *, filled: bool) -> list[ev.Action]:
    if wish.parts:
        begun = replace(slot, work=Work.FETCHING, session=AGENT, filling=wish.shard.id)
        state.slots[slot.name.slot] = begun
        fetch = ev.Fetch(slot.name, wish.shard, wish.sources, wish.owner, parts=wish.parts)
        return [fetch]
    opened = slot.name.to(SlotState.WRITING)
    state.slots[slot.name.slot] = replace(
        slot, name=opened, work=Work.FETCHING, session=AGENT, filling=wish.shard.id
    )
    fetch = ev.Fetch(
        opened, wish.shard, wish.sources, wish.owner, asked=wish.asked, last=slot.last,
        filled=filled,
    )  # fmt: skip
    return [ev.RenameSlot(slot.name, opened), fetch]


def _slot_for(
    state: State, length_bytes: int, plan_hash: str = "", session: str = ""
) -> tuple[Slot | None, list[ev.Action]]:
    """Return a free slot of this length, or None and what makes one.

    One that held a segment of the same plan before comes first: much of it may not have changed.
    Else one that was made for the same rank, whose memory is near it.
    """
    slot = making_room.free_slot(state, length_bytes, plan_hash, session)
    if slot is not None:
        return slot, []
    waiting = any(
        s.work is Work.CREATING and s.length_bytes == length_bytes for s in state.slots.values()
    )
    if waiting or state.creating_after_s > state.now_s:
        return None, []
    drop = making_room.to_drop(state, length_bytes)
    spare = making_room.dispensable(state) or twin_slots.gives_way(state)
    if drop is None and spare is not None:
        if not (given := _give_way(state, spare)):
            return None, []
        slot, made = _slot_for(state, length_bytes, plan_hash, session)
        return slot, [*given, *made]
    if drop is None:
        return None, _say_full(state, length_bytes)
    actions = _drop(state, drop)
    name = _new_name(state, SlotState.FREE)
    made_for = session if state.nodes_of_memory > 1 else ""
    state.slots[name.slot] = Slot(
        name=name, length_bytes=length_bytes, work=Work.CREATING, made_for=made_for
    )
    return None, [*actions, ev.CreateSlot(name, length_bytes, session)]


def _drop(state: State, slots: Iterable[Slot]) -> list[ev.Action]:
    actions: list[ev.Action] = []
    for slot in slots:
        del state.slots[slot.name.slot]
        actions.append(ev.DropSlot(slot.name))
    return actions


def _new_name(state: State, kind: SlotState) -> SlotName:
    name = SlotName(f"s{state.next_slot}", 0, kind)
    state.next_slot += 1
    return name


def _say_full(state: State, length_bytes: int) -> list[ev.Action]:
    message = (
        f"no room for a slot of {length_bytes} bytes: {state.used_bytes} of "
        f"{state.budget_bytes} bytes of budget are in use"
    )
    return say(state, "budget_exhausted", "warning", message)


def _lease(state: State) -> list[ev.Action]:
    actions: list[ev.Action] = []
    asking = [s for s in state.sessions.values() if s.active and s.reservation is not None]
    # What was taken back for a restore is not leased again before it has its room.
    if not all(session.loaded for session in asking) and _starved(state):
        asking = [session for session in asking if session.loaded]
    lacking = {s.id: count for s in asking if (count := slot_rules.quota_left(state, s))}
    while lacking:
        session = state.sessions[making_room.first_of(state, lacking)]
        asked = session.reservation
        assert asked is not None, "who has not reserved asks for nothing"
        slot, made = _slot_for(state, asked.length_bytes, asked.plan_hash, session.id)
        actions += made
        lacking[session.id] -= 1
        if slot is None or not lacking[session.id]:
            del lacking[session.id]
        if slot is None:
            continue
        opened = slot.name.to(SlotState.WRITING)
        state.slots[slot.name.slot] = replace(
            slot, name=opened, session=session.id, plan_hash=asked.plan_hash
        )
        actions.append(ev.RenameSlot(slot.name, opened))
    return actions


def _lend(state: State) -> list[ev.Action]:
    """Lend slots that copies will be asked for to the ranks here that have most of their bytes."""
    actions: list[ev.Action] = []
    for slot, twin in twin_slots.lend(state):
        opened = slot.name.to(SlotState.WRITING)
        state.slots[slot.name.slot] = replace(slot, name=opened, twin=twin)
        actions.append(ev.RenameSlot(slot.name, opened))
    return actions


def _starved(state: State) -> bool:
    """Tell whether a restore waits for a copy that nobody fetches yet."""
    return any(
        wish.restore and not state.fetches.get(wish.shard.id, Tries()).under_way
        for wish in wishes(state)
    )


def _replicate(state: State) -> list[ev.Action]:
    """Ask backups to hold this node's own shards, newest first."""
    actions: list[ev.Action] = []
    running = sum(1 for ask in state.asks.values() if ask.under_way)
    for shard, peers in _copies(state):
        for peer in peers:
            key = (shard.id, peer.node, peer.endpoints)
            ask = state.asks.get(key, Tries())
            if running >= ASKS_COUNT_MAX or ask.done or ask.under_way or ask.next_s > state.now_s:
                continue
            running += 1
            state.asks[key] = replace(ask, under_way=True)
            actions.append(ev.AskHold(shard, peer))
    return actions


def _make_elements(state: State) -> list[ev.Action]:
    """Begin with the elements that this node should make; what a restore waits for comes first."""
    actions: list[ev.Action] = []
    wished = elements.wishes(state)
    running = sum(1 for tries in state.makes.values() if tries.under_way)
    waits = bool(wished) and _starved(state)
    for wish in wished:
        key = wish.element.key
        tries = state.makes.get(key, Tries())
        if waits or tries.under_way or tries.next_s > state.now_s or running >= MAKES_COUNT_MAX:
            continue
        slot, made = _slot_for(state, wish.element.stripe.length_bytes)
        actions += made
        if slot is None:
            continue
        running += 1
        state.makes[key] = replace(tries, under_way=True)
        opened = slot.name.to(SlotState.WRITING)
        state.slots[slot.name.slot] = replace(slot, name=opened, work=Work.MAKING, session=AGENT)
        actions.append(ev.RenameSlot(slot.name, opened))
        actions.append(ev.MakeElement(opened, wish.element, wish.members))
    named = {wish.element.key for wish in wished}
    for key in [key for key, tries in state.makes.items() if not tries.under_way]:
        if key not in named:
            del state.makes[key]
    return actions


def _copies(state: State) -> list[tuple[Shard, tuple[Peer, ...]]]:
    good = [c for s in state.slots.values() if (c := s.content) and c.held is HeldState.SEALED]
    own = [content.shard for content in good if content.owner == state.me.node]
    found: list[tuple[Shard, tuple[Peer, ...]]] = []
    for view in state.view.runs if state.view else ():
        kept = [s for s in own if s.id.run == view.run and not slot_rules.outdated(view, s.id)]
        if kept:
            peers = backups_of(state, view)
            found += [(shard, peers) for shard in kept]
    return sorted(found, key=lambda item: item[0].id, reverse=True)
