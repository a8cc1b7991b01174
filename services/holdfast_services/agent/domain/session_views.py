"""What the agent tells others: its inventory, a session's view, a dump for people. Pure."""

from __future__ import annotations

from dataclasses import fields, replace
from enum import Enum

from holdfast.core.facts import (
    Committed,
    DecisionState,
    HeldShard,
    HeldState,
    Inventory,
    RankStatus,
)
from holdfast.core.ids import ShardId
from holdfast.core.session import LocalSegment, RestoreView, SessionView, SlotLease, StepLevels
from holdfast.core.slot_names import SlotState
from holdfast.core.sources import Source
from holdfast_services.agent.domain.readiness import verified
from holdfast_services.agent.domain.slot_rules import (
    decision_for,
    forgotten,
    leased,
    restoring,
)
from holdfast_services.agent.domain.state import Session, Slot, State

REPLACED = "replaced by a later save: metadata was out and nothing was committed"
STEPS_COUNT_MAX = 32
ABANDONED_COUNT_MAX = 64


def inventory(state: State, *, incarnation: int, sequence: int, leaving: bool = False) -> Inventory:
    """Return all that this agent holds and all ranks it serves."""
    abandoned = dict.fromkeys(a for s in state.sessions.values() for a in s.abandoned)
    return Inventory(
        node=state.me,
        incarnation=incarnation,
        sequence=sequence,
        budget_bytes=state.budget_bytes,
        used_bytes=state.used_bytes,
        shards=_shards(state),
        ranks=tuple(_rank(session) for session in state.sessions.values()),
        abandoned=tuple(abandoned)[-ABANDONED_COUNT_MAX:],
        bad_sources=state.bad_sources,
        leaving=leaving,
        seen=tuple(state.seen[run] for run in sorted(state.seen)),
    )


def pressing(before: Inventory | None, now: Inventory) -> bool:
    """Tell whether the catalogue should hear of a change at once.

    The progress of training can wait for the next report, and so can that a slot was freed:
    nothing is freed but by the catalogue's own word.
    """
    if before is None or set(now.shards) - set(before.shards):
        return True
    return replace(now.lasting(), shards=()) != replace(before.lasting(), shards=())


def _shards(state: State) -> tuple[HeldShard, ...]:
    """One entry per shard; a good copy hides a quarantined one of the same shard."""
    listed: dict[ShardId, HeldShard] = {}
    for slot in state.slots.values():
        content = slot.content
        if content is None:
            continue
        known = listed.get(content.shard.id)
        if known is None or known.state is HeldState.QUARANTINED:
            listed[content.shard.id] = HeldShard(
                shard=content.shard,
                state=content.held,
                owner=content.owner,
                slot_incarnation=slot.name.incarnation,
            )
    return tuple(listed[key] for key in sorted(listed))


def _rank(session: Session) -> RankStatus:
    return RankStatus(
        job=session.spec.job,
        run=session.run,
        generation=session.generation,
        rank=session.spec.rank,
        live=session.live,
        ready_decision=session.ready_decision,
        nonce=session.spec.nonce,
        report=session.report,
        names_needs=session.spec.names_needs,
        # Once it has loaded nobody asks: what would be said with each report may be long.
        needs=session.needs.in_whole_shards() if session.needs and not session.loaded else None,
    )


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
    assert slot.content is not None, "held slots have content"
    return LocalSegment(
        shard=slot.content.shard, file_name=slot.name.file_name, source=slot.content.source
    )


def dump(state: State) -> dict[str, object]:
    """Return the whole state as plain JSON values, for people (F46)."""
    return {
        "me": _plain(state.me),
        "budget_bytes": state.budget_bytes,
        "used_bytes": state.used_bytes,
        "metadata_lost": state.lost,
        "slots": {name: _plain(slot) for name, slot in sorted(state.slots.items())},
        "sessions": {name: _plain(session) for name, session in sorted(state.sessions.items())},
        "view": _plain(state.view),
        "holds": [_plain(hold) for hold in state.holds.values()],
        "fetches": {key.key: _plain(value) for key, value in state.fetches.items()},
        "asks": {f"{k[0].key} -> {k[1]}": _plain(value) for k, value in state.asks.items()},
        "bad_sources": [_plain(bad) for bad in state.bad_sources],
    }


def _plain(value: object) -> object:
    if isinstance(value, Source):
        return str(value)
    if hasattr(value, "__dataclass_fields__"):
        named = ((item.name, getattr(value, item.name)) for item in fields(value))  # type: ignore[arg-type]
        return {name: _plain(item) for name, item in named}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()[:64]
    return value.value if isinstance(value, Enum) else value
