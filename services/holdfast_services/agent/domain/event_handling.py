"""The residency machine: ``handle(state, event) -> (state, actions)``.

An event is noted in a copy of the state, then ``decide`` compares what is with what should be
and returns what to do. ``Work`` on a slot keeps a thing from being done twice. Nothing here
waits, fails or looks at a clock; an action that fails comes back as an event.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from holdfast.core.ids import ShardId
from holdfast.core.inventory import BadSource, HeldState
from holdfast.core.needs import Needs
from holdfast.core.node_view import NodeView
from holdfast.core.reports import RankReport
from holdfast.core.retry import Waits
from holdfast.core.session import SessionUpdate
from holdfast.core.slot_names import SlotName, SlotState
from holdfast.core.sources import Memory, Source
from holdfast_services.agent.domain import copy_tiers, slot_rules, twin_slots
from holdfast_services.agent.domain import events as ev
from holdfast_services.agent.domain.falling_behind import say_behind
from holdfast_services.agent.domain.next_actions import decide, say, tell
from holdfast_services.agent.domain.state import (
    Content,
    HoldWish,
    Session,
    Slot,
    State,
    Tries,
    Work,
)

SEALED_STEPS_COUNT_MAX = 64
ABANDONED_COUNT_MAX = 64
BAD_SOURCES_COUNT_MAX = 256
SESSIONS_ENDED_COUNT_MAX = 256
CREATE_RETRY_S = 5.0
FETCH_WAITS = Waits(first_s=0.2, wait_s_max=5.0)
ASK_WAITS = Waits(first_s=0.2, wait_s_max=5.0)


def handle(
    state: State, event: ev.AgentEvent, *, now_s: float | None = None
) -> tuple[State, list[ev.Action]]:
    """Return the state after ``event`` and what to do now; ``state`` itself is not changed.

    Args:
        state: The state before.
        event: What has happened.
        now_s: When, on the agent's monotonic clock; None: as late as the event before.
    """
    draft = state.copy()
    draft.now_s = state.now_s if now_s is None else now_s
    note: Callable[[State, Any], list[ev.Action]] = _NOTES[type(event)]
    actions = note(draft, event)
    return draft, actions + decide(draft)


def _tick(state: State, event: ev.Tick) -> list[ev.Action]:
    state.now_s = event.now_s
    for key, slot in state.slots.items():
        if slot.blocked:
            state.slots[key] = replace(slot, blocked=False)
    return []


def _session_opened(state: State, event: ev.SessionOpened) -> list[ev.Action]:
    known = state.sessions.get(event.session.id)
    if known is None or (known.run, known.generation) != (
        event.session.run,
        event.session.generation,
    ):
        state.sessions[event.session.id] = replace(event.session, opened_s=state.now_s)
    else:
        state.sessions[known.id] = replace(known, live=True)
    ended = [key for key, session in state.sessions.items() if not session.live]
    for key in ended[:-SESSIONS_ENDED_COUNT_MAX]:
        del state.sessions[key]
    return []


def _reserved(state: State, event: ev.Reserved) -> list[ev.Action]:
    session = state.sessions[event.session]
    state.sessions[session.id] = replace(session, reservation=event.reservation, refused="")
    state.creating_after_s = 0.0
    return []


def _updated(state: State, event: ev.Updated) -> list[ev.Action]:
    update: SessionUpdate = event.update
    session = state.sessions[update.session]
    abandoned = tuple(dict.fromkeys((*session.abandoned, *update.abandoned)))
    needs = _named_last(session.needs, update.needs)
    # Who names something else has closed what did not suffice, and waits again.
    before, now = (said.number if said else 0 for said in (session.needs, needs))
    reads_on = before == now and not update.report.loaded
    state.sessions[session.id] = replace(
        session,
        report=_heard(session, update.report),
        wants_slot=update.wants_slot,
        needs=needs,
        abandoned=abandoned[-ABANDONED_COUNT_MAX:],
        reading=session.reading if reads_on else frozenset(),
    )
    return say_behind(state, state.sessions[session.id])


def _heard(session: Session, report: RankReport) -> RankReport:
    """Return what the rank says of itself now; what the user says of a step, rank 0 says."""
    said = report.after(session.report)
    return said if session.spec.rank == 0 else replace(said, notes=())


def _named_last(known: Needs | None, said: Needs | None) -> Needs | None:
    """Return what the rank named last: an update that comes late takes nothing back."""
    if known is None or said is None:
        return known or said
    return said if said.number >= known.number else known


def _session_ended(state: State, event: ev.SessionEnded) -> list[ev.Action]:
    session = state.sessions.get(event.session)
    if session is not None:
        state.sessions[session.id] = replace(session, live=False, reading=frozenset())
    return []


def _view_arrived(state: State, event: ev.ViewArrived) -> list[ev.Action]:
    if state.view is not None and event.view.taken < state.view.taken:
        # Reports and watches are answered side by side. An older answer may let go what a restore
        # has chosen since, from an inventory that this one does not know.
        return []
    for run in event.view.runs:
        known = state.run(run.run)
        if known is None or (known.attempt, known.nonce) != (run.attempt, run.nonce):
            _forget_decisions(state, run.run)
    back = bool(state.lost) and state.view is not None
    state.view, state.lost = event.view, ""
    _see(state, event.view)
    _forget_ended(state, event.view)
    decisions = {view.decision.number for view in event.view.runs if view.decision}
    wanted = {want.shard.id for want in event.view.wants}
    state.bad_sources = tuple(
        b for b in state.bad_sources if b.decision in decisions or b.shard in wanted
    )
    if back:
        count, state.replaced_count = state.replaced_count, 0
        replaced = f"; meanwhile {count} saves were replaced by later ones" if count else ""
        return tell("metadata_back", "info", f"metadata service answers again{replaced}", state)
    return []


def _forget_decisions(state: State, run: str) -> None:
    """Forget what was found for decisions of an attempt before.

    A catalogue that was lost gives their numbers again: nothing is verified, nobody accused yet.
    """
    state.bad_sources = tuple(bad for bad in state.bad_sources if bad.shard.run != run)
    for key, slot in state.slots.items():
        held = slot.loadable
        if held is not None and held.shard.id.run == run:
            state.slots[key] = replace(
                slot, content=_unverified(slot.content), partial=_unverified(slot.partial)
            )


def _unverified(held: Content | None) -> Content | None:
    return replace(held, verified_decision=0) if held is not None else None


def _forget_ended(state: State, view: NodeView) -> None:
    """Forget sessions that have ended once the catalogue has a newer attempt: it heard all of it.

    Each is told in every inventory, and has its job looked at with every report.
    """
    newest = {run.run: run.generation for run in view.runs}
    state.sessions = {
        key: session
        for key, session in state.sessions.items()
        if session.live or session.generation >= newest.get(session.run, 0)
    }


def _see(state: State, view: NodeView) -> None:
    """Note the newest commit of each run; views may arrive in any order, so it only grows."""
    for run in view.runs:
        keys = [c.checkpoint for c in run.committed]
        if run.run in state.seen:
            keys.append(state.seen[run.run])
        if keys:
            state.seen[run.run] = max(keys, key=lambda key: (key.generation, key.step))
    held = {slot.content.shard.id.run for slot in state.slots.values() if slot.content}
    held |= {s.element.element.stripe.checkpoint.run for s in state.slots.values() if s.element}
    known = held | {run.run for run in view.runs}
    state.seen = {run: key for run, key in state.seen.items() if run in known}


def _metadata_lost(state: State, event: ev.MetadataLost) -> list[ev.Action]:
    state.lost = event.reason
    return []


def _created(state: State, event: ev.SlotCreated) -> list[ev.Action]:
    state.slots[event.slot] = replace(state.slots[event.slot], work=Work.NONE)
    return []


def _refused(state: State, event: ev.SlotRefused) -> list[ev.Action]:
    length_bytes = state.slots.pop(event.slot).length_bytes
    for key, session in state.sessions.items():
        asked = session.reservation
        if asked and asked.length_bytes == length_bytes and slot_rules.quota_left(state, session):
            state.sessions[key] = replace(session, refused=event.reason)
    state.creating_after_s = state.now_s + CREATE_RETRY_S
    return say(state, "arena_exhausted", "error", event.reason)


def _current(state: State, name: SlotName) -> Slot | None:
    """The slot, if it still is what the event says."""
    slot = state.slots.get(name.slot)
    return slot if slot and slot.name == name else None


def _closed(state: State, event: ev.SlotClosed) -> list[ev.Action]:
    slot = state.slots.get(event.name.slot)
    written = SlotName(event.name.slot, event.name.incarnation, SlotState.WRITING)
    if slot and slot.name == written and slot.work is Work.NONE:
        state.slots[slot.name.slot] = replace(slot, name=event.name, blocked=False)
    return []


def _sealed(state: State, event: ev.SlotSealed) -> list[ev.Action]:
    slot = _current(state, event.name)
    if slot is None:
        return []
    _fill(state, slot, event.content)
    shard = event.content.shard.id
    passed: list[Slot] = []
    for session in list(state.sessions.values()):
        if (session.run, session.generation, session.spec.rank) == (
            shard.run,
            shard.generation,
            shard.rank,
        ):
            steps = (*session.sealed_steps, int(shard.step))[-SEALED_STEPS_COUNT_MAX:]
            state.sessions[session.id] = replace(session, sealed_steps=steps, sealed_s=state.now_s)
            passed += twin_slots.note_sealed(state, session.id)
    return [action for slot in passed for action in _free(state, slot)]


def _fill(state: State, slot: Slot, content: Content) -> None:
    """Note the content; a second good copy of the same shard is freed by ``decide``."""
    view = state.run(content.shard.id.run)
    number = view.decision.number if view and view.decision else 0
    if slot.parts:
        found = replace(content, verified_decision=number)
        state.slots[slot.name.slot] = replace(slot, work=Work.NONE, partial=found)
        return
    state.slots[slot.name.slot] = replace(
        slot,
        name=SlotName(slot.name.slot, slot.name.incarnation, SlotState.SEALED),
        work=Work.NONE,
        content=replace(content, verified_decision=number),
        session="",
        filling=None,
        blocked=False,
        last=None,
        hindered="",
    )


def _seal_failed(state: State, event: ev.SealFailed) -> list[ev.Action]:
    slot = _current(state, event.name)
    if slot is None:
        return []
    message = f"slot {event.name.file_name} was not sealed: {event.reason}"
    said = say(state, "seal_failed", "error", message) if event.reason else []
    return [*_free(state, slot), *said]


def _free(state: State, slot: Slot) -> list[ev.Action]:
    if slot.parts:
        del state.slots[slot.name.slot]
        return [ev.DropSlot(slot.name)]
    freed = slot.freed()
    state.slots[slot.name.slot] = freed
    return [ev.RenameSlot(slot.name, freed.name)]


def _seal_blocked(state: State, event: ev.SealBlocked) -> list[ev.Action]:
    slot = _current(state, event.name)
    if slot is None:
        return []
    message = f"slot {event.name.file_name} is not sealed yet: {event.reason}"
    said = say(state, "seal_failed", "error", message) if event.reason else []
    session = slot_rules.holder(state, slot)
    if session is not None and not session.active and not event.reason:
        # A stopped process of an older attempt holds the lock: the file is its own, we move on.
        del state.slots[slot.name.slot]
        return [ev.DropSlot(slot.name)]
    # The first text stays: how much is free meanwhile would make each of them news.
    hindered = (slot.hindered or event.reason) if event.reason else ""
    state.slots[slot.name.slot] = replace(slot, work=Work.NONE, blocked=True, hindered=hindered)
    return said


def _verified(state: State, event: ev.SlotVerified) -> list[ev.Action]:
    slot = _current(state, event.name)
    if slot is None or slot.content is None:
        return []
    held = slot.content.held if event.intact else HeldState.QUARANTINED
    content = replace(slot.content, held=held, verified_decision=event.decision)
    state.slots[slot.name.slot] = replace(slot, work=Work.NONE, content=content)
    if event.intact:
        return []
    key = content.shard.id.key
    message = f"copy of shard {key} on {state.me.node} does not match its digests; quarantined"
    return [ev.Quarantine(slot.name, content), *say(state, "quarantined", "error", message)]


def _suspected(state: State, event: ev.Suspected) -> list[ev.Action]:
    slot = _current(state, event.name)
    if slot is None or slot.content is None or slot.work is not Work.NONE:
        return []
    state.slots[slot.name.slot] = replace(slot, work=Work.VERIFYING)
    return [ev.VerifySlot(slot.name, slot.content, slot.content.verified_decision)]


def _reclaimed(state: State, event: ev.Reclaimed) -> list[ev.Action]:
    slot = _current(state, event.name)
    if slot is None:
        return []
    if event.replaced:
        del state.slots[slot.name.slot]
        return []
    state.slots[slot.name.slot] = slot.freed()
    return []


def _work_blocked(state: State, event: ev.WorkBlocked) -> list[ev.Action]:
    slot = _current(state, event.name)
    if slot is not None:
        state.slots[slot.name.slot] = replace(slot, work=Work.NONE, blocked=True)
    return []


def _hold_asked(state: State, event: ev.HoldAsked) -> list[ev.Action]:
    shard = event.shard.id
    held = state.held(shard)
    if held is not None and held.content is not None:
        state.slots[held.name.slot] = replace(
            held, content=copy_tiers.as_asked_for(state, held.content)
        )
        return []
    known = state.holds.get(shard)
    asked_s = known.asked_s if known else state.now_s
    state.holds[shard] = HoldWish(shard=event.shard, source=event.source, asked_s=asked_s)
    tries = state.fetches.get(shard)
    if tries is not None and not tries.under_way:
        del state.fetches[shard]
    return []


def _fetch_done(state: State, event: ev.FetchDone) -> list[ev.Action]:
    shard, content = event.content.shard.id, event.content
    if event.name.state is not SlotState.PARTIAL and state.holds.pop(shard, None) is not None:
        content = copy_tiers.as_asked_for(state, content)
    state.fetches.pop(shard, None)
    slot = _current(state, event.name)
    if slot is not None:
        _fill(state, slot, content)
    if event.alike_bytes is not None:
        twin_slots.learn(state, event.content.shard, event.alike_bytes)
    return _blame(state, shard, event.bad)


def _fetch_failed(state: State, event: ev.FetchFailed) -> list[ev.Action]:
    count = state.fetches.get(event.shard, Tries()).count + 1
    wait_s = FETCH_WAITS.wait_s(count)
    state.fetches[event.shard] = Tries(count=count, next_s=state.now_s + wait_s)
    if event.name.state is not SlotState.PARTIAL:
        state.holds.pop(event.shard, None)
    slot = _current(state, event.name)
    actions = _free(state, slot) if slot else []
    message = f"shard {event.shard.key} could not be fetched: {event.reason}"
    return [
        *actions,
        *_blame(state, event.shard, event.bad),
        *(say(state, "fetch_failed", "warning", message) if count == 1 else []),
        *(say(state, "object_store_failed", "warning", event.advice) if event.advice else []),
    ]


def _blame(state: State, shard: ShardId, sources: tuple[Source, ...]) -> list[ev.Action]:
    view = state.run(shard.run)
    number = view.decision.number if view and view.decision else 0
    said: list[ev.Action] = []
    for source in sources:
        bad = BadSource(shard=shard, source=source, decision=number)
        state.bad_sources = tuple(dict.fromkeys((*state.bad_sources, bad)))[-BAD_SOURCES_COUNT_MAX:]
        message = f"{source} has no good copy of shard {shard.key}"
        if isinstance(source, Memory):
            message = f"{source} served bytes of shard {shard.key} that do not match"
        said += say(state, "bad_source", "error", message)
    return said


def _hold_answered(state: State, event: ev.HoldAnswered) -> list[ev.Action]:
    key = (event.shard, event.peer.node, event.peer.endpoints)
    count = state.asks.get(key, Tries()).count + 1
    if event.coming:
        state.asks[key] = Tries(count=count - 1, next_s=state.now_s + ASK_WAITS.wait_s(1))
        return []
    if not event.refused or event.refused in _FINAL_REFUSALS:
        state.asks[key] = Tries(count=count, done=True)
        return []
    state.asks[key] = Tries(count=count, next_s=state.now_s + ASK_WAITS.wait_s(count))
    message = f"node {event.peer.node} does not hold shard {event.shard.key}: {event.message}"
    return say(state, "replication_failed", "warning", message) if count == 1 else []


def _element_made(state: State, event: ev.ElementMade) -> list[ev.Action]:
    state.makes.pop(event.held.element.key, None)
    slot = _current(state, event.name)
    if slot is not None:
        state.slots[slot.name.slot] = replace(
            slot,
            name=slot.name.to(SlotState.ELEMENT),
            work=Work.NONE,
            element=event.held,
            last=None,
            session="",
        )
    return []


def _element_failed(state: State, event: ev.ElementFailed) -> list[ev.Action]:
    count = state.makes.get(event.key, Tries()).count + 1
    state.makes[event.key] = Tries(count=count, next_s=state.now_s + FETCH_WAITS.wait_s(count))
    slot = _current(state, event.name)
    actions = _free(state, slot) if slot else []
    message = f"element {event.key} could not be made: {event.reason}"
    return [*actions, *(say(state, "element_failed", "warning", message) if count == 1 else [])]


def _element_suspected(state: State, event: ev.ElementSuspected) -> list[ev.Action]:
    slot = _current(state, event.name)
    if slot is None or slot.element is None or slot.work is not Work.NONE:
        return []
    state.slots[slot.name.slot] = replace(slot, work=Work.VERIFYING)
    return [ev.VerifyElement(slot.name, slot.element)]


def _element_verified(state: State, event: ev.ElementVerified) -> list[ev.Action]:
    """Free an element that is bad: others make it again, and no copy is ever made of it."""
    slot = _current(state, event.name)
    if slot is None or slot.element is None:
        return []
    state.slots[slot.name.slot] = replace(slot, work=Work.NONE)
    if event.intact:
        return []
    key = slot.element.element.key
    message = f"element {key} on {state.me.node} does not match its digests; it is dropped"
    return [*_free(state, slot), *say(state, "quarantined", "error", message)]


_FINAL_REFUSALS = frozenset({"precondition", "invalid_request", "unsupported_format"})

_NOTES: dict[type[Any], Callable[[State, Any], list[ev.Action]]] = {
    ev.Tick: _tick,
    ev.SessionOpened: _session_opened,
    ev.Reserved: _reserved,
    ev.Updated: _updated,
    ev.SessionEnded: _session_ended,
    ev.ViewArrived: _view_arrived,
    ev.MetadataLost: _metadata_lost,
    ev.SlotCreated: _created,
    ev.SlotRefused: _refused,
    ev.SlotClosed: _closed,
    ev.SlotSealed: _sealed,
    ev.SealFailed: _seal_failed,
    ev.SealBlocked: _seal_blocked,
    ev.SlotVerified: _verified,
    ev.Suspected: _suspected,
    ev.Reclaimed: _reclaimed,
    ev.WorkBlocked: _work_blocked,
    ev.HoldAsked: _hold_asked,
    ev.FetchDone: _fetch_done,
    ev.FetchFailed: _fetch_failed,
    ev.HoldAnswered: _hold_answered,
    ev.ElementMade: _element_made,
    ev.ElementFailed: _element_failed,
    ev.ElementSuspected: _element_suspected,
    ev.ElementVerified: _element_verified,
}
