"""What saving waits for in memory: steps of its own attempt, and none that lies elsewhere."""

from dataclasses import replace

import pytest
from tests.unit.metadata.test_commit_rule import start

from holdfast.core.decision import Start


def test_no_step_is_given_up_for_one_of_the_attempt_before_whatever_its_number(cluster):
    """P5: this attempt has started over, and a catalogue from a backup does not know that."""
    first = start(cluster, "a", "b")
    cluster.commit(20, first, "a", "b")
    second = cluster.launch(b"second", "a", "b", start=Start(name="again", fresh=True))
    cluster.run = replace(cluster.run, rules=(), moves=())
    cluster.hold("a", 1, second, 0)
    cluster.hold("a", 1, second, 1, owner="b")
    cluster.report("a", "b")

    assert (1, second) in cluster.levels()
    assert () == cluster.run.abandoned


@pytest.mark.parametrize("objects", [{}, {"bad": True}, {"expired": True}])
def test_what_is_durable_is_acknowledged_though_a_holder_has_replaced_its_part(cluster, objects):
    """P4: else those who have heard keep their parts for ever, and with them a slot."""
    generation = start(cluster, "a", "b", replicas=0)
    cluster.deaf = {"a"}
    for rank, node in enumerate("ab"):
        cluster.hold(node, 5, generation, rank)
    cluster.report("a", "b")
    cluster.drop("a", 5, generation, 0)
    cluster.hold("a", 6, generation, 0)
    cluster.report("a")
    assert cluster.view("b").runs[0].free_before is None

    cluster.change(5, generation, durable_at_s=1.0, **objects)
    cluster.report("a", "b")

    freed = cluster.view("b").runs[0].free_before
    assert (freed and freed.step) == (None if objects else 5)


def test_what_was_acknowledged_by_its_objects_alone_is_not_once_they_are_bad(cluster):
    """P5: the step before lies whole in memory, and may be the only one that can be restored."""
    generation = start(cluster, "a", "b", replicas=1)
    for node in "ab":
        for rank in range(2):
            cluster.hold(node, 4, generation, rank, owner="ab"[rank])
    cluster.report("a", "b")
    cluster.hear()
    cluster.report("a", "b")
    for rank, node in enumerate("ab"):
        cluster.hold(node, 5, generation, rank)
    cluster.report("a", "b")
    cluster.drop("b", 5, generation, 1)

    freed = []
    for objects in ({}, {"bad": True}):
        cluster.change(5, generation, durable_at_s=1.0, **objects)
        cluster.report("a", "b")
        freed.append(cluster.view("a").runs[0].free_before.step)
    assert [5, 4] == freed
