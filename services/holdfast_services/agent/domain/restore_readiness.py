"""What ranks need of the checkpoint that is restored, and whether all of it is here. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.decision import Decision
from holdfast.core.needs import ByteRange
from holdfast.core.shard import Shard
from holdfast_services.agent.domain.state import Session, Slot, State
from holdfast_services.agent.domain.wanted_parts import parts_of


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
    copies, partials = state.copies(), state.partials()
    named = {(n.rank, n.volume): n.ranges for n in session.needs.shards} if session.needs else {}
    slots = [
        _hashed(copies.get(shard.id), decision)
        or _covering(
            partials.get(shard.id), named.get((shard.id.rank, shard.id.volume), ()), decision
        )
        for shard in shards
    ]
    good = [slot for slot in slots if slot is not None]
    return good if len(good) == len(slots) else None


def _hashed(slot: Slot | None, decision: Decision) -> Slot | None:
    held = slot.loadable if slot is not None else None
    return slot if held is not None and held.verified_decision == decision.number else None


def _covering(slot: Slot | None, ranges: Sequence[ByteRange], decision: Decision) -> Slot | None:
    """Return a partial slot if it has the parts that a rank needs."""
    if slot is None or slot.partial is None or not ranges:
        return None
    parts = parts_of(ranges, slot.partial.shard.length_bytes)
    return _hashed(slot, decision) if parts <= slot.parts else None
