"""Copies that are more than the policy asks for: nodes are told which of theirs these are (P8)."""

from __future__ import annotations

import pytest

NODES = "dcab"
"""As they stand in the ring: first those of the ranks, so not as in the alphabet."""


@pytest.fixture
def copied(cluster):
    """Step 10 of ranks on d and c lies there twice; a and b are empty."""
    cluster.join(*NODES)
    cluster.launch(b"first", "d", "c")
    cluster.commit(10, 1, "d", "c")
    return cluster


def copy(cluster, node, rank, **fields):
    cluster.hold(node, 10, 1, rank, owner="dc"[rank], **fields)
    cluster.report(node)


def spares(cluster):
    """Return (node, rank) of all copies that are said to be spare."""
    return {(node, key.rank) for node in NODES for key in cluster.view(node).spares}


def test_a_copy_more_than_the_policy_asks_for_is_spare_and_never_where_the_rule_places_it(copied):
    """P8: what a node must keep is within its sum, whoever else has fetched it."""
    assert set() == spares(copied)
    for node in "ab":
        copy(copied, node, 0)
    copy(copied, "a", 1)

    assert {("a", 0), ("b", 0), ("d", 1)} == spares(copied), "after c comes a"


def test_a_copy_is_not_spare_while_one_that_should_be_there_is_gone_or_bad(copied):
    """P5: as many as are asked for lie intact on nodes that live; the next of the ring keep it."""
    for node in "ab":
        copy(copied, node, 0)
    copy(copied, "c", 0, state=2)
    assert {("b", 0)} == spares(copied)

    copied.machines["d"].leaving = True
    copied.report("d")

    assert set() == spares(copied)


def test_nothing_is_spare_of_what_is_restored_until_all_ranks_have_loaded(copied):
    """4.8: of the checkpoint that is chosen every rank wants each shard on its node."""
    second = copied.launch(b"second", "b", "a")
    for node in "ab":
        for rank in (0, 1):
            copy(copied, node, rank)
    assert copied.decided() == ("PROPOSED", (10, 1))
    assert set() == spares(copied)
    copied.ready(("b", 0), ("a", 1))
    assert copied.decided() == ("CONFIRMED", (10, 1))
    copied.status("b", 0, loaded=True)
    copied.report("b")
    assert set() == spares(copied)

    copied.status("a", 1, loaded=True, generation=second)
    copied.report("a")

    assert {("a", 0), ("c", 0), ("a", 1), ("b", 1)} == spares(copied)


def test_of_what_is_not_restored_copies_are_spare_meanwhile(copied):
    """P8: room is wanted just then."""
    copy(copied, "a", 0)
    for rank, node in enumerate("dc"):
        copied.hold(node, 20, 1, rank)
    copied.report("d", "c")
    copied.launch(b"second", "d", "c")

    assert copied.decided() == ("PROPOSED", (20, 1))
    assert {("a", 0)} == spares(copied)


def test_copies_that_lie_apart_are_kept_where_the_policy_asks_for_domains(cluster):
    """4.4: the next of the ring shares the owner's domain, so it keeps none for it."""
    for node, domain in (("d", "x"), ("c", "x"), ("b", "y")):
        cluster.machine(node, domain)
    cluster.join("d", "c", "b")
    cluster.launch(b"first", "d", "c", replica_domain="rack")
    cluster.commit(10, 1, "d", "c")
    assert set() == {key.rank for key in cluster.view("c").spares}

    copy(cluster, "b", 0)

    assert [0] == [key.rank for key in cluster.view("c").spares]
    assert () == cluster.view("b").spares
