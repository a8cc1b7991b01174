"""What ranks need of the checkpoint that is restored, and whether all of it is here. Pure.

Ranks name shards and byte ranges of them; bytes are fetched and verified in parts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from holdfast.core.facts import Decision, Shard
from holdfast.core.ids import ShardId
from holdfast.core.needs import ByteRange, ShardNeed
from holdfast.format.digest import PART_BYTES
from holdfast_services.agent.domain import slot_rules
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
    copies, partials = state.copies(), state.partials()
    slots = [
        _hashed(copies.get(shard.id), decision)
        or _covering(partials.get(shard.id), _named(session, shard.id), decision)
        for shard in shards
    ]
    good = [slot for slot in slots if slot is not None]
    return good if len(good) == len(slots) else None


def _hashed(slot: Slot | None, decision: Decision) -> Slot | None:
    held = slot.loadable if slot is not None else None
    return slot if held is not None and held.verified_decision == decision.number else None


def _covering(slot: Slot | None, need: ShardNeed | None, decision: Decision) -> Slot | None:
    """Return a partial slot if it has the parts that a rank needs."""
    if slot is None or need is None or not need.ranges:
        return None
    assert slot.partial is not None
    parts = parts_of(need.ranges, slot.partial.shard.length_bytes)
    return _hashed(slot, decision) if parts <= slot.parts else None


def parts_wanted(state: State, shard: Shard) -> frozenset[int] | None:
    """Return which parts of a shard ranks here wait for; None: all of it.

    While nobody waits, that is nothing where ranks name what they need, else all of it: those that
    come will need that.
    """
    parts: set[int] = set()
    named = [s for s in state.sessions.values() if s.run == shard.id.run and s.spec.names_needs]
    for session in state.sessions.values():
        if not _waits_for(state, session, shard.id):
            continue
        if session not in named:
            return None
        needs, need = session.needs, _named(session, shard.id)
        if needs is None or needs.checkpoint != shard.id.checkpoint:
            continue
        if needs.whole or (need is not None and not need.ranges):
            return None
        parts |= parts_of(need.ranges, shard.length_bytes) if need is not None else set()
    every = parts_of([ByteRange(begin=0, end=shard.length_bytes)], shard.length_bytes)
    return frozenset(parts) if named and parts != every else None


def _waits_for(state: State, session: Session, shard: ShardId) -> bool:
    decision = slot_rules.decision_for(state, session)
    return (
        session.active
        and not session.loaded
        and decision is not None
        and slot_rules.restoring(decision)
        and decision.checkpoint == shard.checkpoint
    )


def _named(session: Session, shard: ShardId) -> ShardNeed | None:
    """Return what a rank has named of a shard of the checkpoint that it named last."""
    needs = session.needs
    if needs is None or needs.whole or needs.checkpoint != shard.checkpoint:
        return None
    return next((n for n in needs.shards if (n.rank, n.volume) == (shard.rank, shard.volume)), None)


def is_wanted(state: State, slot: Slot) -> bool:
    """Tell whether a partial slot is of use: a rank reads it, or waits for parts that it has."""
    held = slot.partial
    assert held is not None, "only partial slots are asked about"
    shard = held.shard.id
    if any(shard in session.reading for session in state.sessions.values()):
        return True
    wanted = parts_wanted(state, held.shard)
    return bool(wanted) and wanted is not None and serves(state, slot, wanted)


def serves(state: State, slot: Slot, parts: Collection[int]) -> bool:
    """Tell whether a partial slot has these parts, hashed since its run's decision was proposed."""
    view = state.run(slot.partial.shard.id.run) if slot.partial else None
    decision = view.decision if view else None
    hashed = decision is not None and _hashed(slot, decision) is not None
    return hashed and slot.parts.issuperset(parts)


def parts_of(ranges: Iterable[ByteRange], length_bytes: int) -> frozenset[int]:
    """Return the numbers of the parts that hold these bytes of a segment of that length."""
    ends = ((r.begin, min(r.end, length_bytes)) for r in ranges)
    return frozenset(
        part for begin, end in ends for part in range(begin // PART_BYTES, -(-end // PART_BYTES))
    )


def ranges_of(parts: Iterable[int], length_bytes: int) -> tuple[ByteRange, ...]:
    """Return the bytes of these parts of a segment of that length, in as few ranges as can be."""
    ranges: list[ByteRange] = []
    for part in sorted(parts):
        begin, end = part * PART_BYTES, min((part + 1) * PART_BYTES, length_bytes)
        if ranges and ranges[-1].end == begin:
            begin = ranges.pop().begin
        ranges.append(ByteRange(begin=begin, end=end))
    return tuple(ranges)


def length_of(parts: Iterable[int], length_bytes: int) -> int:
    """Return how many bytes these parts of a segment of that length have."""
    return sum(r.end - r.begin for r in ranges_of(parts, length_bytes))
