"""What is served no more is told to the transport, so that peers that read by themselves cannot."""

from __future__ import annotations

from holdfast.core.slot_names import SlotName, SlotState
from holdfast_services.transport import ServedSegments

SLOT = SlotName("s1", 4, SlotState.SEALED)
OTHER = SlotName("s2", 4, SlotState.SEALED)


def served():
    revoked = []
    segments = ServedSegments(revoke=lambda view: revoked.append((view.obj, found(segments))))
    return segments, revoked


def found(segments):
    return segments.lookup("k", 4)


def test_memory_is_revoked_once_look_ups_do_not_find_it():
    segments, revoked = served()
    memory = bytearray(8)
    segments.put("k", SLOT, memoryview(memory))
    segments.withdraw(SLOT)

    assert [(memory, None)] == revoked


def test_memory_that_another_slot_takes_the_place_of_is_revoked():
    segments, revoked = served()
    before, after = bytearray(8), bytearray(9)
    segments.put("k", SLOT, memoryview(before))
    segments.put("k", OTHER, memoryview(after))

    assert [(before, memoryview(after))] == revoked
    assert revoked[0][1].obj is after


def test_memory_that_is_put_again_stays():
    segments, revoked = served()
    memory = bytearray(8)
    segments.put("k", SLOT, memoryview(memory))
    segments.put("k", SLOT, memoryview(memory))

    assert [] == revoked
