"""Which parts of a shard the ranks of this node wait for, and which slots have them. Pure.

Ranks name byte ranges; bytes are fetched and verified in parts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

from holdfast.core.ids import CheckpointId
from holdfast.core.needs import ByteRange
from holdfast.core.shard import Shard
from holdfast.format.digest import PART_BYTES
from holdfast_services.agent.domain import slot_rules
from holdfast_services.agent.domain.state import Session, Slot, State

Ranges = Iterable[ByteRange]


class WantedParts:
    """What the ranks here wait for, by shard; made for one look at a state."""

    def __init__(self, state: State) -> None:
        self._naming: set[str] = set()
        """Runs whose ranks name what they need."""
        self._whole: set[CheckpointId] = set()
        self._ranges: dict[tuple[CheckpointId, int, int], list[Ranges]] = defaultdict(list)
        for session in state.sessions.values():
            if session.spec.names_needs:
                self._naming.add(session.run)
            checkpoint = _awaited(state, session)
            if checkpoint is not None:
                self._add(session, checkpoint)

    def _add(self, session: Session, checkpoint: CheckpointId) -> None:
        needs = session.needs
        if not session.spec.names_needs:
            self._whole.add(checkpoint)
        elif needs is not None and needs.checkpoint == checkpoint:
            if needs.whole:
                self._whole.add(checkpoint)
            for need in needs.shards:
                self._ranges[checkpoint, need.rank, need.volume].append(need.ranges)

    def of(self, shard: Shard) -> frozenset[int] | None:
        """Return which parts of a shard are waited for; None: all of it.

        While nobody waits, that is nothing where ranks name what they need, else all of it: those
        that come will need that.
        """
        key, length_bytes = shard.id, shard.length_bytes
        if key.run not in self._naming or key.checkpoint in self._whole:
            return None
        named = self._ranges.get((key.checkpoint, key.rank, key.volume), ())
        if not all(named):
            return None
        parts = frozenset[int]().union(*(parts_of(ranges, length_bytes) for ranges in named))
        every = parts_of([ByteRange(begin=0, end=length_bytes)], length_bytes)
        return parts if parts != every else None

    def serve(self, state: State, slot: Slot) -> bool:
        """Tell whether a partial slot is of use: a rank reads it, or waits for parts it has."""
        assert slot.partial is not None, "only partial slots are asked about"
        shard = slot.partial.shard
        if any(shard.id in session.reading for session in state.sessions.values()):
            return True
        parts = self.of(shard)
        return bool(parts) and parts is not None and has_parts(state, slot, parts)


def _awaited(state: State, session: Session) -> CheckpointId | None:
    """Return the checkpoint that a rank waits to load."""
    decision = slot_rules.decision_for(state, session)
    if not session.active or session.loaded or decision is None:
        return None
    return decision.checkpoint if slot_rules.restoring(decision) else None


def has_parts(state: State, slot: Slot, parts: Collection[int]) -> bool:
    """Tell whether a partial slot has these parts, hashed since its run's decision was proposed."""
    held = slot.partial
    view = state.run(held.shard.id.run) if held is not None else None
    if held is None or view is None or view.decision is None:
        return False
    if held.verified_decision != view.decision.number:
        return False
    return slot.parts.issuperset(parts)


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
