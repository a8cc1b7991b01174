"""Steps announced for all ranks: all of them save, or all abandon."""

import random

import pytest

from holdfast.core.announcements import SaveReason
from holdfast.errors import PreconditionError
from holdfast_services.metadata.domain.save_announcement import (
    STEPS_AHEAD_MAX,
    STEPS_AHEAD_MIN,
    announce_asked,
)


def start(cluster, steps, **status):
    nodes = [f"n{rank}" for rank in range(len(steps))]
    cluster.join(*nodes)
    generation = cluster.launch(b"first", *nodes)
    for rank, step in enumerate(steps):
        cluster.status(nodes[rank], rank, step=step, **status)
    cluster.report(*nodes)
    return generation


def announced_step(cluster):
    return cluster.run.announcement.step if cluster.run.announcement else 0


def test_a_step_is_announced_ahead_of_the_fastest_rank(cluster):
    """F22, F27."""
    start(cluster, [100, 103], step_s=0.5, save_interval_s=10.0)
    assert cluster.run.announcement is None

    cluster.later(10.0)
    cluster.report("n0", "n1")

    assert cluster.run.announcement.step == 103 + STEPS_AHEAD_MIN + 2


def test_no_step_is_announced_while_one_is_open(cluster):
    start(cluster, [100, 100], step_s=1.0, wants_save=SaveReason.PREEMPTION)
    announced = cluster.run.announcement.step
    cluster.status("n0", 0, step=announced + 5)
    cluster.report("n0")
    assert cluster.run.announcement.step == announced

    cluster.status("n1", 1, step=announced)
    cluster.report("n1")

    assert cluster.run.announcement.step > announced + 5


def test_very_fast_steps_are_announced_a_bounded_way_ahead(cluster):
    start(cluster, [100, 100], step_s=1e-9, wants_save=SaveReason.PREEMPTION)

    assert cluster.run.announcement.step == 100 + STEPS_AHEAD_MIN + STEPS_AHEAD_MAX


def test_nothing_is_announced_until_every_rank_has_said_where_it_is(cluster):
    cluster.join("a", "b")
    cluster.register(0, "a")
    cluster.status("a", 0, step=9, wants_save=SaveReason.PREEMPTION, step_s=1.0)
    cluster.report("a")
    cluster.later(11.0)
    cluster.report("a")

    assert cluster.run.announcement is None


@pytest.mark.parametrize("seed", range(6))
def test_ranks_of_different_speed_all_save_or_all_abandon(cluster, seed):
    """4.1: news travels slowly to some; a rank that hears too late says so."""
    rng = random.Random(seed)
    nodes = [f"n{rank}" for rank in range(3)]
    generation = start(cluster, [0, 0, 0], step_s=0.2, save_interval_s=1.0)
    steps, heard, handled = [0, 0, 0], [0, 0, 0], [0, 0, 0]
    announced = set()
    for _ in range(120):
        rank = rng.randrange(3)
        if rng.random() < 0.3:
            heard[rank] = announced_step(cluster)
        steps[rank] += rng.randrange(1, 4)
        target = heard[rank]
        if target > handled[rank]:
            if steps[rank] == target:
                cluster.hold(nodes[rank], target, generation, rank, world=3)
                handled[rank] = target
            elif steps[rank] > target:
                cluster.abandon(nodes[rank], target, generation, "heard too late")
                handled[rank] = target
        cluster.status(nodes[rank], rank, step=steps[rank], step_s=0.2, save_interval_s=1.0)
        cluster.later(0.1)
        cluster.report(*nodes)
        announced.add(announced_step(cluster))
        dropped = {item.step for item in cluster.run.abandoned}
        committed = {row.id.step for row in cluster.run.checkpoints}
        assert not dropped & committed
        assert committed <= announced
    assert len(announced) > 2
    assert cluster.run.checkpoints or cluster.run.abandoned


@pytest.mark.parametrize("step_s", [5e-324, 1e-300])
def test_no_step_is_so_short_that_announcing_fails(cluster, step_s):
    """The division by it overflowed, and with it the tick of all jobs."""
    start(cluster, [100, 100], step_s=step_s, wants_save=SaveReason.USER)

    assert cluster.run.announcement.step == 100 + STEPS_AHEAD_MIN + STEPS_AHEAD_MAX


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"save_interval_s": 1.0}, SaveReason.INTERVAL),
        ({"save_interval_s": 1.0, "interval_reason": SaveReason.INTERVAL}, SaveReason.INTERVAL),
        ({"save_interval_s": 1.0, "interval_reason": SaveReason.AUTO}, SaveReason.AUTO),
        ({"wants_save": SaveReason.USER}, SaveReason.USER),
        ({"wants_save": SaveReason.OPERATOR}, SaveReason.OPERATOR),
        ({"wants_save": SaveReason.RESCALE}, SaveReason.RESCALE),
        ({"wants_save": SaveReason.PREEMPTION, "save_interval_s": 1.0}, SaveReason.PREEMPTION),
    ],
)
def test_an_announcement_says_why(cluster, said, reason):
    start(cluster, [100, 100], step_s=1.0, **said)
    cluster.later(1.0)
    cluster.report("n0", "n1")

    assert reason is cluster.run.announcement.reason
    told = [event for event in cluster.events if event.kind == "save_announced"]
    by_clock = reason in (SaveReason.INTERVAL, SaveReason.AUTO)
    assert [] == told if by_clock else [reason.name.lower()] == [e.context["reason"] for e in told]
    assert by_clock or reason.text in told[0].message


def test_of_several_reasons_the_one_that_leaves_least_time_is_announced(cluster):
    nodes = ["n0", "n1"]
    cluster.join(*nodes)
    cluster.launch(b"first", *nodes)
    cluster.status("n0", 0, step=9, step_s=1.0, wants_save=SaveReason.USER)
    cluster.status("n1", 1, step=9, step_s=1.0, wants_save=SaveReason.PREEMPTION)
    cluster.report("n1", "n0")

    assert SaveReason.PREEMPTION is cluster.run.announcement.reason
    assert ["1"] == [e.context["rank"] for e in cluster.events if e.kind == "save_announced"]


def asked(cluster):
    return announce_asked(cluster.run, cluster.nodes, cluster.now_s)


def test_an_operator_has_all_ranks_save_a_step_ahead_of_the_fastest(cluster):
    start(cluster, [100, 103], step_s=0.5)
    outcome = asked(cluster)

    assert 103 + STEPS_AHEAD_MIN + 2 == outcome.run.announcement.step
    assert SaveReason.OPERATOR is outcome.run.announcement.reason
    assert cluster.now_s == outcome.run.announced_at_s
    [event] = outcome.events
    assert {"run": cluster.run.id, "step": "107", "reason": "operator"} == event.context
    assert event.message.endswith("save step 107: an operator asked for it")


def test_a_step_that_is_announced_will_do_for_an_operator_and_keeps_its_reason(cluster):
    start(cluster, [100, 100], step_s=1.0, wants_save=SaveReason.PREEMPTION)
    outcome = asked(cluster)

    assert cluster.run == outcome.run
    assert () == outcome.events


def test_an_operator_gets_another_step_once_the_last_one_was_passed(cluster):
    start(cluster, [100, 100], step_s=1.0, wants_save=SaveReason.USER)
    before = cluster.run.announcement.step
    for rank in range(2):
        cluster.status(f"n{rank}", rank, step=before)
        cluster.report(f"n{rank}")
    outcome = asked(cluster)

    assert before + STEPS_AHEAD_MIN < outcome.run.announcement.step


def test_nobody_is_asked_while_a_rank_is_missing(cluster):
    """P1: a step that one rank does not save is none."""
    cluster.join("a", "b")
    with pytest.raises(PreconditionError, match="not all ranks of it train"):
        asked(cluster)
    cluster.register(0, "a")
    cluster.status("a", 0, step=9, step_s=1.0)
    cluster.report("a")
    with pytest.raises(PreconditionError, match="holdfast ls"):
        asked(cluster)
