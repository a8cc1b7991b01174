"""Stripes of parity: groups of nodes, places of elements, losses that are survived."""

from collections import Counter
from itertools import combinations

import pytest

from holdfast.core.ids import Generation, Rank, RunId, ShardId, Step
from holdfast.core.shard import Shard
from holdfast.core.stripes import (
    Element,
    Stripe,
    element_nodes,
    groups,
    is_element_key,
    losses_survived,
)

RACKS = {"a": "r1", "b": "r1", "c": "r2", "d": "r2", "e": "r3", "f": "r3"}
RING = tuple("abcdef")


def shard(rank, length_bytes=10, root=b"r" * 16):
    key = ShardId(RunId("run1"), Step(5), Generation(2), Rank(rank))
    return Shard(
        id=key, job="job", world_size=4, plan_hash="p", length_bytes=length_bytes, root_digest=root
    )


def test_neighbours_of_the_ring_form_groups_of_about_one_size():
    assert groups(RING, RING, size=4, elements=2) == (("a", "b", "c"), ("d", "e", "f"))
    assert groups(RING[:5], RING, size=2, elements=2) == (("a", "b"), ("c", "d"), ("e",))
    assert groups(RING, RING, size=1, elements=1) == tuple((node,) for node in RING)
    assert groups((), RING, size=2, elements=1) == ()


def test_of_one_domain_only_one_node_is_in_a_group():
    found = groups(RING, RING, size=2, elements=1, domains=RACKS)
    assert found == (("a", "c"), ("b", "d"), ("e",), ("f",))


def test_outside_of_a_group_are_places_for_its_elements():
    assert groups(RING[:5], RING, size=6, elements=2) == (("a", "b", "c"), ("d", "e"))
    assert groups(("a", "b"), ("a", "b"), size=2, elements=2) == ()
    assert groups(RING, RING, size=2, elements=3, domains=RACKS) == ()


def test_a_node_with_nothing_to_sum_up_may_hold_elements():
    assert groups(("a", "c"), RING, size=4, elements=2) == (("a", "c"),)
    assert element_nodes(("a", "c"), RING, elements=2) == ("d", "e")


def test_groups_turn_with_the_shards_of_a_node_and_elements_follow():
    turns = [groups(RING[:4], RING[:4], size=2, elements=2, turn=turn) for turn in range(3)]
    assert turns == [
        (("a", "b"), ("c", "d")), (("c", "d"), ("a", "b")), (("a", "b"), ("c", "d")),
    ]  # fmt: skip
    assert groups(RING[:3], RING, size=2, elements=1, turn=1) == (("b", "c"), ("a",))
    assert element_nodes(("b", "c"), RING, elements=2) == ("d", "e")
    assert element_nodes(("f", "a"), RING, elements=2) == ("b", "c")


def test_elements_leave_the_domains_of_members_and_of_each_other():
    assert element_nodes(("a", "c"), RING, elements=1, domains=RACKS) == ("e",)
    assert element_nodes(("a",), RING, elements=3, domains=RACKS) == ("c", "e")


@pytest.mark.parametrize("count", range(3, 20))
@pytest.mark.parametrize(("k", "m"), [(2, 1), (2, 2), (3, 2), (4, 2)])
def test_any_m_nodes_of_any_ring_are_survived(count, k, m):
    ring = tuple(f"n{i}" for i in range(count))
    if count < k + m:
        return
    for turn in range(3):
        for group in groups(ring, ring, size=k, elements=m, turn=turn):
            where = element_nodes(group, ring, elements=m)
            pieces = [{node} for node in (*group, *where)]
            assert losses_survived(pieces, len(group)) == m
            held = Counter((*group, *where))
            assert max(held.values()) == 1


def test_losses_survived_are_what_trying_all_losses_says():
    """Never more, and for pieces with one holder each just as many."""
    for pieces in (
        [{"a"}, {"b"}, {"c"}],
        [{"a"}, {"a"}, {"c"}, {"d"}],
        [{"a", "b"}, {"a"}, {"c"}],
        [{"a", "b"}, {"a", "b"}, {"a", "b"}],
        [set(), {"a"}, {"b"}],
    ):
        said = losses_survived(pieces, 2)
        for lost in combinations("abcd", max(said, 0)):
            left = sum(1 for nodes in pieces if set(nodes) - set(lost))
            assert left >= 2 or said < 0, (pieces, lost)
    assert losses_survived([{"a"}, {"b"}, {"c"}], 2) == 1
    assert losses_survived([{"a"}, {"a"}, {"c"}], 2) == 0
    assert losses_survived([{"a"}], 2) == -1


def test_two_nodes_of_one_domain_are_lost_together():
    assert losses_survived([{"a"}, {"b"}, {"c"}], 2) == 1
    assert losses_survived([{"a"}, {"b"}, {"c"}], 2, RACKS) == 0


def test_a_stripe_is_named_by_its_members_and_their_bytes():
    one = Stripe(members=(shard(0), shard(1, 30)), elements_count=2)
    assert one.length_bytes == 30
    assert one.key == Stripe(members=(shard(0), shard(1, 30)), elements_count=2).key
    others = [
        Stripe(members=(shard(1, 30), shard(0)), elements_count=2),
        Stripe(members=(shard(0), shard(1, 31)), elements_count=2),
        Stripe(members=(shard(0), shard(1, 30, b"s" * 16)), elements_count=2),
        Stripe(members=(shard(0), shard(1, 30)), elements_count=1),
    ]
    assert len({one.key, *(other.key for other in others)}) == 5
    assert Element(stripe=one, number=1).key == f"{one.key}/1"
    assert one.key.startswith("run1/5/2/parity/")


def test_keys_of_elements_are_told_by_their_form():
    key = Element(stripe=Stripe(members=(shard(0),), elements_count=16), number=15).key
    assert is_element_key(key)
    for other in (shard(0).id.key, key + "/", f"../{key}", key.upper(), key.rpartition("/")[0]):
        assert not is_element_key(other)
