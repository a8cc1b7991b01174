"""A segment in memory that is mapped, as slots are, the same in every process."""

from __future__ import annotations

import mmap

from holdfast.core.slot_names import SlotName, SlotState
from holdfast.format.digest import PART_BYTES, part_digest, part_ranges
from holdfast_services.transport import FetchRequest, ServedSegments

KEY = "r1/5/1/0/0"
LAST_PART_BYTES = 5000
SLOT = SlotName("s1", 4, SlotState.SEALED)


def mapped_segment(parts_count: int) -> mmap.mmap:
    """Return so many parts, no two of them alike; the last is short."""
    made = mmap.mmap(-1, (parts_count - 1) * PART_BYTES + LAST_PART_BYTES)
    block = bytes(range(256)) * 4096
    for index, begin in enumerate(range(0, len(made), len(block))):
        piece = block[: len(made) - begin]
        made[begin : begin + len(piece)] = piece
        made[begin : begin + 8] = index.to_bytes(8, "little")
    return made


def serving(memory: mmap.mmap, revoke=lambda _: None) -> ServedSegments:
    served = ServedSegments(revoke)
    served.put(KEY, SLOT, memoryview(memory))
    return served


def request_for(memory: mmap.mmap) -> FetchRequest:
    view = memoryview(memory)
    digests = tuple(part_digest(view[a:b]) for a, b in part_ranges(len(view)))
    return FetchRequest(
        key=KEY, incarnation=SLOT.incarnation, length_bytes=len(view), digests=digests
    )
