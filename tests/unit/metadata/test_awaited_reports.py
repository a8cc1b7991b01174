"""A restore that waits for a node's word says so in the node's view: the heartbeat is far away."""

from dataclasses import replace

import pytest


@pytest.fixture
def known(cluster):
    """Step 20 lies twice on a and b; c has no rank and no shard of the job."""
    cluster.join("a", "b", "c")
    cluster.commit(20, cluster.launch(b"first", "a", "b"), "a", "b")
    cluster.later(0.5)
    return cluster


def awaited(cluster):
    """Return who is asked by which attempts."""
    asked = {name: cluster.view(name).awaited_by for name in sorted(cluster.nodes)}
    return {name: by for name, by in asked.items() if by}


def test_a_node_without_a_rank_is_asked_for_its_word_by_the_attempt_that_waits(known):
    """4.8: the decision waits for every agent that may hold shards, and only c has no news."""
    known.launch(b"second", "a", "b")

    assert known.decided() == ("PENDING", None)
    assert awaited(known) == {"c": (b"second",)}


def test_its_word_is_all_that_was_missing(known):
    known.launch(b"second", "a", "b")

    known.report("c")

    assert known.decided() == ("PROPOSED", (20, 1))
    assert awaited(known) == {}


def test_hosts_are_asked_too_until_they_report(known):
    known.register(0, "a", nonce=b"second")
    assert sorted(awaited(known)) == ["a", "b", "c"]

    known.report("a")

    assert sorted(awaited(known)) == ["b", "c"]


def test_the_next_attempt_asks_under_a_name_of_its_own(known):
    """A watch that has seen the first question must see another one: views are levels."""
    known.register(0, "a", nonce=b"second")
    asked = known.view("c")
    known.later(0.5)

    known.register(0, "a", nonce=b"third")

    assert asked.awaited_by == (b"second",)
    assert known.view("c").awaited_by == (b"third",)


def test_nobody_is_asked_whose_lease_is_over(known):
    known.later(known.limits.node_lease_s)
    known.join("a", "b")
    known.later(0.5)
    known.register(0, "a", nonce=b"second")

    assert sorted(awaited(known)) == ["a", "b"]


def test_nobody_is_asked_once_the_wait_is_over(known):
    known.limits = replace(known.limits, decide_wait_s=1.0)
    known.register(0, "a", nonce=b"second")
    assert awaited(known)

    known.later(1.0)

    assert awaited(known) == {}
