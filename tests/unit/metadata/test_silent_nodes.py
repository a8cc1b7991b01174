"""A node that is not heard: its ranks may train on, so its round does until another can begin."""

from dataclasses import replace

import pytest
from tests.unit.metadata.launchers import LEASE_S, Cluster, two_nodes

from holdfast.core.allocations import Allocation, Share
from holdfast.errors import AlreadyExistsError
from holdfast_services.metadata.domain import round_view
from holdfast_services.metadata.domain.launch import EndReason
from holdfast_services.metadata.domain.rounds import (
    QUICK_S,
    SILENT_S_MAX,
    Allocated,
    EndAsked,
    Gone,
    Reported,
    Silent,
)


@pytest.fixture
def two():
    return two_nodes()


def lose(cluster, *names):
    """Have the leases of launchers run out."""
    cluster.feed(Silent(frozenset(name * 16 for name in names)))


def silence(cluster, seconds, *names):
    """Have that last: each tick finds the leases run out once more."""
    for _ in range(10):
        lose(cluster, *names)
        cluster.tick(seconds / 10)


def silent(cluster):
    return [one.node for one in cluster.launch.silent]


def test_a_round_goes_on_when_a_node_that_was_not_heard_is_again(two):
    nonce = two.launch.nonce
    lose(two, "bb")
    two.tick(600.0)
    assert (two.place("aa").nonce, two.place("bb").nonce) == (nonce, nonce)
    assert "node bb is not heard" in two.view("aa").waiting
    assert "node bb is not heard" in round_view.awaited(two.launch)

    two.say("bb")
    two.tick(600.0)

    assert two.place("aa").nonce == two.place("bb").nonce == nonce
    assert not silent(two)
    assert not two.view("aa").waiting
    assert two.launch.restarts_at_s == ()
    assert two.events[-2:] == ["node_unheard", "node_heard"]


def test_a_report_that_was_heard_before_is_a_sign_of_life(two):
    """A launcher that has nothing new to tell asks with the report that it sent last."""
    lose(two, "bb")
    two.feed(Reported(two.reports["bb"], "bb", "bb.example"))
    assert not silent(two)


def test_a_lease_that_runs_out_is_told_once(two):
    for _ in range(3):
        lose(two, "bb")
        two.tick(LEASE_S)
    assert two.events.count("node_unheard") == 1


def test_a_node_in_reserve_takes_over_at_once(two):
    two.say("cc")
    lose(two, "bb")

    assert two.launch.number == 2
    assert two.place("cc").node_rank == 1
    assert two.place("bb") is None
    assert two.launch.failure.reason == "node bb is lost"
    assert len(two.launch.restarts_at_s) == 1
    assert "node_unheard" not in two.events


def test_a_node_that_comes_takes_the_place_of_one_that_is_not_heard(two):
    lose(two, "bb")
    two.tick(600.0)
    two.say("cc")

    assert two.launch.number == 2
    assert two.place("cc").node_rank == 1
    two.say("bb")
    assert two.place("bb") is None
    assert "reserve" in two.view("bb").waiting


def test_a_launcher_that_is_started_again_on_its_node_takes_its_place(two):
    lose(two, "bb")
    two.say("cc", node="bb")

    assert two.launch.number == 2
    assert two.place("cc").node_rank == 1
    with pytest.raises(AlreadyExistsError, match="node bb"):
        two.say("bb")


def test_fewer_nodes_go_on_after_as_long_as_others_are_waited_for():
    cluster = Cluster(nodes_min=1, nodes_max=2, shrink_after_s=20.0)
    cluster.say("aa")
    cluster.say("bb")
    cluster.follow("aa", "bb")
    cluster.tick(600.0)
    silence(cluster, 19.0, "bb")
    assert cluster.place("bb") is not None

    cluster.tick(1.0)

    assert cluster.launch.number == 2
    assert [member.node for member in cluster.launch.members] == ["aa"]
    assert [one.node for one in cluster.launch.launchers] == ["aa"]


def test_the_wait_for_nodes_begins_anew_with_each_silence():
    cluster = Cluster(nodes_min=1, nodes_max=2, shrink_after_s=20.0)
    cluster.say("aa")
    cluster.say("bb")
    cluster.follow("aa", "bb")
    for _ in range(3):
        silence(cluster, 19.0, "bb")
        assert cluster.launch.number == 1
        cluster.say("bb")


def test_who_takes_no_part_prolongs_no_wait_by_going():
    cluster = Cluster(nodes_min=1, nodes_max=3, shrink_after_s=20.0)
    cluster.say("aa")
    cluster.say("bb")
    cluster.tick(19.0)
    lose(cluster, "bb")
    cluster.tick(1.0)
    assert [member.node for member in cluster.launch.members] == ["aa"]


def test_who_took_part_in_a_round_that_is_over_prolongs_no_wait_by_going():
    cluster = Cluster(nodes_min=1, nodes_max=3, shrink_after_s=20.0)
    for name in ("aa", "bb", "cc"):
        cluster.say(name)
    cluster.follow("aa", "bb", "cc")
    cluster.tick(600.0)
    cluster.feed(Gone(frozenset({"bb" * 16})))
    cluster.tick(19.0)
    lose(cluster, "cc")
    cluster.tick(1.0)
    assert [member.node for member in cluster.launch.members] == ["aa"]


def test_of_two_that_are_not_heard_both_are_given_up():
    cluster = Cluster(nodes_min=1, nodes_max=3, shrink_after_s=20.0)
    for name in ("aa", "bb", "cc"):
        cluster.say(name)
    cluster.follow("aa", "bb", "cc")
    cluster.tick(600.0)
    lose(cluster, "bb", "cc")
    cluster.tick(20.0)
    assert [member.node for member in cluster.launch.members] == ["aa"]
    assert cluster.launch.failure.reason == "node bb, cc is lost"


def test_a_rank_that_fails_ends_the_round_without_who_is_not_heard(two):
    lose(two, "bb")
    two.fail("aa", "killed by SIGKILL", outside=True)

    assert not two.launch.on
    assert [one.node for one in two.launch.launchers] == ["aa"]
    two.say("bb")
    assert two.launch.number == 2


def test_who_lost_a_peer_need_not_wait_to_hear_that_its_node_is_not_heard(two):
    lose(two, "bb")
    two.fail("aa", "connection closed by peer", of_peer=True)
    two.say("cc")
    assert two.launch.number == 2


def test_a_round_of_which_all_are_not_heard_goes_on_when_they_are(two):
    nonce = two.launch.nonce
    lose(two, "aa", "bb")
    two.say("aa")
    two.say("bb")
    assert two.place("aa").nonce == two.place("bb").nonce == nonce


def test_one_that_comes_where_nobody_is_heard_ends_no_round_that_it_cannot_follow(two):
    lose(two, "aa", "bb")
    two.say("cc")
    assert two.place("aa").round == 1
    assert silent(two) == ["aa", "bb"]


def test_another_launch_may_have_the_name_of_one_that_nobody_hears(two):
    lose(two, "aa")
    two.terms = two.terms.__class__(command="other", nodes_min=1, nodes_max=1)
    with pytest.raises(AlreadyExistsError, match="another command"):
        two.say("cc")
    assert silent(two) == ["aa"]

    lose(two, "bb")
    two.say("dd")

    assert [one.node for one in two.launch.launchers] == ["dd"]
    assert two.place("dd").round == 1


def test_a_node_whose_agent_is_away_for_hours_trains_on(two):
    silence(two, 3 * SILENT_S_MAX, "bb")
    assert two.launch.number == 1
    assert two.launch.on


def test_nobody_is_awaited_for_ever(two):
    silence(two, SILENT_S_MAX - 1.0, "aa", "bb")
    assert two.launch.launchers
    two.tick(1.0)
    assert two.launch.launchers == ()


def test_who_has_no_part_in_the_round_is_dropped_at_once(two):
    two.say("cc")
    lose(two, "cc")
    assert [one.node for one in two.launch.launchers] == ["aa", "bb"]
    assert two.launch.number == 1
    two.feed(Gone(frozenset({"bb" * 16})))
    lose(two, "aa")
    assert two.launch.launchers == (), "no rank of theirs trains"


def test_one_that_has_ended_well_without_being_heard_ends_the_launch(two):
    two.say("aa", finished=True)
    lose(two, "bb")
    two.tick(600.0)
    two.say("bb", finished=True)
    assert two.launch.ending.code == 0


def test_a_wish_to_end_the_round_outlives_a_silence(two):
    two.feed(EndAsked(reason=EndReason.RESCALE))
    lose(two, "bb")
    two.tick(10.0)
    two.say("bb")
    two.tick(saved=True)
    assert two.launch.number == 2


def test_a_clock_that_is_set_back_does_not_prolong_a_silence(two):
    two.tick(600.0)
    lose(two, "aa", "bb")
    two.now_s -= 500.0
    two.tick()
    two.tick(SILENT_S_MAX)
    assert two.launch.launchers == ()


def test_a_restart_that_is_one_too_many_is_none_if_the_node_comes_back():
    cluster = Cluster(restarts_max=0)
    cluster.say("aa")
    cluster.say("bb")
    cluster.follow("aa", "bb")
    lose(cluster, "bb")
    cluster.tick(600.0)
    assert cluster.launch.ending is None
    cluster.say("bb")
    lose(cluster, "bb")
    cluster.say("cc")
    assert cluster.launch.ending is None, "ranks that are well are not ended by it"
    cluster.fail("aa", "closed by peer", of_peer=True)
    assert "restarts in the last hour" in cluster.launch.ending.reason


def test_an_allocation_without_the_node_begins_at_once():
    cluster = Cluster(allocated=True)
    cluster.feed(Allocated(Allocation(number=1, shares=shares("aa", "bb"), ranks_min=2)))
    for name in ("aa", "bb", "cc"):
        cluster.say(name)
    cluster.follow("aa", "bb")
    cluster.tick(600.0)
    lose(cluster, "bb")
    cluster.tick(1.0)
    assert cluster.place("bb") is not None

    cluster.feed(Allocated(Allocation(number=2, shares=shares("aa", "cc"), ranks_min=2)))

    assert [member.node for member in cluster.launch.members] == ["aa", "cc"]
    assert cluster.launch.number == 2


def shares(*nodes):
    return tuple(Share(node=node, ranks=2) for node in nodes)


def test_a_lost_node_is_given_up_though_another_one_comes_and_goes():
    cluster = Cluster(nodes_min=1, nodes_max=3, shrink_after_s=20.0)
    for name in ("aa", "bb", "cc"):
        cluster.say(name)
    cluster.follow("aa", "bb", "cc")
    cluster.tick(600.0)
    lose(cluster, "bb")
    for _ in range(3):
        lose(cluster, "bb", "cc")
        cluster.tick(10.0)
        cluster.say("cc")
    assert cluster.place("bb") is None


def test_the_cause_that_is_told_is_the_node_and_no_older_failure(two):
    two.fail("aa", "MemoryError: old", outside=True, step=3)
    two.tick(60.0)
    two.follow("aa", "bb")
    two.tick(600.0)
    lose(two, "bb")
    two.events.clear()
    two.fail("aa", "closed by peer", of_peer=True)
    assert two.launch.failure.reason == "node bb is lost"
    assert "round_failed" in two.events


def test_nobody_is_told_that_a_round_goes_on_which_is_over_or_ends(two):
    ended, stops = two, two_nodes()
    ended.say("aa", finished=True)
    ended.say("bb", finished=True)
    stops.say("aa", stopping=True)
    for cluster in (ended, stops):
        lose(cluster, "bb")
        assert silent(cluster) == ["bb"]
        assert "not heard" not in round_view.awaited(cluster.launch)
        assert "node_unheard" not in cluster.events


@pytest.mark.parametrize("alone", [False, True])
def test_who_was_not_heard_when_the_launch_ended_is_told_how(two, alone):
    two.say("bb", finished=True)
    lose(two, "bb")
    two.say("aa", finished=True)
    if alone:
        two.say("aa", left=True)
    silence(two, 60.0, "bb")
    two.say("bb")
    assert two.view("bb").ending.code == 0


def test_a_launch_that_has_ended_and_that_nobody_is_heard_of_keeps_no_name(two):
    two.say("aa", finished=True)
    two.say("bb", finished=True)
    lose(two, "bb")
    two.say("cc")
    assert silent(two) == ["bb"], "aa is there still, and the name its"

    two.say("aa", left=True)
    two.say("cc")
    assert [one.node for one in two.launch.launchers] == ["cc"]


@pytest.mark.parametrize("alone", [False, True])
def test_who_is_not_heard_may_save_when_all_are_told_to_end(two, alone):
    lose(two, "bb")
    two.say("aa", stopping=True)
    if alone:
        two.say("aa", left=True)
    silence(two, 60.0, "bb")
    two.say("bb")
    assert two.view("bb").stop


@pytest.mark.parametrize("reason", EndReason)
def test_a_step_that_is_saved_ends_no_round_when_no_other_can_begin(two, reason):
    two.feed(EndAsked(reason=reason))
    lose(two, "bb")
    two.tick(1.0, saved=True)
    assert two.launch.on


def test_a_round_is_not_over_before_another_may_begin_after_its_pause(two):
    for step in range(4):
        two.fail("aa", "killed by SIGKILL", outside=True, step=step)
        two.tick(30.0)
        two.follow("aa", "bb")
    two.launch = replace(two.launch, quick_count=2, began_at_s=two.now_s)
    lose(two, "bb")
    two.say("cc")
    assert two.launch.number == 5
    assert two.launch.on

    two.tick(QUICK_S)
    assert two.launch.number == 6
    assert two.launch.on


def test_a_silent_node_counts_as_one_that_may_go_on_without_a_bad_one():
    cluster = Cluster(nodes_min=2, nodes_max=3, shrink_after_s=1.0)
    for name in ("aa", "bb", "cc"):
        cluster.say(name)
    cluster.follow("aa", "bb", "cc")
    cluster.fail("cc", "RuntimeError: CUDA error")
    cluster.tick(40.0)
    cluster.follow("aa", "bb", "cc")
    lose(cluster, "bb")
    cluster.fail("cc", "RuntimeError: CUDA error")
    assert cluster.launch.ending is None


def test_an_allocation_waits_for_who_was_just_named():
    cluster = Cluster(allocated=True, nodes_min=1, nodes_max=4, shrink_after_s=20.0)
    cluster.feed(Allocated(Allocation(number=1, shares=shares("aa", "bb"), ranks_min=4)))
    cluster.say("aa")
    cluster.say("bb")
    cluster.follow("aa", "bb")
    cluster.tick(600.0)
    lose(cluster, "bb")
    cluster.tick(100.0)
    newer = Allocation(number=2, shares=shares("aa", "bb", "cc"), ranks_min=2)
    cluster.feed(Allocated(newer))
    assert cluster.launch.number == 1
    cluster.tick(20.0)
    assert [member.node for member in cluster.launch.members] == ["aa"]


def test_of_many_that_are_not_heard_one_is_named():
    cluster = Cluster(nodes_min=3, nodes_max=3)
    for name in ("aa", "bb", "cc"):
        cluster.say(name)
    cluster.follow("aa", "bb", "cc")
    lose(cluster, "bb", "cc")
    assert "node bb and 1 more is not heard" in cluster.view("aa").waiting
