"""How many copies the nodes at hand allow, what is said of it, and what may be freed meanwhile."""

import pytest

from holdfast.core.protection import Copies
from holdfast_services.metadata.domain.shortage import NODE_AWAITED_S
from holdfast_services.metadata.edges.documents import job_doc


def save(cluster, step, generation, *nodes, copies=True):
    """Every node saves its rank's shard; with ``copies`` all hold all."""
    for rank, owner in enumerate(nodes):
        for node in nodes if copies else (owner,):
            cluster.hold(node, step, generation, rank, owner=owner, world=len(nodes))
    cluster.report(*nodes)


def told(cluster, node="a"):
    return cluster.view(node).runs[0].shortage


def kept(cluster, node="a"):
    return cluster.view(node).runs[0].free_before.step


def test_a_job_on_one_node_stays_local_and_is_told_once(cluster):
    """P1, F54; defect X9: saves go on, older slots are freed by what there is."""
    cluster.join("a")
    generation = cluster.launch(b"first", "a", replicas=2)
    for step in (5, 6):
        save(cluster, step, generation, "a")

    assert cluster.levels() == {(5, generation): "local", (6, generation): "local"}
    assert kept(cluster) == 6
    assert told(cluster) == "replicas=2 needs 3 live nodes, but only 1 is there"
    doc = job_doc(cluster.run, cluster.world())
    assert (doc.replicas, doc.replicas_allowed, doc.newest_replicated_step) == (2, 0, None)
    assert doc.shortage == told(cluster)
    assert cluster.kinds().count("replication_cut") == 1


def test_without_replicas_replicated_comes_with_local(cluster):
    """F54: nothing was asked for, nothing is missing."""
    cluster.join("a")
    generation = cluster.launch(b"first", "a", replicas=0)
    save(cluster, 5, generation, "a")

    assert cluster.levels() == {(5, generation): "replicated"}
    assert told(cluster) == ""
    assert "replication_cut" not in cluster.kinds()


def test_as_many_copies_as_there_is_room_for_are_made_before_older_slots_go(cluster):
    """P5, 4.7; defect X9: two copies asked for, one can be made, none is no reason to free."""
    cluster.join("a", "b")
    generation = cluster.launch(b"first", "a", "b", replicas=2)
    save(cluster, 5, generation, "a", "b")
    save(cluster, 6, generation, "a", "b", copies=False)

    assert set(cluster.levels().values()) == {"local"}
    assert cluster.view("a").runs[0].copies == Copies(1)
    assert kept(cluster) == 5
    save(cluster, 6, generation, "a", "b")
    assert kept(cluster) == 6


def test_a_node_that_joins_makes_steps_replicated_again(cluster):
    """F54: the shortage ends with its cause."""
    cluster.join("a")
    generation = cluster.launch(b"first", "a")
    save(cluster, 5, generation, "a")
    cluster.join("b")
    cluster.hold("b", 5, generation, 0, owner="a", world=1)
    cluster.report("b")

    assert told(cluster) == ""
    assert cluster.levels() == {(5, generation): "replicated"}


def test_a_lost_node_is_waited_for_before_a_shortage_is_told(cluster):
    """X9: an agent that only restarts ends no wait for copies; the page knows at once."""
    cluster.join("a", "b")
    generation = cluster.launch(b"first", "a", "b")
    save(cluster, 5, generation, "a", "b")

    for _ in range(int(NODE_AWAITED_S) - 1):
        cluster.later(1.0)
        cluster.report("a")
    assert told(cluster) == ""
    assert job_doc(cluster.run, cluster.world()).shortage != ""
    cluster.later(1.0)
    cluster.report("a")
    assert told(cluster) == "replicas=1 needs 2 live nodes, but only 1 is there"


@pytest.mark.parametrize(("second", "level"), [("left", "local"), ("right", "replicated")])
def test_two_nodes_of_one_failure_domain_count_once(cluster, second, level):
    """F54, F55; defect X9."""
    cluster.machine("a", "left")
    cluster.machine("b", second)
    cluster.join("a", "b")
    generation = cluster.launch(b"first", "a", "b", replica_domain="rack")
    save(cluster, 5, generation, "a", "b")

    assert cluster.levels() == {(5, generation): level}
    lacks = "replicas=1 needs 2 live failure domains (rack), but only 1 is there"
    assert told(cluster) == (lacks if level == "local" else "")


def test_a_lost_node_does_not_free_the_last_checkpoint_that_is_whole(cluster):
    """P5, 4.7; defect X9: the newest step lost a shard with the node, the one before did not."""
    cluster.join("a", "b")
    generation = cluster.launch(b"first", "a", "b")
    save(cluster, 20, generation, "a", "b")
    save(cluster, 30, generation, "a", "b", copies=False)

    cluster.later(6.0)
    cluster.report("a")

    assert kept(cluster) == 20
