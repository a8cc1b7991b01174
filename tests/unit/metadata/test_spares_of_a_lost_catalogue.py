"""What is spare where a catalogue was lost: it goes by what lies as the policy asks (P5, P8)."""

from __future__ import annotations

import pytest
from tests.unit.metadata.test_spares import NODES, spared_steps


def forgotten(cluster, *, generation=1, **wishes):
    """The catalogue was lost; d and c host the next attempt, and all nodes have reported."""
    cluster.forget()
    for rank, node in enumerate("dc"):
        cluster.register(rank, node, nonce=b"next", generation_min=generation, **wishes)
    cluster.report(*NODES)


@pytest.fixture
def twice(cluster):
    """Of 20 each shard lies once, of 15 and 10 twice, as the policy asks."""
    cluster.join(*NODES)
    cluster.launch(b"first", "d", "c")
    for step in (10, 15):
        cluster.commit(step, 1, "d", "c")
    cluster.hold("d", 20, 1, 0)
    cluster.hold("c", 20, 1, 1)
    return cluster


def test_of_a_step_that_lies_as_asked_in_parts_nothing_older_is_spare(twice):
    """P5: nobody can go back to it."""
    for node in "dc":
        twice.drop(node, 15, 1, 1)
    twice.hold("b", 15, 1, 1, owner="c")
    twice.hold("a", 15, 1, 1, owner="c")
    for node in "ab":
        twice.report(node)
        twice.machines[node].leaving = True
    forgotten(twice)

    assert ("PROPOSED", (20, 1)) == twice.decided()
    assert set() == spared_steps(twice), "a and b may come back with the rest of 15"


def test_with_fewer_nodes_than_copies_no_step_lies_as_asked(twice):
    """P5: none was acknowledged by what the policy asks for; which was, nobody knows."""
    for node in "ab":
        twice.machines[node].leaving = True
    forgotten(twice, replicas=2)

    assert ("PROPOSED", (20, 1)) == twice.decided()
    assert set() == spared_steps(twice)


def test_where_no_copies_are_asked_for_no_step_that_nobody_has_read_makes_older_ones_spare(twice):
    """P5: bytes of the only copy may be bad."""
    for node in "dc":
        for rank, owner in enumerate("dc"):
            if node != owner:
                for step in (10, 15):
                    twice.drop(node, step, 1, rank)
    forgotten(twice, replicas=0)

    assert ("PROPOSED", (20, 1)) == twice.decided()
    assert set() == spared_steps(twice)


def test_a_step_that_was_tried_in_vain_makes_no_older_one_spare(twice):
    """P5: 30 lies as asked, and bytes of it were bad; 10 may be needed if 20 and 15 are, too."""
    for node in "dc":
        for rank, owner in enumerate("dc"):
            twice.hold(node, 30, 1, rank, owner=owner)
    forgotten(twice)
    number = twice.run.decision.number
    assert ("PROPOSED", (30, 1)) == twice.decided()
    twice.drop("c", 30, 1, 0)
    twice.accuse("c", 30, 1, 0, "d", number)
    twice.report("c")
    twice.hold("c", 30, 1, 0, owner="d")
    twice.drop("c", 15, 1, 0)
    twice.report("c")
    assert ("PROPOSED", (20, 1)) == twice.decided()

    assert 15 not in {step for _, step in spared_steps(twice)}


def test_nor_does_one_that_is_older_than_what_a_node_has_brought_since(twice):
    """P5: bytes of 15 were bad, so 10 is needed if those of 20 are."""
    for node in "dc":
        twice.machines[node].shards = {
            key: held for key, held in twice.machines[node].shards.items() if key.step < 20
        }
    forgotten(twice)
    twice.drop("c", 15, 1, 0)
    twice.accuse("c", 15, 1, 0, "d", twice.run.decision.number)
    twice.report("c")
    assert ("PROPOSED", (10, 1)) == twice.decided()
    twice.hold("c", 15, 1, 0, owner="d")
    for rank, owner in enumerate("dc"):
        twice.hold("b", 20, 1, rank, owner=owner)
    twice.report("b", "c")
    assert ("PROPOSED", (20, 1)) == twice.decided()

    assert 10 not in {step for _, step in spared_steps(twice)}


def test_a_step_of_a_later_attempt_is_not_spare_for_a_higher_one_that_lies_as_asked(twice):
    """N7: a catalogue that was lost may choose what the later attempt went back behind."""
    twice.hold("c", 20, 1, 0, owner="d")
    twice.hold("d", 20, 1, 1, owner="c")
    for rank, node in enumerate("ab"):
        twice.hold(node, 12, 2, rank)
    forgotten(twice, generation=2)

    assert ("PROPOSED", (20, 1)) == twice.decided()
    assert {10, 15} == {step for _, step in spared_steps(twice)}
