"""What an agent reports to metadata: the inventory of its node, and when a change presses. Pure."""

from __future__ import annotations

from holdfast.core.ids import ShardId
from holdfast.core.inventory import HeldElement, HeldShard, HeldState, Inventory, RankStatus
from holdfast_services.agent.domain import making_room
from holdfast_services.agent.domain.state import Session, State

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
        elements=_elements(state),
        room_bytes=making_room.room_bytes(state),
    )


def reports_alike(one: State, other: State) -> bool:
    """Tell whether two states of one agent are the same in all that ``inventory`` looks at."""
    return (
        one.slots == other.slots
        and one.sessions == other.sessions
        and one.bad_sources == other.bad_sources
        and one.seen == other.seen
    )


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


def _elements(state: State) -> tuple[HeldElement, ...]:
    there = state.elements()
    found = ((slot.name.incarnation, slot.element) for _, slot in sorted(there.items()))
    return tuple(
        HeldElement(element=h.element, root_digest=h.root_digest, slot_incarnation=incarnation)
        for incarnation, h in found
        if h is not None
    )


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
