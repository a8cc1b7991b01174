"""Rounds: who takes part, in which order, and what a failure leads to."""

from dataclasses import replace

import pytest

from holdfast.core.rounds import LauncherReport, RankFailure, Terms
from holdfast.errors import AlreadyExistsError
from holdfast_services.metadata.domain import rounds
from holdfast_services.metadata.domain.launch import Launch
from holdfast_services.metadata.domain.rounds import Gone, Reported, Tick

LEASE_S = 3.0


class Cluster:
    """Launchers by name, each on a node of that name unless said otherwise."""

    def __init__(self, **terms):
        self.now_s = 1000.0
        self.launch = Launch(job="gpt")
        self.terms = Terms(command="c0ffee", **{"nodes_min": 2, "nodes_max": 2, **terms})
        self.reports = {}
        self.events = []

    def feed(self, event):
        self.launch, news = rounds.handle(self.launch, event, now_s=self.now_s, lease_s=LEASE_S)
        self.events += [event.kind for event in news]

    def say(self, name, node=None, **what):
        last = self.reports.get(name) or LauncherReport(
            launcher=name * 16, sequence=0, job="gpt", terms=self.terms, port=7000, ranks=2
        )
        renewed = what.get("round", last.round) != last.round
        what = {"port": last.port + renewed, **what}
        report = replace(last, sequence=last.sequence + 1, **what)
        self.reports[name] = report
        self.feed(Reported(report, node or name, f"{node or name}.example"))
        return report

    def follow(self, *names):
        """Have launchers begin the round that they are told of."""
        for name in names:
            self.say(name, round=self.launch.nonce, finished=False, failure=None)

    def fail(self, name, reason="ValueError: no", **what):
        failure = RankFailure(rank=0, code=1, reason=reason, **what)
        self.say(name, failure=failure)

    def tick(self, seconds=0.0, **what):
        self.now_s += seconds
        self.feed(Tick(**what))

    def place(self, name):
        return self.launch.place(name * 16)

    def view(self, name):
        return rounds.view(self.launch, name * 16, lease_s=LEASE_S)


@pytest.fixture
def two():
    cluster = Cluster()
    cluster.say("aa")
    cluster.say("bb")
    cluster.follow("aa", "bb")
    return cluster


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
    assert "saved" in cluster.view("bb").waiting

    cluster.tick(saved=True)

    assert (cluster.place("aa").first_rank, cluster.place("bb").first_rank) == (0, 2)


def test_a_saved_step_alone_ends_no_round(two):
    two.tick(saved=True)

    assert two.launch.number == 1
    assert two.launch.on


def test_a_second_launcher_on_one_node_is_refused_while_the_first_lives(two):
    with pytest.raises(AlreadyExistsError, match="node aa has a launcher"):
        two.say("cc", node="aa")

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


def test_who_waits_is_who_may_be_taken_in():
    cluster = Cluster(nodes_min=1, nodes_max=3, shrink_after_s=0.0)
    cluster.say("aa")
    cluster.follow("aa")
    cluster.say("bb")
    cluster.say("bb", stopping=True)
    cluster.tick(50)
    cluster.say("cc")

    assert rounds.waits_since_s(cluster.launch) == cluster.now_s


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
