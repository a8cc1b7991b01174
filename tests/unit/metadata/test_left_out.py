"""A node that is bad from the start is left out, and does not use up the restarts of a launch."""

import pytest
from tests.unit.metadata.launchers import Cluster

from holdfast_services.metadata.domain.left_out import EARLY_MAX, EARLY_S, LEFT_OUT_S
from holdfast_services.metadata.domain.rounds import Gone

KILLED = "killed by SIGKILL"


def cluster_of(*names, **terms):
    cluster = Cluster(**{"nodes_min": 1, "nodes_max": 2, "shrink_after_s": 1.0, **terms})
    cluster.names = names
    for name in names:
        cluster.say(name)
    begin(cluster)
    return cluster


def begin(cluster):
    """Have the next round begin, after its pause, with all who have a place."""
    cluster.tick(60.0)
    cluster.follow(*(name for name in cluster.names if cluster.place(name)))


def fail(cluster, name, times, reason=KILLED, **what):
    for _ in range(times):
        begin(cluster)
        cluster.fail(name, reason, **{"outside": reason == KILLED, **what})


def test_a_node_that_fails_before_its_first_step_again_and_again_is_left_out():
    cluster = cluster_of("aa", "bb", restarts_max=EARLY_MAX)
    fail(cluster, "bb", EARLY_MAX)

    cluster.tick(1.0)
    assert cluster.launch.on, "the other one goes on"
    assert cluster.place("bb") is None
    assert cluster.place("aa").world_size == 2
    assert "left out" in cluster.view("bb").waiting
    assert KILLED in cluster.view("bb").waiting
    assert cluster.events.count("node_left_out") == 1
    assert cluster.launch.restarts_at_s == (), "the job has not paid for it"
    cluster.tick(60.0)
    assert cluster.launch.end is None, "nor is it taken in"


def test_an_exception_that_only_one_node_has_leaves_it_out_instead_of_ending_the_launch():
    cluster = cluster_of("aa", "bb")
    fail(cluster, "bb", 2, "RuntimeError: CUDA error")

    assert cluster.view("aa").ending is None
    assert cluster.place("bb") is None

    begin(cluster)
    cluster.fail("aa", "RuntimeError: CUDA error")

    assert cluster.view("aa").ending is not None, "it is the script's, since another has it too"


def test_what_left_a_node_out_is_remembered_for_the_others():
    """It was of no round's cause before: killed at first, then by an exception."""
    cluster = cluster_of("aa", "bb")
    fail(cluster, "bb", EARLY_MAX - 1)
    fail(cluster, "bb", 1, "exit code 3")
    assert cluster.place("bb") is None

    begin(cluster)
    cluster.fail("aa", "exit code 3")

    assert cluster.view("aa").ending is not None


def test_who_is_left_takes_no_pause_for_the_one_that_is_left_out():
    cluster = cluster_of("aa", "bb", "cc", nodes_max=3)
    for _ in range(EARLY_MAX):
        begin(cluster)
        cluster.fail("bb", KILLED, outside=True)
    cluster.tick(1.0)

    assert cluster.launch.on
    assert cluster.place("bb") is None
    cluster.follow("aa", "cc")
    cluster.fail("aa", KILLED, outside=True)
    assert cluster.launch.on, "nor for its failures when another one fails"


def test_a_spare_takes_the_place_of_one_that_is_left_out():
    cluster = cluster_of("aa", "bb", "cc", nodes_min=2)
    assert cluster.place("cc") is None
    fail(cluster, "bb", EARLY_MAX)

    assert cluster.place("cc") is not None
    assert cluster.place("bb") is None


def test_nobody_is_left_out_whom_the_launch_needs():
    cluster = cluster_of("aa", "bb", nodes_min=2, restarts_max=EARLY_MAX)
    fail(cluster, "bb", EARLY_MAX)
    begin(cluster)
    assert cluster.place("bb") is not None

    cluster.fail("bb", KILLED, outside=True)

    assert "--max-restarts" in cluster.view("aa").ending.reason


def test_an_exception_that_comes_twice_ends_a_launch_that_needs_the_node():
    cluster = cluster_of("aa", "bb", nodes_min=2)
    fail(cluster, "bb", 2, "ValueError: no")

    assert cluster.view("aa").ending is not None


@pytest.mark.parametrize("between", ["step", "late", "other"])
def test_only_failures_in_a_row_count(between):
    """Neither one after a step, nor one long after the start, nor one of another node is early."""
    cluster = cluster_of("aa", "bb")
    fail(cluster, "bb", EARLY_MAX - 1)
    begin(cluster)
    if between == "late":
        cluster.tick(EARLY_S)
    who, step = ("aa" if between == "other" else "bb"), (5 if between == "step" else -1)
    cluster.fail(who, "exit code 3", step=step, outside=True)
    fail(cluster, "bb", EARLY_MAX - 1)
    begin(cluster)

    assert cluster.place("bb") is not None


def test_who_lost_a_peer_is_not_the_bad_one():
    """The others speak first, each time; what went first is told after."""
    cluster = cluster_of("aa", "bb", restarts_max=EARLY_MAX)
    for _ in range(EARLY_MAX):
        begin(cluster)
        cluster.fail("aa", "RuntimeError: Connection closed by peer", of_peer=True)
        cluster.fail("bb", KILLED, outside=True)
    assert "waiting for nodes" in cluster.view("aa").waiting, "the cause is known"
    cluster.tick(1.0)

    assert cluster.place("bb") is None
    assert cluster.place("aa") is not None, "nor does it wait for more than other nodes"
    assert cluster.launch.restarts_at_s == ()


def test_where_leaving_one_out_does_not_help_the_restarts_are_used_up():
    """A script that needs too much memory fails on every node."""
    cluster = cluster_of("aa", "bb", "cc", nodes_max=3, restarts_max=EARLY_MAX)
    fail(cluster, "cc", EARLY_MAX)
    fail(cluster, "bb", EARLY_MAX)
    begin(cluster)
    assert cluster.place("bb") is not None

    cluster.fail("bb", KILLED, outside=True)

    assert "--max-restarts" in cluster.view("aa").ending.reason


def test_a_node_is_tried_again_after_an_hour_and_at_once_by_another_launcher():
    cluster = cluster_of("aa", "bb")
    fail(cluster, "bb", EARLY_MAX)
    begin(cluster)
    cluster.tick(LEFT_OUT_S)
    assert cluster.launch.end is not None, "it is to be taken in at a saved step"
    cluster.tick(saved=True)
    assert cluster.place("bb") is not None

    again = cluster_of("aa", "bb")
    fail(again, "bb", EARLY_MAX)
    begin(again)
    again.feed(Gone(frozenset({"bb" * 16})))
    again.say("cc", node="bb")
    assert again.launch.end is not None


def test_a_clock_that_is_set_back_leaves_nobody_out_for_longer():
    cluster = cluster_of("aa", "bb")
    fail(cluster, "bb", EARLY_MAX)
    begin(cluster)
    cluster.now_s -= 500_000.0
    cluster.tick()
    cluster.tick(LEFT_OUT_S)

    assert cluster.launch.launcher("bb" * 16).left_out == ""
