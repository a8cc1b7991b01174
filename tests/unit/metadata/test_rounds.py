"""Rounds: who takes part, in which order, and what a failure leads to."""

from dataclasses import replace

import pytest
from tests.unit.metadata.launchers import LEASE_S, Cluster, two_nodes

from holdfast.core.rounds import RankFailure
from holdfast.errors import AlreadyExistsError
from holdfast_services.metadata.domain.rounds import Gone, Reported


@pytest.fixture
def two():
    return two_nodes()


def test_a_round_begins_once_all_nodes_are_here():
    cluster = Cluster()
    cluster.say("aa")
    assert cluster.place("aa") is None
    assert "1 of 2 are here" in cluster.view("aa").waiting

    cluster.say("bb")

    first, second = cluster.place("aa"), cluster.place("bb")
    assert (first.first_rank, second.first_rank, first.world_size) == (0, 2, 4)
    assert (second.master_address, second.master_port) == ("aa.example", 7000)
    assert first.nonce == second.nonce
    assert cluster.events == ["round_began"]


def test_a_rank_that_was_killed_begins_the_next_round_at_once_with_the_same_ranks(two):
    before = two.place("aa"), two.place("bb")

    two.fail("bb", "killed by SIGKILL", outside=True)

    after = two.place("aa"), two.place("bb")
    assert [place.first_rank for place in after] == [place.first_rank for place in before]
    assert {place.round for place in after} == {2}
    assert after[0].nonce != before[0].nonce
    assert after[0].master_port != before[0].master_port, "old ranks must not meet new ones"


def test_no_round_begins_on_the_port_of_the_last_one():
    cluster = Cluster()
    cluster.say("aa")
    cluster.say("bb")
    cluster.say("bb", round=cluster.launch.nonce)

    cluster.fail("bb", "killed by SIGKILL", outside=True)
    assert cluster.place("bb") is None

    assert cluster.view("aa").port_taken == 7000
    cluster.say("aa", port=7001)
    assert cluster.place("bb").master_port == 7001


def test_what_is_said_of_an_older_round_counts_for_nothing(two):
    two.fail("bb", "killed by SIGKILL", outside=True)
    two.follow("aa", "bb")
    old = f"{two.launch.id}.1"

    two.say("aa", round=old, failure=RankFailure(rank=0, code=-9, reason="late", outside=True))
    two.say("aa", round=old, finished=True, failure=None)
    two.say("bb", round=old, finished=True)
    two.say("bb", round=two.launch.nonce, finished=True, failure=None)

    assert two.launch.number == 2
    assert two.launch.on, "rank 0 of this round runs"


def test_doubled_and_late_reports_change_nothing(two):
    late = two.reports["aa"]
    two.fail("aa", "killed by SIGKILL", outside=True)
    two.follow("aa", "bb")
    before = two.launch

    two.feed(Reported(two.reports["aa"], "aa", "aa.example"))
    two.feed(Reported(late, "aa", "aa.example"))

    assert two.launch == before


def test_the_same_exception_at_the_same_step_twice_in_a_row_ends_the_launch(two):
    two.fail("aa", step=12, detail="Traceback ...")
    two.follow("aa", "bb")
    two.fail("aa", step=12, detail="Traceback ...")

    ending = two.view("bb").ending
    assert ending.code == 1
    assert "rank 0: ValueError: no at step 12" in ending.reason
    assert ending.reason.endswith("Traceback ...")
    assert two.place("aa") is None


@pytest.mark.parametrize(
    "second",
    [{"step": 13}, {"step": 12, "reason": "KeyError: 1"}, {"step": 12, "outside": True}],
)
def test_another_exception_or_another_step_begins_another_round(two, second):
    two.fail("aa", step=12)
    two.follow("aa", "bb")
    two.fail("aa", **second)

    assert two.view("aa").ending is None


def test_restarts_are_counted_by_the_hour():
    cluster = Cluster(restarts_max=2)
    cluster.say("aa")
    cluster.say("bb")
    for number in range(4):
        cluster.follow("aa", "bb")
        cluster.tick(2000)
        assert cluster.view("aa").ending is None, number
        cluster.fail("aa", "killed by SIGKILL", outside=True)
    for _ in range(2):
        cluster.follow("aa", "bb")
        cluster.tick(100)
        cluster.fail("aa", "killed by SIGKILL", outside=True)

    assert "--max-restarts" in cluster.view("aa").ending.reason


def test_rounds_that_fail_at_once_are_begun_ever_more_rarely(two):
    two.fail("aa", "killed by SIGKILL", outside=True)
    assert two.launch.on, "the first one at once"
    two.follow("aa", "bb")
    two.fail("aa", "killed by SIGKILL", outside=True)
    assert not two.launch.on
    two.follow("aa", "bb")
    two.tick(1.1)
    assert two.launch.on
    two.follow("aa", "bb")
    two.fail("aa", "killed by SIGKILL", outside=True)
    two.follow("aa", "bb")
    two.tick(1.1)
    assert not two.launch.on
    two.tick(1.0)
    assert two.launch.on


def test_who_lost_a_peer_waits_to_hear_who_failed_first(two):
    two.fail("aa", "RuntimeError: Connection closed by peer", of_peer=True)
    assert not two.launch.on
    assert "which node failed" in two.view("aa").waiting

    two.fail("bb", "killed by SIGKILL", outside=True)

    assert two.launch.on
    assert len(two.launch.restarts_at_s) == 1


def test_nobody_waits_for_the_cause_for_longer_than_a_lease(two):
    two.fail("aa", "RuntimeError: Connection closed by peer", of_peer=True)
    two.follow("aa", "bb")

    two.tick(LEASE_S)

    assert two.launch.on
    assert not two.launch.cause_awaited


def test_a_cause_that_comes_second_is_the_users_if_it_repeats(two):
    for _ in range(2):
        two.fail("aa", "RuntimeError: Connection closed by peer", of_peer=True)
        two.fail("bb", step=5)
        two.follow("aa", "bb")

    assert two.view("aa").ending is not None


def test_a_node_in_place_of_a_lost_one_takes_its_ranks(two):
    two.feed(Gone(frozenset({"aa" * 16})))
    assert two.place("bb") is None

    two.say("cc")

    assert two.place("cc").first_rank == 0
    assert two.place("bb").first_rank == 2


def test_a_launcher_that_is_started_again_on_its_node_gets_its_ranks_back():
    cluster = Cluster(nodes_min=3, nodes_max=3)
    for name in ("aa", "bb", "cc"):
        cluster.say(name)
    cluster.feed(Gone(frozenset({"aa" * 16, "bb" * 16})))
    cluster.say("dd", node="bb")
    cluster.say("ee", node="aa", port=7100)

    assert cluster.place("ee").first_rank == 0
    assert cluster.place("dd").first_rank == 2


def test_a_spare_takes_over_at_once():
    cluster = Cluster()
    for name in ("aa", "bb", "cc"):
        cluster.say(name)
    assert "in reserve" in cluster.view("cc").waiting
    cluster.follow("aa", "bb", "cc")

    cluster.feed(Gone(frozenset({"aa" * 16})))

    assert cluster.place("cc").first_rank == 0


def test_fewer_nodes_go_on_after_a_while():
    cluster = Cluster(nodes_min=1, shrink_after_s=10.0)
    cluster.say("aa")
    assert cluster.place("aa") is None
    cluster.say("bb")
    cluster.follow("aa", "bb")
    cluster.tick(100)

    cluster.feed(Gone(frozenset({"aa" * 16})))
    cluster.tick(9)
    assert cluster.place("bb") is None
    cluster.tick(1)

    assert cluster.place("bb").world_size == 2
    cluster.follow("bb")
    cluster.tick(100)
    cluster.fail("bb", "killed by SIGKILL", outside=True)
    assert cluster.launch.on, "as many as before: nothing is waited for"


def test_who_comes_late_waits_for_a_saved_step():
    cluster = Cluster(nodes_min=1, shrink_after_s=0.0)
    cluster.say("aa")
    cluster.follow("aa")
    cluster.say("bb")
    cluster.tick(50)
    assert cluster.place("bb") is None
    assert "a step that all ranks save" in cluster.view("bb").waiting

    cluster.tick(saved=True)

    assert (cluster.place("aa").first_rank, cluster.place("bb").first_rank) == (0, 2)


def test_a_saved_step_alone_ends_no_round(two):
    two.tick(saved=True)

    assert two.launch.number == 1
    assert two.launch.on


def test_a_second_launcher_on_one_node_is_refused_while_the_first_lives(two):
    with pytest.raises(AlreadyExistsError, match="node aa has a launcher ") as refused:
        two.say("cc", node="aa")
    assert float(refused.value.context["lease_s"]) > 0

    two.feed(Gone(frozenset({"aa" * 16})))
    two.say("cc", node="aa", port=7100)
    assert two.place("cc").first_rank == 0


def test_another_command_under_the_same_name_is_refused(two):
    two.terms = replace(two.terms, command="beef")

    with pytest.raises(AlreadyExistsError, match="another command"):
        two.say("cc")


def test_a_launcher_that_was_given_up_and_wakes_up_is_told_to_kill_its_ranks(two):
    two.feed(Gone(frozenset({"aa" * 16})))
    two.say("cc")
    assert two.launch.number == 2

    two.say("aa", finished=True)

    assert two.place("aa") is None, "its round is over"
    assert two.launch.on, "what it says of it counts for nothing"


def test_a_launch_ends_when_all_ranks_have_ended_well(two):
    two.say("aa", finished=True)
    assert two.view("aa").ending is None

    two.say("bb", finished=True)

    assert two.view("aa").ending.code == 0
    two.say("cc")
    assert "is ending" in two.view("cc").waiting
    assert two.view("cc").ending is None
    two.say("aa", left=True)
    two.say("bb", left=True)
    two.say("cc")
    assert two.launch.id.startswith("cc" * 8)
    assert two.launch.number == 0


def test_a_rank_that_fails_after_others_have_ended_restarts_them_too(two):
    two.say("aa", finished=True)

    two.fail("bb", "killed by SIGKILL", outside=True)
    two.follow("aa", "bb")
    two.say("bb", finished=True)

    assert two.view("bb").ending is None


def test_who_is_told_to_end_ends_all_if_too_few_were_left(two):
    two.say("aa", stopping=True)

    assert two.view("bb").stop
    two.fail("aa", "exit code 143")
    assert two.launch.number == 1


def test_who_is_told_to_end_leaves_alone_if_enough_go_on():
    cluster = Cluster(nodes_min=1, shrink_after_s=5.0)
    cluster.say("aa")
    cluster.say("bb")
    cluster.follow("aa", "bb")

    cluster.say("aa", stopping=True)
    cluster.fail("aa", "exit code 143")
    assert not cluster.view("bb").stop
    assert cluster.place("bb")
    cluster.say("aa", left=True)

    assert cluster.place("bb") is None
    assert cluster.launch.restarts_at_s == ()
    cluster.tick(5)
    assert cluster.place("bb").world_size == 2


def test_who_waits_and_is_told_to_end_stops_nobody():
    cluster = Cluster(nodes_min=3, nodes_max=3)
    cluster.say("aa")
    cluster.say("bb")

    cluster.say("aa", stopping=True)
    cluster.say("aa", left=True)

    assert not cluster.view("bb").stop


def test_a_launcher_that_was_given_up_alone_begins_a_launch_with_other_nonces():
    """Else the next rounds would have the names of old ones, and their ranks be fenced."""
    cluster = Cluster(nodes_min=1, nodes_max=1)
    cluster.say("aa")
    cluster.follow("aa")
    first = cluster.launch.nonce
    cluster.feed(Gone(frozenset({"aa" * 16})))
    cluster.tick(1)

    cluster.say("aa")

    assert cluster.launch.number == 1
    assert cluster.launch.nonce != first
