"""Rounds: what late, odd or unlucky launchers must not do to those who train."""

import pytest
from tests.unit.metadata.launchers import Cluster, two_nodes

from holdfast_services.metadata.domain.rounds import Gone


@pytest.fixture
def two():
    return two_nodes()


def test_who_is_done_saving_ends_no_round_of_those_who_still_save(two):
    """It was told to end by way of the launch, so it does not say itself that it stops."""
    two.say("aa", stopping=True)
    two.say("bb", left=True)

    assert two.view("aa").stop
    assert two.launch.restarts_at_s == ()
    assert "round_failed" not in two.events
    assert two.launch.number == 1


def test_nobody_is_taken_in_by_a_launch_that_ends():
    cluster = Cluster(nodes_min=2, nodes_max=4, shrink_after_s=0.0)
    for name in ("aa", "bb"):
        cluster.say(name)
    cluster.follow("aa", "bb")
    cluster.say("cc")
    cluster.say("aa", stopping=True)
    cluster.say("bb", stopping=True)
    assert cluster.launch.stopping

    cluster.tick(saved=True)
    cluster.say("dd")

    assert cluster.launch.on, "who saves yet is not disturbed"
    assert cluster.launch.launcher("dd" * 16) is None
    assert not cluster.view("dd").stop, "it waits for the next launch"


def test_a_clock_that_is_set_back_makes_nobody_wait_for_it(two):
    for _ in range(2):
        two.follow("aa", "bb")
        two.fail("aa", "killed by SIGKILL", outside=True)
    two.follow("aa", "bb")
    assert not two.launch.on, "there is a pause"

    two.now_s -= 900.0
    two.tick()
    two.tick(30.0)
    assert two.launch.on

    shrinks = Cluster(nodes_min=1, shrink_after_s=5.0)
    shrinks.now_s = 10_000.0
    shrinks.say("aa")
    shrinks.now_s -= 3600.0
    shrinks.tick()
    assert shrinks.launch.launcher("aa" * 16).joined_at_s == shrinks.now_s
    shrinks.tick(5.0)
    assert shrinks.launch.on


def test_who_waits_in_reserve_moves_no_round():
    """Neither by what it says of one that it does not run, nor by its end, nor by a saved step."""
    cluster = Cluster()
    for name in ("aa", "bb", "cc"):
        cluster.say(name)
    cluster.follow("aa", "bb", "cc")

    cluster.fail("cc", "killed by SIGKILL", outside=True)
    cluster.tick(saved=True)
    assert cluster.launch.number == 1
    cluster.fail("bb", "killed by SIGKILL", outside=True)
    assert [member.launcher for member in cluster.launch.members] == ["aa" * 16, "bb" * 16]
    cluster.feed(Gone(frozenset({"cc" * 16})))

    assert cluster.launch.number == 2
    assert cluster.launch.on


def test_who_is_not_known_and_has_left_does_not_come():
    cluster = Cluster(nodes_min=1)
    cluster.say("aa", left=True)

    assert cluster.launch.launchers == ()


def test_the_end_of_a_node_is_the_cause_that_was_awaited():
    cluster = Cluster()
    for name in ("aa", "bb", "cc"):
        cluster.say(name)
    cluster.follow("aa", "bb")
    cluster.fail("aa", "RuntimeError: Connection closed by peer", of_peer=True)
    cluster.follow("aa")

    cluster.feed(Gone(frozenset({"bb" * 16})))

    assert cluster.place("cc").first_rank == 2


def test_a_node_that_is_lost_in_a_pause_does_not_end_it():
    cluster = Cluster()
    for name in ("aa", "bb", "cc"):
        cluster.say(name)
    for _ in range(2):
        cluster.follow("aa", "bb")
        cluster.fail("aa", "killed by SIGKILL", outside=True)
    cluster.follow("aa", "bb")
    assert not cluster.launch.on

    cluster.feed(Gone(frozenset({"bb" * 16})))
    assert not cluster.launch.on
    cluster.tick(1.1)
    assert cluster.launch.on


def test_two_that_lost_a_peer_wait_for_the_third():
    cluster = Cluster(nodes_min=3, nodes_max=3)
    for name in ("aa", "bb", "cc"):
        cluster.say(name)
    cluster.follow("aa", "bb", "cc")
    for name in ("aa", "bb"):
        cluster.fail(name, "RuntimeError: Connection closed by peer", of_peer=True)

    assert cluster.launch.cause_awaited
    assert not cluster.launch.on


def test_a_rank_that_fails_while_all_are_told_to_end_counts_for_nothing(two):
    two.say("aa", stopping=True)

    two.fail("bb", "exit code 143")

    assert two.launch.on, "the other saves on"
    assert two.launch.restarts_at_s == ()


def test_a_launch_is_told_to_end_only_by_who_trains():
    cluster = Cluster()
    for name in ("aa", "bb", "cc"):
        cluster.say(name)
    cluster.follow("aa", "bb")
    cluster.say("aa", stopping=True)
    cluster.say("cc", stopping=True)
    assert not cluster.launch.stopping

    over = Cluster()
    over.say("aa")
    over.say("bb")
    over.feed(Gone(frozenset({"bb" * 16})))
    over.say("aa", stopping=True)
    assert not over.launch.stopping


def test_the_wait_for_more_nodes_begins_when_there_are_enough():
    cluster = Cluster(nodes_min=2, nodes_max=3, shrink_after_s=10.0)
    cluster.say("aa")
    cluster.say("bb")
    cluster.tick(5)
    cluster.feed(Gone(frozenset({"bb" * 16})))
    cluster.tick(20)

    cluster.say("cc")
    assert not cluster.launch.on
    cluster.tick(10)
    assert cluster.launch.on


def test_who_ended_well_in_the_last_round_has_not_in_this_one(two):
    two.say("aa", finished=True)
    two.fail("bb", "killed by SIGKILL", outside=True)
    two.follow("bb")
    assert two.launch.on

    two.say("bb", finished=True)

    assert two.view("bb").ending is None, "the ranks of the other begin just now"


def test_restarts_of_a_time_to_come_are_none_of_the_last_hour():
    cluster = Cluster(restarts_max=1)
    cluster.now_s = 10_000.0
    cluster.say("aa")
    cluster.say("bb")
    for _ in range(2):
        cluster.follow("aa", "bb")
        cluster.fail("aa", "killed by SIGKILL", outside=True)
        cluster.now_s -= 5000.0

    assert cluster.view("aa").ending is None
