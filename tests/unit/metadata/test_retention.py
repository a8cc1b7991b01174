"""What a policy keeps, example by example; the laws are in tests/property/test_retention.py."""

from dataclasses import replace

import pytest

from holdfast.core.ids import CheckpointId
from holdfast.core.persistence_rules import Retention
from holdfast.errors import InvalidRequestError
from holdfast_services.metadata.domain.retention import Candidate, check, metric_of, plan

NOW_S = 1_000_000.0


def stored(step, generation=1, **facts):
    key = CheckpointId("run0", step, generation)
    times = {"committed_at_s": NOW_S - 10_000 + step, "durable_at_s": NOW_S - 9_000 + step}
    return Candidate(id=key, **{**times, **facts})


def kept(items, policy, now_s=NOW_S):
    return [verdict.id.step for verdict in plan(items, policy, now_s) if verdict.keep]


def why(items, policy, step):
    return next(v.why for v in plan(items, policy, NOW_S) if v.id.step == step)


TEN = tuple(stored(step) for step in range(100, 1100, 100))


@pytest.mark.parametrize(
    "policy", [None, Retention(), Retention(metric="loss"), Retention(age_s_min=1.0)]
)
def test_without_a_rule_everything_is_kept(policy):
    """F87: neither a metric nor an age alone is a rule."""
    assert 10 == len(kept(TEN, policy))
    assert "no rule: everything is kept" in why(TEN, policy, 100)


def test_the_last_ones_are_kept():
    """F87."""
    assert [1000, 900, 800] == kept(TEN, Retention(last=3))
    assert "one of the last 3" == why(TEN, Retention(last=3), 800)
    assert "no rule keeps it" == why(TEN, Retention(last=3), 700)


def test_multiples_are_kept_and_so_is_the_newest():
    """F87: the newest that can be restored stays, whatever the rules name."""
    assert [1000, 900, 600, 300] == kept(TEN, Retention(every=300))
    assert "the newest that can be restored" == why(TEN, Retention(every=300), 1000)


def test_rules_are_a_union():
    """F87."""
    assert [1000, 900, 500] == kept(TEN, Retention(last=2, every=500))
    assert "one of the last 2, a multiple of 500" in why(TEN, Retention(last=2, every=500), 1000)


def test_the_best_are_kept_and_one_without_the_metric_is_not_among_them():
    """F87: NaN and infinity are no measurements."""
    losses = {100: 0.5, 200: 0.1, 300: None, 400: 0.3, 500: 0.2}
    items = [stored(step, metric=loss) for step, loss in losses.items()]

    assert [500, 200] == kept(items, Retention(best=1, metric="loss"))
    assert [500, 100] == kept(items, Retention(best=1, metric="loss", maximize=True))
    assert [500, 400, 200, 100] == kept(items, Retention(best=9, metric="loss"))
    assert "one of the best 1 by loss (0.1)" == why(items, Retention(best=1, metric="loss"), 200)


def test_of_equally_good_ones_the_newer_is_kept():
    items = [stored(step, metric=1.0) for step in (100, 200, 300)]

    assert [300, 200] == kept([*items, stored(50)], Retention(best=2, metric="loss"))


def test_one_per_span_of_time_is_kept_and_stays_when_later_ones_come():
    """F87: the first of each span."""
    times = {1: 0.0, 2: 50.0, 3: 120.0, 4: 130.0, 5: 199.0, 6: 450.0}
    items = [stored(step, committed_at_s=at_s) for step, at_s in times.items()]
    policy = Retention(spaced_s=100.0)

    assert [6, 3, 1] == kept(items, policy)
    assert [7, 6, 3, 1] == kept([*items, stored(7, committed_at_s=460.0)], policy)


def test_nothing_younger_than_the_age_goes():
    items = [stored(1, durable_at_s=NOW_S - 61), stored(2, durable_at_s=NOW_S - 59), stored(3)]

    assert [3, 2] == kept(items, Retention(last=1, age_s_min=60.0))


def test_a_clock_that_jumped_costs_age_no_more_than_the_jump():
    """One clock: forward by 30 s, what is 30 s short of the age goes; back, nothing goes."""
    items = [stored(age, durable_at_s=NOW_S - age) for age in (10, 29, 31, 59, 61)] + [stored(99)]
    policy = Retention(last=1, age_s_min=60.0)

    assert [99, 59, 31, 29, 10] == kept(items, policy)
    assert [99, 29, 10] == kept(items, policy, NOW_S + 30)
    assert [99, 61, 59, 31, 29, 10] == kept(items, policy, NOW_S - 30)


def test_a_checkpoint_of_the_future_is_young():
    """A clock that went back left times behind that are yet to come: nothing is concluded."""
    items = [stored(1, durable_at_s=NOW_S + 1e6, committed_at_s=NOW_S + 1e6), stored(2)]

    assert [2, 1] == kept(items, Retention(last=1, age_s_min=60.0))
    assert [2] == kept(items, Retention(last=1))


def test_neither_superseded_nor_bad_ones_count_or_go():
    """P1, F70: last=2 means two that can be restored; what cannot be stays to be looked at."""
    items = [stored(1), stored(2), stored(3), stored(4, superseded=True), stored(5, bad=True)]

    assert [5, 4, 3, 2] == kept(items, Retention(last=2))
    assert "superseded" == why(items, Retention(last=2), 4)
    assert "bad, kept for a look at it" == why(items, Retention(last=2), 5)


def test_what_somebody_holds_stays_and_the_reason_names_them():
    """G11: a pin, a reader or a restore outweighs every rule."""
    items = [replace(item, holds=("pinned: paper",)) if item.id.step == 200 else item
             for item in TEN]  # fmt: skip

    assert [1000, 200] == kept(items, Retention(last=1))
    assert "pinned: paper" == why(items, Retention(last=1), 200)


def test_the_newer_generation_of_a_step_is_the_newest():
    items = [stored(5, generation=1), stored(5, generation=2)]
    verdicts = plan(items, Retention(every=1000), NOW_S)

    assert [(2, True), (1, False)] == [(v.id.generation, v.keep) for v in verdicts]


@pytest.mark.parametrize(
    ("notes", "value"),
    [
        ('{"loss": 0.25}', 0.25),
        ('{"loss": 3}', 3.0),
        ('{"loss": NaN}', None),
        ('{"loss": -Infinity}', None),
        ('{"loss": true}', None),
        ('{"loss": "0.1"}', None),
        ('{"loss": 1' + "0" * 400 + "}", None),
        ('{"other": 1}', None),
        ("[1]", None),
        ("{", None),
        ("", None),
    ],
)
def test_a_metric_is_a_finite_number_in_the_notes(notes, value):
    assert value == metric_of(notes, "loss")


@pytest.mark.parametrize(
    "numbers",
    [
        {"last": -1},
        {"every": 10**15},
        {"spaced_s": float("nan")},
        {"spaced_s": 0.1},
        {"age_s_min": float("inf")},
        {"best": 1},
        {"best": 1, "metric": "m" * 200},
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(numbers):
    with pytest.raises(InvalidRequestError):
        check(Retention(**numbers))
