"""What an agent tells a rank's session: its slots, its steps' levels, what to restore. Pure."""

from __future__ import annotations

from dataclasses import replace

from holdfast.core.decision import DecisionState
from holdfast.core.node_view import Committed
from holdfast.core.session import LocalSegment, RestoreView, SessionView, SlotLease, StepLevels
from holdfast.core.slot_names import SlotState
from holdfast_services.agent.domain import twin_slots
from holdfast_services.agent.domain.restore_readiness import verified
from holdfast_services.agent.domain.slot_rules import (
    decision_for,
    forgotten,
    leased,
    quota_left,
    restoring,
)
from holdfast_services.agent.domain.state import Session, Slot, State
from holdfast_services.agent.domain.wanted_parts import ranges_of

REPLACED = "replaced by a later save: metadata was out and nothing was committed"
STEPS_COUNT_MAX = 32


def session_view(state: State, session: Session) -> SessionView:
    """Return everything a rank acts on, without a version: the shell numbers views."""
    view = state.run(session.run)
    return SessionView(
        version="",
        fenced=session.fenced,
        leases=_leases(state, session),
        steps=_steps(state, session),
        announcement=view.announcement if view and not session.fenced else None,
        restore=_restore(state, session),
        degraded=state.lost,
        shortage=view.shortage if view and not session.fenced else "",
        forgotten=forgotten(state, session),
        hindrance=_hindrance(state, session),
        twins=_twins(state, session),
    )


def shows_alike(one: State, other: State) -> bool:
    """Tell whether each session sees the same in two states of one agent."""
    return (
        one.slots == other.slots
        and one.sessions == other.sessions
        and one.view == other.view
        and one.lost == other.lost
        # Of a view nothing else comes with time alone.
        and all(forgotten(one, s) == forgotten(other, s) for s in other.sessions.values())
    )


def _leases(state: State, session: Session) -> tuple[SlotLease, ...]:
    if session.fenced:
        return ()
    return tuple(
        SlotLease(
            slot=slot.name.slot,
            incarnation=slot.name.incarnation,
            length_bytes=slot.length_bytes,
            plan_hash=slot.plan_hash,
        )
        for slot in state.slots.values()
        if slot.session == session.id
        and slot.name.state is SlotState.WRITING
        and leased(state, slot)
    )


def _twins(state: State, session: Session) -> tuple[SlotLease, ...]:
    return tuple(
        SlotLease(
            slot=slot.name.slot,
            incarnation=slot.name.incarnation,
            length_bytes=slot.length_bytes,
            plan_hash=slot.last.shard.plan_hash,
        )
        for slot in twin_slots.lent_to(state, session)
        if slot.last is not None
    )


def _hindrance(state: State, session: Session) -> str:
    """Return why slots of this rank are not sealed, or not made, as far as that is known here."""
    of_rank = (slot for slot in state.slots.values() if slot.session in ("", session.id))
    unsealed = next((slot.hindered for slot in of_rank if slot.hindered), "")
    return unsealed or (session.refused if session.refused and quota_left(state, session) else "")


def _steps(state: State, session: Session) -> tuple[StepLevels, ...]:
    view = state.run(session.run)
    generation = session.generation
    abandoned = dict.fromkeys(session.replaced, REPLACED)
    abandoned |= {a.step: a.reason for a in session.abandoned}
    committed: dict[int, Committed] = {}
    if view:
        abandoned |= {a.step: a.reason for a in view.abandoned if a.generation == generation}
        committed = {
            c.checkpoint.step: c for c in view.committed if c.checkpoint.generation == generation
        }
    sealed = set(session.sealed_steps)
    steps = sorted(sealed | set(abandoned) | set(committed), reverse=True)
    # Slow and few: a step on its way to the object store is listed however many came after it.
    lasting = {step for step, c in committed.items() if c.draining or c.durable}
    shown = {*steps[:STEPS_COUNT_MAX], *lasting}
    return tuple(
        _levels(step, step in sealed, committed.get(step), abandoned.get(step))
        for step in steps
        if step in shown
    )


def _levels(
    step: int, sealed: bool, committed: Committed | None, abandoned: str | None
) -> StepLevels:
    return StepLevels(
        step=step,
        sealed=sealed or committed is not None,
        local=committed is not None,
        replicated=committed is not None and committed.replicated,
        durable=committed is not None and committed.durable,
        draining=committed is not None and committed.draining,
        abandoned=abandoned is not None,
        reason=abandoned or "",
    )


def _restore(state: State, session: Session) -> RestoreView | None:
    decision = decision_for(state, session)
    if decision is None:
        return None
    confirmed = decision.state is DecisionState.CONFIRMED
    if not restoring(decision):
        return RestoreView(decision=decision, ready=confirmed, decide_s=_decide_s(session))
    slots = verified(state, session, decision)
    return RestoreView(
        # What it loads are the segments: the list of shards is between agent and catalogue.
        decision=replace(decision, shards=()),
        ready=slots is not None,
        needs=session.needs.number if session.needs else 0,
        segments=tuple(_segment(slot) for slot in slots or ()) if confirmed else (),
        decide_s=_decide_s(session),
        fetch_s=_between(session.proposed_s, session.ready_s),
    )


def _decide_s(session: Session) -> float:
    return _between(session.opened_s, session.proposed_s)


def _between(begin_s: float | None, end_s: float | None) -> float:
    return max(end_s - begin_s, 0.0) if begin_s is not None and end_s is not None else 0.0


def _segment(slot: Slot) -> LocalSegment:
    held = slot.loadable
    assert held is not None, "verified slots hold something"
    return LocalSegment(
        shard=held.shard,
        file_name=slot.name.file_name,
        source=held.source,
        ranges=ranges_of(slot.parts, held.shard.length_bytes),
    )
