"""A round that goes well ends after a step that all ranks were told to save: none is lost."""

from dataclasses import replace

import pytest
from tests.unit.metadata.launchers import Cluster as Launches

from holdfast.core.abandoned_step import AbandonedStep
from holdfast.core.announcements import SaveReason
from holdfast_services.metadata.domain import rounds
from holdfast_services.metadata.domain.launch import EndReason, RoundEnd
from holdfast_services.metadata.domain.round_end import PATIENCE_S, is_safe
from holdfast_services.metadata.domain.rounds import EndAsked, Gone
from holdfast_services.metadata.domain.save_announcement import (
    LAST_AGAIN_S,
    LAST_NEWS_TRAVEL_S,
    LAST_NEWS_TRAVEL_S_MAX,
    NEWS_TRAVEL_S,
    PACE_S_MAX,
    STEPS_AHEAD_MIN,
    announce_last,
    take_back,
)

# --------------------------------------------------------------------------- of the launch


@pytest.fixture
def grows():
    """One node trains, and another waits."""
    cluster = Launches(nodes_min=1, nodes_max=3, shrink_after_s=0.0)
    cluster.say("aa")
    cluster.follow("aa")
    cluster.say("bb")
    return cluster


def test_who_comes_later_ends_the_round_once_a_last_step_is_safe(grows):
    assert grows.launch.end == RoundEnd(reason=EndReason.GROWTH, asked_at_s=grows.now_s)
    grows.tick(50)
    assert grows.launch.number == 1

    grows.tick(saved=True)

    assert (grows.place("aa").first_rank, grows.place("bb").first_rank) == (0, 2)
    assert grows.launch.end is None
    assert grows.launch.restarts_at_s == ()
    assert grows.events[-2:] == ["round_ended", "round_began"]


def test_who_has_left_again_ends_no_round(grows):
    grows.feed(Gone(frozenset({"bb" * 16})))
    assert not rounds.end_wanted(grows.launch)
    assert grows.launch.end is not None, "until ranks have been told that it does not end"

    grows.tick(saved=True)
    assert grows.launch.number == 1
    grows.tick(taken_back=True)

    assert grows.launch.end is None
    assert grows.launch.on


def test_who_comes_while_it_is_taken_back_ends_the_round(grows):
    grows.feed(Gone(frozenset({"bb" * 16})))
    grows.say("cc")

    grows.tick(taken_back=True)

    assert rounds.end_wanted(grows.launch)


def test_a_rank_that_fails_meanwhile_takes_in_who_waits(grows):
    grows.fail("aa", "killed by SIGKILL", outside=True)

    assert grows.place("bb") is not None
    assert grows.launch.end is None
    assert "round_ended" not in grows.events


@pytest.mark.parametrize("well", [True, False])
def test_a_launch_that_is_over_has_no_wish(grows, well):
    if well:
        grows.say("aa", finished=True)
    else:
        grows.launch = replace(grows.launch, terms=replace(grows.terms, restarts_max=0))
        grows.fail("aa", "killed by SIGKILL", outside=True)

    assert grows.launch.ending is not None
    assert grows.launch.end is None


def test_a_launch_that_stops_ends_no_round_first(grows):
    grows.say("bb", stopping=True)
    grows.say("cc")
    grows.say("aa", stopping=True)
    grows.say("cc", stopping=True)
    grows.tick(saved=True)

    assert grows.launch.number == 1


def test_a_round_is_ended_for_other_reasons_too():
    cluster = Launches()
    cluster.say("aa")
    cluster.say("bb")
    cluster.follow("aa", "bb")
    cluster.tick(saved=True)
    assert cluster.launch.number == 1

    cluster.feed(EndAsked(reason=EndReason.RESCALE, copied=True))
    assert cluster.launch.end.copied
    cluster.feed(EndAsked(reason=EndReason.RESCALE))
    assert cluster.launch.end.copied, "what the first one asked for holds"
    cluster.tick(taken_back=True)
    assert cluster.launch.end is not None, "nobody took it back"
    cluster.tick(saved=True)

    assert cluster.launch.number == 2
    assert cluster.launch.end is None


def test_whoever_asks_a_launch_that_stops_ends_no_round():
    cluster = Launches()
    cluster.say("aa")
    cluster.say("bb")
    cluster.follow("aa", "bb")
    cluster.feed(EndAsked(reason=EndReason.RESCALE))
    cluster.say("aa", stopping=True)
    assert cluster.launch.stopping

    cluster.tick(saved=True)
    assert cluster.launch.on, "it saves and ends by itself"
    cluster.feed(EndAsked(reason=EndReason.RESCALE))
    assert not rounds.end_wanted(cluster.launch)


def test_who_comes_meanwhile_changes_no_wish(grows):
    grows.feed(EndAsked(reason=EndReason.RESCALE, copied=True))
    before = grows.launch.end
    grows.tick(5)
    grows.say("cc")

    assert grows.launch.end == before


def test_between_two_rounds_there_is_nothing_to_end():
    cluster = Launches()
    cluster.say("aa")
    cluster.feed(EndAsked(reason=EndReason.RESCALE))

    assert cluster.launch.end is None


def test_a_wish_of_a_time_to_come_is_of_now(grows):
    grows.now_s -= 900.0
    grows.tick()

    assert grows.launch.end.asked_at_s == grows.now_s


# ------------------------------------------------------------------------------- of its runs


@pytest.fixture
def cluster(cluster):
    """One of which a launch wishes that its round ends, from now on."""
    cluster.end = RoundEnd(reason=EndReason.GROWTH, asked_at_s=cluster.now_s)
    return cluster


@pytest.fixture
def trains(cluster):
    cluster.join("n0", "n1")
    cluster.launch(b"first", "n0", "n1")
    at(cluster, 100, 103)
    return cluster


def at(cluster, *steps, **what):
    """Have ranks say that they have done these steps."""
    for rank, step in enumerate(steps):
        said = {"step_s": 0.5, "loaded": True, **what}
        cluster.status(f"n{rank}", rank, step=step, **said)
    cluster.report(*(f"n{rank}" for rank in range(len(steps))))


def announce(cluster):
    outcome = announce_last(cluster.run, cluster.nodes, cluster.now_s, cluster.end.asked_at_s)
    cluster.run = outcome.run
    cluster.events += outcome.events
    return cluster.run.announcement


def safe(cluster, **end):
    wish = replace(cluster.end, **end)
    return is_safe([cluster.run], cluster.nodes, wish, cluster.now_s)


def test_a_last_step_is_announced_ahead_and_ends_the_round_once_it_is_committed(trains):
    last = announce(trains)
    assert last.step == 103 + STEPS_AHEAD_MIN
    assert last.reason.ends_round
    assert "rank" not in trains.events[-1].context
    assert not safe(trains)

    trains.later(1.0)
    trains.commit(last.step - 1, trains.run.generation, "n0", "n1")
    at(trains, last.step, last.step)
    assert not safe(trains), "another step was committed"
    trains.commit(last.step, trains.run.generation, "n0", "n1")

    assert safe(trains)
    assert announce(trains) == last


def restore(cluster, step):
    """Have two ranks begin with a step of an attempt before, as the round is to end for a node."""
    cluster.join("n0", "n1")
    cluster.commit(step, cluster.launch(b"first", "n0", "n1"), "n0", "n1")
    cluster.launch(b"second", "n0", "n1")
    cluster.ready(("n0", 0), ("n1", 1))
    for rank in (0, 1):
        cluster.status(f"n{rank}", rank, loaded=True)
    cluster.report("n0", "n1")


def test_ranks_that_have_just_restored_are_told_of_a_step_that_is_still_to_come(cluster):
    """Until their first one is done they say that they have done none."""
    restore(cluster, step=40)
    assert cluster.run.decision.checkpoint.step == 40
    assert announce(cluster) is None, "nobody knows how long a step takes"

    at(cluster, 41, 41, step_s=0.0)
    cluster.later(PACE_S_MAX)
    assert announce(cluster) is None
    at(cluster, 42, 42)

    assert announce(cluster).step == 42 + STEPS_AHEAD_MIN


def test_where_one_step_takes_very_long_the_next_but_one_is_the_last(cluster):
    """A node comes back while the first one is done: it waits for two of them, not for twelve."""
    restore(cluster, step=40)
    cluster.later(PACE_S_MAX)

    assert announce(cluster).step == 40 + STEPS_AHEAD_MIN
    at(cluster, 41, 41, step_s=0.0)
    cluster.commit(41, cluster.run.generation, "n0", "n1")

    assert not safe(cluster), "it is not the one that all ranks end with"


def test_a_commit_that_is_known_before_its_ranks_have_said_the_step_ends_no_round(trains):
    """An agent finds what a rank has saved by itself, and may hear of the step later."""
    last = announce(trains)
    trains.later(1.0)
    trains.commit(104, trains.run.generation, "n0", "n1")
    trains.later(2.0)

    assert last.step > 104
    assert not safe(trains)


def test_one_rank_alone_makes_no_step_safe(trains):
    last = announce(trains)
    trains.hold("n0", last.step, trains.run.generation, 0)
    at(trains, last.step, last.step)

    assert not safe(trains)


def test_where_some_nodes_will_go_all_copies_are_made_first(trains):
    last = announce(trains)
    for rank, node in enumerate(("n0", "n1")):
        trains.hold(node, last.step, trains.run.generation, rank)
    at(trains, last.step, last.step)

    assert safe(trains)
    assert not safe(trains, copied=True)
    trains.commit(last.step, trains.run.generation, "n0", "n1")
    assert safe(trains, copied=True)


def test_while_ranks_wait_at_the_last_step_no_other_is_announced(trains):
    """They would take it for the news that they are to go on."""
    last = announce(trains)
    at(trains, last.step, last.step, save_interval_s=1.0)
    trains.later(60.0)
    trains.report("n0", "n1")

    assert trains.run.announcement == last


def test_a_step_that_is_announced_already_becomes_the_last_one(trains):
    """Else where one comes after the other there is never room for it."""
    at(trains, 110, 110, save_interval_s=1.0)
    trains.later(2.0)
    trains.report("n0", "n1")
    open_step = trains.run.announcement.step
    assert trains.run.announcement.reason is SaveReason.INTERVAL

    assert announce(trains).step == open_step
    assert trains.run.announcement.reason.ends_round


def test_a_step_that_a_rank_is_about_to_do_does_not_become_the_last_one(trains):
    at(trains, 110, 110, save_interval_s=1.0)
    trains.later(2.0)
    trains.report("n0", "n1")
    step = trains.run.announcement.step
    at(trains, step - STEPS_AHEAD_MIN, 110, save_interval_s=1.0)

    assert announce(trains).reason is SaveReason.INTERVAL
    at(trains, step, step)
    assert announce(trains).step > step
    assert trains.run.announcement.reason.ends_round


def test_a_save_before_the_end_of_a_process_is_not_changed(trains):
    at(trains, 110, 110, wants_save=SaveReason.PREEMPTION)

    assert announce(trains).reason is SaveReason.PREEMPTION


def test_of_quick_steps_as_many_are_left_as_are_done_while_the_news_travel(trains):
    at(trains, 110, 110, step_s=0.1)

    assert announce(trains).step == 110 + 1 + round(LAST_NEWS_TRAVEL_S / 0.1)


def give_up(cluster, step):
    """Have a rank hear too late of a step, and all go on."""
    cluster.abandon("n0", step, cluster.run.generation)
    at(cluster, step + 1, step + 1)


def test_after_a_last_step_that_was_given_up_another_one_leaves_more_time(trains):
    last = announce(trains)
    trains.now_s += 3.0
    give_up(trains, last.step)

    second = announce(trains)
    assert second.step == last.step + 1 + 1 + 6, "as long as it is asked for"
    assert second.reason.ends_round

    trains.now_s += 2.9
    give_up(trains, second.step)
    assert announce(trains) == second, "not before the wish is twice as old"
    trains.now_s += 0.1
    assert announce(trains).step == second.step + 1 + 1 + 12


def test_a_step_beyond_the_last_one_that_was_given_up_is_that_of_who_counts_by_tens(trains):
    last = announce(trains)
    give_up(trains, last.step + 7)

    assert announce(trains).step == last.step + 7 + 1 + 1 + round(NEWS_TRAVEL_S / 0.5)


def test_where_the_last_step_is_always_given_up_training_goes_on(trains):
    last = announce(trains)
    trains.now_s += 10 * LAST_AGAIN_S
    give_up(trains, last.step)
    second = announce(trains)
    assert second.step == last.step + 1 + 1 + round(LAST_NEWS_TRAVEL_S_MAX / 0.5)
    give_up(trains, second.step)
    trains.now_s += LAST_AGAIN_S - 0.1
    assert announce(trains) == second

    trains.now_s += 0.1
    assert announce(trains).step > second.step


def test_after_a_last_step_that_may_yet_be_committed_another_one_takes_its_time(trains):
    last = announce(trains)
    at(trains, last.step + 1, last.step + 1)
    assert announce(trains) == last

    trains.now_s += LAST_AGAIN_S
    at(trains, last.step + 1, last.step + 1)
    assert announce(trains).step > last.step


def test_what_another_attempt_gave_up_does_not_hurry_the_next_last_step(trains):
    last = announce(trains)
    dropped = AbandonedStep(
        run=trains.run.id, step=last.step, generation=trains.run.generation - 1, reason="late"
    )
    at(trains, last.step + 1, last.step + 1)
    trains.run = replace(trains.run, abandoned=(dropped,))

    assert announce(trains) == last


def test_a_later_step_is_as_good_where_the_last_one_took_too_long(trains):
    last = announce(trains)
    at(trains, last.step + 5, last.step + 5)
    trains.commit(last.step + 5, trains.run.generation, "n0", "n1")

    assert safe(trains)


def test_a_step_that_was_given_up_is_not_safe(trains):
    last = announce(trains)
    at(trains, last.step, last.step)
    trains.commit(last.step, trains.run.generation, "n0", "n1")
    key = trains.run.checkpoints[0].id
    dropped = AbandonedStep(run=key.run, step=key.step, generation=key.generation, reason="busy")
    trains.run = replace(trains.run, abandoned=(dropped,))

    assert not safe(trains)


def test_a_script_that_saves_by_itself_is_ended_after_its_next_save(cluster):
    """It calls ``save()`` and not ``step()``: its ranks say no step."""
    cluster.join("n0", "n1")
    generation = cluster.launch(b"first", "n0", "n1")
    cluster.commit(2, generation, "n0", "n1")
    cluster.later(1.0)
    cluster.end = RoundEnd(reason=EndReason.GROWTH, asked_at_s=cluster.now_s)
    cluster.later(PACE_S_MAX)
    assert announce(cluster).step > 3
    assert not safe(cluster), "it is older than the wish"

    cluster.later(1.0)
    cluster.commit(3, generation, "n0", "n1")
    assert not safe(cluster), "its ranks may be about to say that they did it"
    cluster.later(NEWS_TRAVEL_S + 0.1)

    assert safe(cluster)


def test_what_is_taken_back_is_saved_all_the_same(trains):
    last = announce(trains)
    trains.run = take_back(trains.run)

    assert trains.run.announcement.step == last.step
    assert not trains.run.announcement.reason.ends_round
    assert take_back(trains.run) == trains.run, "once"
    at(trains, last.step, last.step)
    trains.commit(last.step, trains.run.generation, "n0", "n1")
    assert not safe(trains)


def test_what_others_have_announced_is_not_taken_back(trains):
    at(trains, 110, 110, save_interval_s=1.0)
    trains.later(2.0)
    trains.report("n0", "n1")

    assert trains.run.announcement.reason is SaveReason.INTERVAL
    assert take_back(trains.run) == trains.run


def test_a_step_of_an_older_attempt_is_not_the_last_one(trains):
    last = announce(trains)
    at(trains, last.step, last.step)
    trains.commit(last.step, trains.run.generation, "n0", "n1")
    row = trains.run.checkpoints[0]
    older = replace(row, id=replace(row.id, generation=trains.run.generation - 1))
    trains.run = replace(trains.run, checkpoints=(older,))

    assert not safe(trains)


def test_nothing_is_announced_while_a_rank_restores(cluster):
    cluster.join("n0", "n1")
    cluster.register(0, "n0")
    cluster.report("n0")

    assert announce(cluster) is None


def test_all_runs_of_a_round_are_awaited_but_not_for_ever(trains):
    """And those that have closed are not: there is nothing that they could lose."""
    last = announce(trains)
    other = trains.run
    at(trains, last.step, last.step)
    trains.commit(last.step, trains.run.generation, "n0", "n1")
    runs, nodes = [trains.run, other], trains.nodes

    assert not is_safe(runs, nodes, trains.end, trains.now_s)
    assert is_safe(runs, nodes, trains.end, trains.now_s + PATIENCE_S + 1)
    closed = replace(other, ranks=tuple(replace(rank, live=False) for rank in other.ranks))
    assert is_safe([trains.run, closed], nodes, trains.end, trains.now_s)
    assert not is_safe([closed], nodes, trains.end, trains.now_s + PATIENCE_S + 1)
    assert not is_safe([], nodes, trains.end, trains.now_s)
