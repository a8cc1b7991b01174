"""The order of one fetch: bounded, nothing left out, believed only when it was given back."""

from __future__ import annotations

import random

import pytest

from holdfast_services.transport.rdma.flow import (
    MESSAGE_BYTES_MAX,
    PARTS_COUNT_MAX,
    Awaited,
    Flow,
    messages,
)


@pytest.mark.parametrize("length_bytes", [1, 8 << 20, (16 << 20) - 1, 16 << 20])
@pytest.mark.parametrize("message_bytes_max", [1 << 20, 8 << 20, 1 << 31])
def test_messages_cover_a_part_and_none_is_too_long(length_bytes, message_bytes_max):
    pieces = list(messages(length_bytes, message_bytes_max))

    assert [0, *(end for _, end in pieces)] == [*(begin for begin, _ in pieces), length_bytes]
    assert max(end - begin for begin, end in pieces) <= min(MESSAGE_BYTES_MAX, message_bytes_max)


def test_no_more_parts_are_asked_for_than_may_be_under_way():
    flow = Flow(range(9))

    assert [*range(PARTS_COUNT_MAX), None] == [flow.ask() for _ in range(PARTS_COUNT_MAX + 1)]
    flow.read(flow.answered(), 1)
    assert flow.ask() is None
    assert flow.arrived(0)
    assert flow.ask() is None  # given back, not yet answered


def test_a_part_has_arrived_with_its_last_message():
    flow = Flow([5])
    flow.ask()
    flow.read(flow.answered(), 3)

    assert [False, False, True] == [flow.arrived(5) for _ in range(3)]
    assert Awaited.DONE is flow.awaited
    assert 5 == flow.answered()
    assert flow.ended


def test_a_part_that_does_not_match_comes_once_more():
    flow = Flow([])

    assert flow.mismatched(3)
    assert not flow.ended
    assert 3 == flow.ask()
    assert not flow.mismatched(3)


@pytest.mark.parametrize("seed", range(50))
def test_whatever_the_order_every_part_is_verified_once(seed):
    """Completions and answers come in any interleaving that one connection allows."""
    chance = random.Random(seed)
    flow, verified = Flow(range(11)), []
    reading: list[int] = []  # messages under way, in the order in which they complete
    while not flow.ended:
        while (index := flow.ask()) is not None:
            assert index not in verified
        if reading and (flow.awaited is None or chance.random() < 0.5):
            flow.arrived(reading.pop(0))
            continue
        about, index = flow.awaited, flow.answered()
        if about is Awaited.LENT:
            count = chance.randint(1, 4)
            flow.read(index, count)
            reading += [index] * count
        elif chance.random() < 0.8 or not flow.mismatched(index):
            verified.append(index)

    assert list(range(11)) == sorted(verified)
    assert flow.awaited is None
