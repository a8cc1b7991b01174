"""``core.protection``: how many copies where, asked of a value and counted nowhere else."""

from collections import Counter
from itertools import product

import pytest

from holdfast.core.protection import NO_COPIES, Copies, Parity

RING = ("a", "b", "c", "d")
RACKS = {"a": "r1", "b": "r1", "c": "r2", "d": ""}


def test_targets_follow_the_ring_and_leave_domains_that_have_a_copy():
    """F52, F53: with domains a neighbour in the same rack gets none; no domain is its own."""
    assert Copies(2).targets("a", RING, RACKS) == ("b", "c")
    assert Copies(2, "rack").targets("a", RING, RACKS) == ("c", "d")
    assert Copies(3, "rack").targets("a", RING, RACKS) == ("c", "d")
    assert NO_COPIES.targets("a", RING, RACKS) == ()


@pytest.mark.parametrize(
    ("asked", "holders", "missing"),
    [
        (Copies(1), ("a",), 1),
        (Copies(1), ("a", "b"), 0),
        (Copies(1), ("a", "b", "c"), 0),
        (Copies(1, "rack"), ("a", "b"), 1),
        (Copies(1, "rack"), ("a", "c"), 0),
        (Copies(2, "rack"), ("a", "c", "d"), 0),
        (NO_COPIES, ("b",), 0),
        (NO_COPIES, (), 1),
    ],
)
def test_it_is_met_when_nothing_is_missing(asked, holders, missing):
    assert missing == asked.missing(holders, RACKS)
    assert (missing == 0) == asked.met(holders, RACKS)


def test_a_node_named_like_a_domain_is_not_in_it():
    assert Copies(1, "rack").met(("a", "r1"), {"a": "r1"})


def test_there_is_room_for_as_many_as_there_are_places_beside_the_owners():
    """F54: nodes allow fewer copies than were asked for, never more."""
    assert Copies(2).within(("a", "b"), RACKS) == Copies(1)
    assert Copies(2, "rack").within(RING, RACKS) == Copies(2, "rack")
    assert Copies(2, "rack").within(("a", "b", "c"), RACKS) == Copies(1, "rack")
    assert Copies(1).within(RING, RACKS) == Copies(1)
    assert Copies(1, "rack").within((), {}) == Copies(0, "rack")


def test_a_node_holds_for_others_what_they_hold_for_it():
    assert Copies(2).incoming_bytes(100, nodes_count=4) == 200
    assert Copies(2).incoming_bytes(100, nodes_count=2) == 100
    assert Copies(2).incoming_bytes(100, nodes_count=0) == 0


def test_parity_with_too_few_nodes_costs_no_more():
    """What is left survives fewer losses, in smaller groups: m/k stays, or is less."""
    asked = Parity(4, 2)
    allowed = {count: asked.within(map(str, range(count)), {}) for count in range(8)}
    assert {count: (one.k, one.m) for count, one in allowed.items() if one.m} == {
        3: (2, 1), 4: (2, 1), 5: (2, 1), 6: (4, 2), 7: (4, 2),
    }  # fmt: skip
    assert allowed[2].losses == 0
    assert Parity(3, 2).cut(1) == Parity(2, 1)
    assert Parity(2, 2, "rack").within(RING, RACKS) == Parity(1, 1, "rack")


def test_parity_asks_for_no_whole_copies_but_takes_them_for_enough():
    assert Parity(4, 2).copies == NO_COPIES
    assert not Parity(4, 2).met(("a", "b"), RACKS)
    assert Parity(4, 2).met(("a", "b", "c"), RACKS)
    assert not Parity(4, 2, "rack").met(("a", "b", "c"), RACKS)


@pytest.mark.parametrize(
    ("asked", "nodes_count", "shards_count", "elements"),
    [
        (Parity(2, 1), 2, 1, 0),  # too few nodes
        (Parity(2, 1), 3, 1, 1),
        (Parity(4, 2), 6, 1, 1),
        (Parity(4, 2), 5, 8, 6),
        (Parity(4, 2), 6, 8, 7),  # ranks on 5 of the 6 nodes
        (Parity(8, 2), 100, 8, 4),
        (Parity(2, 2), 4, 1, 1),
    ],
)
def test_a_node_holds_as_many_elements_as_the_fullest_one(
    asked, nodes_count, shards_count, elements
):
    own = 100 * shards_count
    assert asked.incoming_bytes(own, nodes_count, shards_count) == 100 * elements


@pytest.mark.parametrize("asked", [Parity(2, 1), Parity(3, 2), Parity(4, 2), Parity(4, 3)])
@pytest.mark.parametrize("shards_count", [1, 2, 8])
def test_no_node_with_ranks_gets_more_elements_than_the_sum_has(asked, shards_count):
    """P8: whatever nodes there are, also such that have no ranks and elements alone."""
    for nodes_count, spare_count in product(range(1, 2 * asked.places_min + 2), range(4)):
        ring = tuple(map(str, range(nodes_count + spare_count)))
        nodes, allowed = ring[:nodes_count], asked.within(ring, {})
        held = Counter(
            node
            for turn in range(shards_count)
            for group in allowed.groups(nodes, ring, {}, turn=turn)
            for node in allowed.element_nodes(group, ring, {})
        )
        summed = asked.incoming_bytes(shards_count, len(ring), shards_count)
        assert max(held[node] for node in nodes) <= summed


def test_elements_are_no_shards_that_a_restore_need_not_fetch():
    assert Copies(1).left_bytes(300, incoming_bytes=100) == 200
    assert Parity(2, 1).left_bytes(300, incoming_bytes=100) == 300
