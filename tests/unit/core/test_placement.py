"""``core.placement``: the ring and the backups (F52, G4)."""

from holdfast.core.placement import backups, ring


def test_nodes_stand_by_their_lowest_rank_and_spare_ones_follow():
    assert ("b", "a", "spare", "zed") == ring(
        {3: "a", 0: "b", 1: "b", 2: "a"}, ["zed", "a", "spare", "b"]
    )


def test_a_node_without_a_lease_is_left_out():
    assert ("b",) == ring({0: "a", 1: "b"}, ["b"])


def test_backups_walk_the_ring_from_the_owner():
    assert ("c", "a") == backups("b", ["a", "b", "c"], replicas=2)


def test_replicas_are_cut_to_the_other_nodes():
    """F52: any node count; F54: one node is no error."""
    assert ("b",) == backups("a", ["a", "b"], replicas=5)
    assert () == backups("a", ["a"], replicas=1)
    assert () == backups("a", [], replicas=1)
    assert () == backups("a", ["a", "b"], replicas=0)


def test_copies_lie_in_different_failure_domains():
    """G4."""
    domains = {"a": "r1", "b": "r1", "c": "r2", "d": "r2", "e": "r3"}

    assert ("c", "e") == backups("a", list("abcde"), replicas=2, domains=domains)
    assert ("c",) == backups("a", list("abcd"), replicas=2, domains=domains)


def test_a_node_without_a_domain_fails_alone():
    assert ("b", "c") == backups("a", list("abc"), replicas=2, domains={"a": "", "b": "", "c": ""})


def test_a_node_named_like_a_domain_is_not_in_it():
    assert ("r1",) == backups("a", ["a", "r1"], replicas=1, domains={"a": "r1"})


def test_an_owner_that_has_gone_stands_before_the_first():
    """F55: its copies are still to be made good."""
    assert ("a", "b") == backups("gone", ["a", "b", "c"], replicas=2)


def test_every_node_backs_up_as_many_as_it_is_backed_up_by():
    nodes = [f"n{i}" for i in range(7)]
    chosen = [node for owner in nodes for node in backups(owner, nodes, replicas=3)]

    assert {3} == {chosen.count(node) for node in nodes}
