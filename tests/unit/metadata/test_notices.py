"""A node that will be taken away: its round ends after a saved step, others go on (ADR 0077)."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.metadata.launchers import Cluster, two_nodes

from holdfast.core.allocations import Allocation, Share
from holdfast.core.rounds import check
from holdfast.errors import InvalidRequestError
from holdfast_services.metadata.domain import notices, rounds
from holdfast_services.metadata.domain.launch import EndReason, RoundEnd
from holdfast_services.metadata.domain.rounds import Allocated, EndAsked, Gone, Reported, Silent


def trains(*names, least=1, **terms):
    """These train, and as many more may; a lost one is awaited for very long."""
    cluster = Cluster(nodes_min=least, nodes_max=len(names), shrink_after_s=900.0, **terms)
    for name in names:
        cluster.say(name)
    cluster.follow(*names)
    assert cluster.launch.on
    return cluster


@pytest.fixture
def three():
    return trains("aa", "bb", "cc")


def nodes(cluster):
    return [member.node for member in cluster.launch.members] if cluster.launch.on else []


def test_a_notice_ends_the_round_after_a_saved_step_and_others_go_on_at_once(three):
    three.say("bb", goes_in_s=30.0)

    asked = RoundEnd(reason=EndReason.NOTICE, asked_at_s=three.now_s, copied=True)
    assert asked == three.launch.end
    assert rounds.end_wanted(three.launch)
    assert three.view("bb").goes
    assert not three.view("aa").goes
    assert not three.view("bb").stop
    assert three.launch.number == 1, "until the step is saved"
    three.tick(5.0)
    assert asked == three.launch.end, "one wish, however old"

    three.tick(saved=True)

    assert ["aa", "cc"] == nodes(three)
    assert three.place("bb") is None
    assert three.launch.restarts_at_s == ()
    assert ["node_goes", "round_ended", "round_began"] == three.events[-3:]


def test_its_launcher_may_leave_then_and_nothing_happens(three):
    three.say("bb", goes_in_s=30.0)
    three.tick(saved=True)
    three.follow("aa", "cc")
    three.say("bb", stopping=True)
    three.say("bb", left=True)
    three.tick(60.0)

    assert (2, ["aa", "cc"]) == (three.launch.number, nodes(three))
    assert not three.launch.stopping


def test_who_waits_in_reserve_takes_the_place(three):
    three.say("dd")
    three.say("bb", goes_in_s=30.0)
    three.tick(saved=True)

    assert ["aa", "dd", "cc"] == nodes(three)


def test_with_too_few_others_all_save_and_end():
    two = two_nodes()
    two.say("bb", goes_in_s=30.0)

    assert two.launch.stopping
    assert two.view("aa").stop
    assert two.view("bb").stop
    assert "launch_stopping" == two.events[-1]
    assert not rounds.end_wanted(two.launch)


@pytest.mark.parametrize("how", [{"stopping": True}, {"goes_in_s": 60.0}])
def test_who_goes_or_ends_is_no_other(how):
    two = trains("aa", "bb", "cc", least=2)
    two.say("aa", **how)
    assert not two.launch.stopping
    two.say("bb", goes_in_s=30.0)

    assert two.launch.stopping


def test_who_was_left_out_is_no_other():
    cluster = trains("aa", "bb")
    out = replace(cluster.launch.launcher("aa" * 16), left_out="3 times", back_at_s=9000.0)
    cluster.launch = cluster.launch.having(out)
    cluster.say("bb", goes_in_s=30.0)

    assert cluster.launch.stopping


def test_two_that_go_at_once_go_together(three):
    three.say("bb", goes_in_s=30.0)
    three.say("cc", goes_in_s=90.0)
    three.tick(saved=True)

    assert ["aa"] == nodes(three)
    assert three.launch.number == 2


def test_a_notice_is_over_when_the_first_of_two_is(three):
    three.say("bb", goes_in_s=30.0)
    three.say("cc", goes_in_s=90.0)
    three.tick(29.9)
    assert not notices.is_over(three.launch, three.now_s)
    three.tick(0.1)
    assert notices.is_over(three.launch, three.now_s)

    three.tick(late=True)
    assert ["aa"] == nodes(three)


def test_a_repeat_makes_no_notice_later_and_another_may_make_it_earlier(three):
    three.say("bb", goes_in_s=30.0)
    at_s = three.launch.launcher("bb" * 16).goes_at_s
    assert at_s == three.now_s + 30.0
    three.now_s += 20.0
    three.feed(Reported(three.reports["bb"], "bb", "bb.example"))
    three.say("bb")
    assert at_s == three.launch.launcher("bb" * 16).goes_at_s
    three.say("bb", goes_in_s=1.0)

    assert three.now_s + 1.0 == three.launch.launcher("bb" * 16).goes_at_s
    assert 1 == three.events.count("node_goes")


def test_a_late_report_takes_no_notice_back(three):
    before = three.reports["bb"]
    three.say("bb", goes_in_s=30.0)
    three.feed(Reported(before, "bb", "bb.example"))

    assert three.view("bb").goes


def test_a_notice_that_is_taken_back_ends_no_round(three):
    three.say("bb", goes_in_s=30.0)
    three.say("bb", goes_in_s=0.0)
    assert not rounds.end_wanted(three.launch)
    three.tick(saved=True)
    assert three.launch.number == 1
    three.tick(taken_back=True)

    assert three.launch.end is None
    assert not three.view("bb").goes


def test_a_notice_while_the_round_ends_for_another_reason_makes_it_wait_for_copies():
    cluster = trains("aa", "bb")
    cluster.launch = replace(cluster.launch, terms=replace(cluster.terms, nodes_max=3))
    cluster.terms = cluster.launch.terms
    cluster.say("cc")
    assert EndReason.GROWTH is cluster.launch.end.reason
    cluster.say("bb", goes_in_s=30.0)

    assert EndReason.NOTICE is cluster.launch.end.reason
    assert cluster.launch.end.copied
    cluster.tick(saved=True)
    assert ["aa", "cc"] == nodes(cluster)


def test_a_notice_between_rounds_or_as_one_begins_keeps_the_node_out():
    cluster = Cluster(nodes_min=2, nodes_max=2)
    cluster.say("aa", goes_in_s=30.0)
    cluster.say("bb")
    assert not cluster.launch.on
    cluster.say("cc")
    assert ["bb", "cc"] == nodes(cluster)

    cluster.say("cc", goes_in_s=30.0)
    assert cluster.launch.stopping, "its ranks have not begun, and nobody else is here"


def test_a_notice_while_nodes_are_awaited_ends_no_launch():
    two = two_nodes()
    two.feed(Gone(frozenset({"aa" * 16})))
    two.say("bb", goes_in_s=30.0)
    assert not two.launch.stopping

    two.say("cc")
    two.say("dd")
    assert ["cc", "dd"] == sorted(nodes(two))


def test_a_node_in_reserve_that_goes_ends_no_round(three):
    three.say("dd", goes_in_s=30.0)

    assert three.view("dd").goes
    assert three.launch.end is None
    assert not three.launch.stopping


@pytest.mark.parametrize("event", [Gone, Silent])
def test_a_node_that_is_gone_before_its_time_ends_the_round_and_costs_no_restart(three, event):
    three.say("bb", goes_in_s=30.0)
    three.feed(event(frozenset({"bb" * 16})))

    assert (2, ["aa", "cc"]) == (three.launch.number, nodes(three))
    assert three.launch.restarts_at_s == ()
    assert "node_unheard" not in three.events


def test_a_rank_that_fails_meanwhile_begins_a_round_without_the_node(three):
    three.say("bb", goes_in_s=30.0)
    three.fail("aa", "killed by SIGKILL", outside=True)

    assert (2, ["aa", "cc"]) == (three.launch.number, nodes(three))


def test_no_time_is_left_where_nobody_is_heard(three):
    """Who is not heard would be given a place: another round begins once that is settled."""
    three.say("bb", goes_in_s=30.0)
    three.feed(Silent(frozenset({"cc" * 16})))
    three.tick(40.0, late=True)

    assert three.launch.number == 1


def test_late_ends_no_round_that_nobody_wants_to_end(three):
    three.tick(late=True)
    assert three.launch.number == 1


def test_who_asks_for_an_end_by_notice_without_one_ends_nothing(three):
    three.feed(EndAsked(reason=EndReason.NOTICE))
    assert not rounds.end_wanted(three.launch)


def test_of_an_allocation_those_that_stay_go_on_if_they_have_enough_ranks():
    def run(least):
        made = Cluster(nodes_min=1, nodes_max=8, allocated=True, shrink_after_s=900.0)
        shares = tuple(Share(node=node, ranks=2, devices=(0, 1)) for node in ("aa", "bb"))
        made.feed(Allocated(Allocation(number=1, ranks_min=least, shares=shares)))
        made.say("aa")
        made.say("bb")
        made.follow("aa", "bb")
        made.say("bb", goes_in_s=30.0)
        return made

    assert run(least=3).launch.stopping
    enough = run(least=2)
    enough.tick(saved=True)
    assert ["aa"] == nodes(enough)


def test_another_allocation_is_no_reason_to_wait_for_no_copies():
    made = Cluster(nodes_min=1, nodes_max=8, allocated=True)
    shares = [Share(node=node, ranks=2, devices=(0, 1)) for node in ("aa", "bb", "cc")]
    made.feed(Allocated(Allocation(number=1, ranks_min=2, shares=tuple(shares[:2]))))
    for name in ("aa", "bb", "cc"):
        made.say(name, warm=True)
    made.follow("aa", "bb")
    made.say("bb", goes_in_s=30.0)
    asked = made.launch.end
    made.feed(Allocated(Allocation(number=2, ranks_min=2, shares=(shares[0], shares[2]))))
    assert asked == made.launch.end

    made.tick(saved=True)
    assert ["aa", "cc"] == nodes(made)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 3601.0])
def test_a_notice_that_cannot_be_is_refused(three, seconds):
    with pytest.raises(InvalidRequestError, match="notice"):
        check(replace(three.reports["aa"], goes_in_s=seconds))
    check(replace(three.reports["aa"], goes_in_s=3600.0))


NAMES = st.sampled_from(["aa", "bb", "cc", "dd"])
TURNS = st.lists(
    st.tuples(st.sampled_from(["come", "go", "back", "leave", "die", "fail", "wait"]), NAMES),
    max_size=30,
)


def does(cluster, what, name):
    """Have a launcher do something, if it is there; nobody is there twice."""
    launcher = cluster.launch.launcher(name * 16)
    if what == "wait":
        cluster.tick(5.0, late=notices.is_over(cluster.launch, cluster.now_s + 5.0))
    elif what == "come":
        cluster.say(name, left=False, goes_in_s=0.0, failure=None)
    elif launcher is None:
        return
    elif what in SAYS:
        cluster.say(name, **SAYS[what])
    elif what == "die":
        cluster.feed(Gone(frozenset({launcher.id})))
    elif cluster.place(name):
        cluster.fail(name, "killed by SIGKILL", outside=True)


SAYS = {"go": {"goes_in_s": 10.0}, "back": {"goes_in_s": 0.0}, "leave": {"left": True}}


@settings(max_examples=60, deadline=None)
@given(TURNS)
def test_whoever_comes_and_goes_no_round_begins_with_a_node_that_goes(turns):
    cluster = Cluster(nodes_min=1, nodes_max=3, shrink_after_s=900.0)
    for what, name in turns:
        number = cluster.launch.number
        does(cluster, what, name)
        launch = cluster.launch
        if launch.stopping or launch.ending:
            return
        if launch.on and launch.number > number:
            assert not notices.who_go(launch)
            cluster.follow(*nodes(cluster))
        if launch.on and notices.who_go(launch):
            assert launch.end.reason is EndReason.NOTICE
            stay = [one for one in launch.launchers if not one.goes_at_s]
            assert stay, "else all are told to end"
