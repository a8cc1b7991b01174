"""What may become of a slot: freed, replaced by a later save, leased again. Pure questions.

Each function answers from the state and changes nothing. Source: architecture 4.5, 4.7, P8.
"""

from __future__ import annotations

from holdfast.core.budget import SLOTS_PER_RANK, saving_slots
from holdfast.core.decision import Decision, DecisionState
from holdfast.core.ids import ShardId
from holdfast.core.inventory import HeldState
from holdfast.core.node_view import RunView
from holdfast.core.slot_names import SlotState
from holdfast_services.agent.domain.state import (
    AGENT,
    Session,
    Slot,
    State,
    Work,
)

FORGOTTEN_AFTER_S = 5.0


def generation_seen(state: State, job: str) -> int:
    """Return the newest generation of a job that anything here is of; 0: nothing is.

    A catalogue that was lost and asks nobody would give it to the next attempt again (P6).
    """
    held = [slot.content.shard for slot in state.slots.values() if slot.content is not None]
    summed = (s.element.element.stripe.members for s in state.slots.values() if s.element)
    held += [members[0] for members in summed]
    return max(
        (
            *(shard.id.generation for shard in held if shard.job == job),
            *(one.generation for one in state.sessions.values() if one.spec.job == job),
            *(
                view.generation
                for view in (state.view.runs if state.view else ())
                if view.job == job
            ),
        ),
        default=0,
    )


def freeable(state: State, slot: Slot) -> bool:
    """Tell whether a sealed slot may be freed, by what the catalogue said and nothing else."""
    assert slot.content is not None, "only sealed slots are asked about"
    shard = slot.content.shard.id
    view = state.run(shard.run)
    return view is not None and spent(state, view, shard) and not _kept(view, shard)


def _kept(view: RunView, shard: ShardId) -> bool:
    """Tell whether the catalogue wants it kept however old it is: it is restored, or drains."""
    return shard.checkpoint in view.pinned or shard in view.drained


def spent(state: State, view: RunView, shard: ShardId) -> bool:
    """Tell whether nothing but a pin or a drain could still keep this shard's slot."""
    if not (_older(view, shard) or _left_behind(view, shard)):
        return False
    return not (named(state, view, shard) or _is_read(state, shard))


def _is_read(state: State, shard: ShardId) -> bool:
    return any(shard in session.reading for session in state.sessions.values())


def outdated(view: RunView, shard: ShardId) -> bool:
    """Tell whether no restore will choose this shard's checkpoint any more.

    A drain may need it: from who has it, and no further copy.
    """
    left = _left_behind(view, shard)
    return left or (_older(view, shard) and shard.checkpoint not in view.pinned)


def _left_behind(view: RunView, shard: ShardId) -> bool:
    """Tell whether a later attempt went back behind this step, or its own gave it up."""
    if view.superseded and any(rule.covers(shard) for rule in view.superseded):
        return True
    return any((a.step, a.generation) == (shard.step, shard.generation) for a in view.abandoned)


def _older(view: RunView, shard: ShardId) -> bool:
    keep = view.free_before
    # A later attempt may be at an earlier step: what a catalogue from a backup keeps of the one
    # before says nothing of it.
    if keep is None or shard.generation > keep.generation:
        return False
    return (shard.step, shard.generation) < (keep.step, keep.generation)


def replaceable(state: State, slot: Slot) -> bool:
    """Tell whether a later save may take this slot: metadata is out and did not commit it.

    While nobody commits, a rank goes on with the slot of its older uncommitted step. What this
    agent has seen committed stays, since metadata may let others free older slots for it; so does
    what an older attempt left, what is pinned, named or read.
    """
    view = state.run(slot.content.shard.id.run) if slot.content else None
    if slot.content is None or view is None or not state.lost or slot.work is not Work.NONE:
        return False
    shard = slot.content.shard.id
    current = shard.generation == view.generation and not _kept(view, shard)
    read = _is_read(state, shard)
    return current and not (read or heard(state, shard) or named(state, view, shard))


def heard(state: State, shard: ShardId) -> bool:
    """Tell whether this agent was told that the shard's checkpoint, or a later one, is committed.

    Of the newest attempt: what a later one has committed, or restored, stands above all before.
    """
    seen = state.seen.get(shard.run)
    return seen is not None and (shard.generation, shard.step) <= (seen.generation, seen.step)


def gives_way(state: State, session: Session) -> Slot | None:
    """Return the slot that a session without one goes on with: its oldest that is replaceable."""
    if not (session.wants_slot and session.active) or any(
        slot.work is Work.CREATING or _is_open(slot, session) for slot in state.slots.values()
    ):
        return None
    mine = (
        (slot.content.shard.id.step, slot)
        for slot in state.slots.values()
        if slot.content is not None
        and slot.content.owner == state.me.node
        and slot.content.shard.id.step < session.wants_slot
        and is_of(session, slot.content.shard.id)
        and replaceable(state, slot)
    )
    return min(mine, key=lambda item: item[0], default=(0, None))[1]


def _is_open(slot: Slot, session: Session) -> bool:
    return slot.session == session.id and slot.name.state is SlotState.WRITING


def is_of(session: Session, shard: ShardId) -> bool:
    """Tell whether a shard is one that this rank saved in this attempt."""
    return (shard.run, shard.generation, shard.rank) == (
        session.run,
        session.generation,
        session.spec.rank,
    )


def passed_copies(state: State, shard: ShardId) -> list[Slot]:
    """Return copies held for peers that a copy of this later shard may replace, oldest first."""
    copies = copies_of_rank(state, shard)
    return [slot for key, slot in copies if key.step < shard.step and replaceable(state, slot)]


def surplus_copies(state: State, shard: ShardId) -> list[Slot]:
    """Return those of ``passed_copies`` that a rank's owner has no slots for by now."""
    surplus = len(copies_of_rank(state, shard)) - steps_held(state.run(shard.run))
    return passed_copies(state, shard)[: max(surplus, 0)]


def steps_held(view: RunView | None) -> int:
    """Return how many steps of a peer's rank are held here: as many as it has slots for itself."""
    return max(view.saving_slots if view else 0, SLOTS_PER_RANK)


def copies_of_rank(state: State, shard: ShardId) -> list[tuple[ShardId, Slot]]:
    """Return what is held for a peer's rank, oldest first."""
    held = (
        (slot.content.shard.id, slot)
        for slot in state.slots.values()
        if slot.content is not None
        and slot.content.owner != state.me.node
        and is_of_rank(slot.content.shard.id, shard)
    )
    return sorted(held, key=lambda item: item[0])


def is_of_rank(one: ShardId, other: ShardId) -> bool:
    """Tell whether two shards are of one rank of one attempt, of whatever steps."""
    return (one.run, one.generation, one.rank, one.volume) == (
        other.run,
        other.generation,
        other.rank,
        other.volume,
    )


def named(state: State, view: RunView, shard: ShardId) -> bool:
    """Tell whether an open decision names this shard."""
    decision = view.decision
    if decision is None or decision.checkpoint != shard.checkpoint:
        return False
    if decision.state is DecisionState.PROPOSED:
        return True
    return decision.state is DecisionState.CONFIRMED and any(
        session.active and not session.loaded
        for session in state.sessions.values()
        if decision_for(state, session) is decision
    )


def decision_for(state: State, session: Session) -> Decision | None:
    """The catalogue's decision for this session's attempt, if it has one."""
    view = state.run(session.run)
    if view is None or view.decision is None or not _same_attempt(view, session):
        return None
    return view.decision if view.decision.generation == session.generation else None


def _same_attempt(view: RunView, session: Session) -> bool:
    """Tell whether a view is of the session's attempt, not of one that had its generation before.

    A catalogue that was lost gives numbers again, and the last view of it may still be here (P2).
    """
    return not view.nonce or view.nonce == session.spec.nonce


def restoring(decision: Decision | None) -> bool:
    """Tell whether a decision names shards that are to be fetched and verified."""
    return (
        decision is not None
        and decision.state in (DecisionState.PROPOSED, DecisionState.CONFIRMED)
        and not decision.fresh
    )


def forgotten(state: State, session: Session) -> bool:
    """Tell whether a catalogue that answers knows nothing of the session's rank (P6).

    Of one that waits for its restore a while is let pass: the view may be older than it is.
    """
    if not session.active or state.view is None or state.lost:
        return False
    if not session.loaded and state.now_s < session.opened_s + FORGOTTEN_AFTER_S:
        return False
    view = state.run(session.run)
    if view is None or view.attempt < session.generation or not _same_attempt(view, session):
        return True
    if view.attempt != session.generation:
        return False
    # Its mates may have brought the attempt back already, and it has no seat there.
    return session.spec.rank not in view.seats or (session.loaded and _undecided(view))


def _undecided(view: RunView) -> bool:
    """Tell whether a restore is still to be confirmed: to whom has loaded, it is once more."""
    decision = view.decision
    return decision is not None and decision.state in (
        DecisionState.PENDING,
        DecisionState.PROPOSED,
    )


def quota_left(state: State, session: Session) -> int:
    """How many more slots this session may lease."""
    if session.reservation is None:
        return 0
    held = [slot for slot in state.slots.values() if _counts(state, slot, session)]
    # Memory saves never wait for the object store (F88): what drains has a slot of its own or,
    # begun by an older attempt or a user's pin, takes what is left of the budget. That slot is for
    # nothing else: more steps would wait for their copies than their backups have room for.
    taken = sum(not _draining(state, slot) for slot in held)
    if session.wants_slot and state.lost:
        # Metadata went away between telling this agent of a commit and hearing that it knows:
        # neither that step nor the one before may go. The rank goes on in what budget is left.
        taken -= any(unheard(state, slot) for slot in held)
    if _restored(state, session):
        # What was restored is kept until a newer step is safe. The budget counts it as one of the
        # slots (P8); leased on top, there would be no room for the copies that make a step safe.
        mine = sum(1 for slot in state.slots.values() if _is_new(state, slot, session))
        taken = max(taken, mine + 1)
    slots = saving_slots(session.reservation.slots, persist=session.spec.persist.on)
    return max(slots - taken, 0)


def unheard(state: State, slot: Slot) -> bool:
    """Tell whether this agent knows of a commit, and metadata does not know yet that it does."""
    view = state.run(slot.content.shard.id.run) if slot.content else None
    if slot.content is None or view is None:
        return False
    shard, kept = slot.content.shard.id, view.free_before
    return heard(state, shard) and (kept is None or shard.step > kept.step)


def _restored(state: State, session: Session) -> bool:
    """Tell whether segments of an older attempt lie here that may not be freed yet."""
    return any(
        slot.content is not None
        and slot.content.shard.id.run == session.run
        and slot.content.shard.id.generation < session.generation
        and not freeable(state, slot)
        and not _draining(state, slot)
        for slot in state.slots.values()
    )


def _draining(state: State, slot: Slot) -> bool:
    """Tell whether a sealed slot is kept for its way to the object store alone."""
    shard = slot.content.shard.id if slot.content is not None else None
    view = state.run(shard.run) if shard else None
    if shard is None or view is None:
        return False
    return spent(state, view, shard) and _kept(view, shard)


def _is_new(state: State, slot: Slot, session: Session) -> bool:
    content = slot.content
    old = content is not None and content.shard.id.generation < session.generation
    return not old and _counts(state, slot, session)


def leased(state: State, slot: Slot) -> bool:
    """Tell whether a live session holds this open slot and still wants it, for its newest plan."""
    session = holder(state, slot)
    asked = session.reservation if session else None
    return (
        session is not None
        and session.active
        and asked is not None
        and (slot.plan_hash, slot.length_bytes) == (asked.plan_hash, asked.length_bytes)
    )


def _counts(state: State, slot: Slot, session: Session) -> bool:
    if slot.name.state in (SlotState.WRITING, SlotState.CLOSED):
        return slot.session == session.id
    if slot.content is None or slot.content.owner != state.me.node:
        return False
    if slot.content.held is HeldState.QUARANTINED:
        return False  # it gives way when room is wanted: a slot that it took would never be wanted
    shard = slot.content.shard.id
    return (shard.run, shard.rank) == (session.run, session.spec.rank) and not freeable(state, slot)


def holder(state: State, slot: Slot) -> Session | None:
    """The session that leases this slot, if it is known."""
    return state.sessions.get(slot.session) if slot.session not in ("", AGENT) else None
