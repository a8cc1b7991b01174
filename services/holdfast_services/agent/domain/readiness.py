"""What a rank needs of the checkpoint that is restored, and whether all of it is here. Pure."""

from __future__ import annotations

from holdfast.core.facts import Decision, Shard
from holdfast_services.agent.domain.state import Session, Slot, State


def needed(session: Session, decision: Decision) -> tuple[Shard, ...] | None:
    """Return the shards of a decision that a rank needs; None: not all of them are known yet.

    Either the rank has not named them for this checkpoint, or the decision does not list them: it
    lists what ranks here had named when it was sent, and nothing once its catalogue was lost.
    """
    if decision.checkpoint is None or not decision.shards_count:
        return None
    needs = session.needs
    named = session.spec.names_needs
    if named and (needs is None or needs.checkpoint != decision.checkpoint):
        return None
    if not named or needs is None or needs.whole:
        listed_all = len(decision.shards) == decision.shards_count
        return decision.shards if listed_all else None
    listed: dict[tuple[int, int], Shard] = {
        (shard.id.rank, shard.id.volume): shard for shard in decision.shards
    }
    shards = [listed.get((need.rank, need.volume)) for need in needs.shards]
    known = tuple(shard for shard in shards if shard is not None)
    return known if len(known) == len(shards) else None


def verified(state: State, session: Session, decision: Decision) -> list[Slot] | None:
    """Return the slots that a rank loads from, once all it needs is here; None: it is not.

    Each was hashed since the decision was proposed. They are in the order of their shards.
    """
    shards = needed(session, decision)
    if shards is None:
        return None
    copies = state.copies()
    slots = [copies.get(shard.id) for shard in shards]
    good = [
        slot
        for slot in slots
        if slot and slot.content and slot.content.verified_decision == decision.number
    ]
    return good if len(good) == len(slots) else None
