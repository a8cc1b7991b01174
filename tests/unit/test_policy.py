"""Policies are values: due steps, announced intervals, signals."""

import math
import signal

import pytest

from holdfast import (
    AnyOf,
    AtExit,
    Auto,
    EverySeconds,
    EverySteps,
    Never,
    OnPreemption,
    Parity,
    Replicas,
    Retention,
)
from holdfast.core import protection
from holdfast.core.announcements import SaveReason
from holdfast.core.failure_record import FailureRecord
from holdfast.core.persistence_rules import PersistRule
from holdfast.core.save_interval import Observed
from holdfast.errors import InvalidRequestError
from holdfast.policy import Policy, chosen_interval, grace_s, persist_rule, protection_of


def test_every_steps_is_due_at_multiples_only():
    """F23"""
    assert [step for step in range(1, 10) if EverySteps(3).due(step)] == [3, 6, 9]


def test_any_of_joins_steps_intervals_and_signals():
    """F22, F24"""
    policy = AnyOf(EverySteps(4), EverySeconds(30), EverySeconds(10), OnPreemption(grace_s=7))

    assert policy.due(8)
    assert not policy.due(9)
    assert policy.interval_s(Observed()) == 10
    assert policy.signals() == {signal.SIGTERM, signal.SIGINT}
    assert grace_s(policy) == 7


def test_any_of_within_any_of_is_as_if_all_were_in_one():
    """F22, F24: a grace period that was lost ended the process before its last save."""
    inner = AnyOf(Auto(), OnPreemption(grace_s=7))
    policy = AnyOf(inner, EverySteps(4))

    assert policy == AnyOf(Auto(), OnPreemption(grace_s=7), EverySteps(4))
    assert grace_s(policy) == 7
    assert chosen_interval(policy, Observed()).reason is SaveReason.AUTO
    assert persist_rule(AnyOf(AnyOf(EverySteps(5)), EverySeconds(9))).steps == 5


@pytest.mark.parametrize("part", [Auto, 5, None, [EverySteps(1)], "Auto()"])
def test_any_of_refuses_what_is_no_policy(part):
    """Else training finds out at its first step."""
    with pytest.raises(InvalidRequestError, match="AnyOf takes policies"):
        AnyOf(EverySteps(4), part)


def test_a_time_that_no_float_can_hold_is_refused():
    with pytest.raises(InvalidRequestError, match="mtbf_s"):
        Auto(mtbf_s=10**400)


def test_only_at_exit_asks_for_the_last_step():
    assert AtExit().at_exit
    assert AnyOf(EverySteps(4), AtExit()).at_exit
    assert not AnyOf(EverySteps(4), OnPreemption(), Auto(), EverySeconds(3), Never()).at_exit
    assert not any(AtExit().due(step) for step in range(100))


def test_never_asks_for_nothing():
    policy = Never()

    assert not any(policy.due(step) for step in range(100))
    assert policy.interval_s(Observed(stall_s=1.0)) == 0
    assert policy.signals() == frozenset()
    assert grace_s(policy) == 0


HOUR = FailureRecord(failures_count=1, trained_s=3600.0)


@pytest.mark.parametrize(
    ("observed", "interval_s"),
    [
        (Observed(), 5),
        (Observed(stall_s=0.5), math.sqrt(7200)),
        (Observed(stall_s=0.5, restore_s=900.0), math.sqrt(8100)),
        (Observed(stall_s=0.5, training_s=2800.0), 100),
        (Observed(stall_s=0.5, record=HOUR), math.sqrt(5400)),
        (Observed(stall_s=0.5, record=FailureRecord(failures_count=7)), 30),
        (Observed(stall_s=100.0), 1000),
        (Observed(stall_s=1e9, record=FailureRecord(failures_count=71)), 100),
    ],
)
def test_auto_follows_the_formula_and_its_bounds(observed, interval_s):
    """sqrt(2 x stall x (mtbf + restore)), by hand; one failure is assumed in ``mtbf_s``."""
    policy = Auto(mtbf_s=7200, interval_s_min=5, interval_s_max=1000)

    assert policy.interval_s(observed) == pytest.approx(interval_s)


def test_auto_says_how_its_interval_came_about():
    policy = Auto(mtbf_s=7200, interval_s_max=60)
    observed = Observed(stall_s=0.5, restore_s=4.25, record=HOUR)

    assert policy.why(observed) == (
        "every 60 s (best would be 74 s, but interval_s_max=60): a save stalls training for 0.5 s, "
        "a restore takes 4.2 s, 1 failure in 60 min of training and one assumed in 2.0 h make one "
        "in 1.5 h"
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: EverySteps(0),
        lambda: EverySeconds(0),
        lambda: Auto(mtbf_s=0),
        lambda: Auto(interval_s_max=math.inf),
        lambda: Auto(interval_s_min=10, interval_s_max=9),
        lambda: EverySteps("10"),
        lambda: EverySteps(2.5),
        lambda: EverySeconds("10"),
        lambda: OnPreemption(grace_s="10"),
        lambda: Replicas(-1),
        lambda: Replicas("1"),
        lambda: Replicas(True),
        lambda: Replicas(1, domain=2),
        lambda: Parity(1, 1),
        lambda: Parity(4, 0),
        lambda: Parity(65, 1),
        lambda: Parity(4, 17),
        lambda: Parity(4.0, 1),
        lambda: Parity(True, True),
        lambda: Parity(4, 2, domain=3),
        lambda: Retention(last=-1),
        lambda: Retention(every=1.5),
        lambda: Retention(spaced_s=-1.0),
        lambda: Retention(age_s_min=math.nan),
        lambda: Retention(best=2),
        lambda: Retention(metric="loss"),
    ],
)
def test_values_that_mean_nothing_are_refused(make):
    """Defect X3: a wrong type as well, before any agent hears of it."""
    with pytest.raises(InvalidRequestError):
        make()


@pytest.mark.parametrize(
    ("policy", "rule"),
    [
        (None, PersistRule()),
        (Never(), PersistRule()),
        (EverySteps(100), PersistRule(steps=100)),
        (EverySeconds(60), PersistRule(seconds=60)),
        (AnyOf(EverySteps(100), EverySeconds(60), Never()), PersistRule(steps=100, seconds=60)),
        (AnyOf(), PersistRule()),
        (
            AnyOf(Auto(mtbf_s=60.0, interval_s_min=2.0, interval_s_max=9.0), EverySteps(100)),
            PersistRule(steps=100, mtbf_s=60.0, interval_s_min=2.0, interval_s_max=9.0),
        ),
    ],
)
def test_a_policy_says_what_goes_to_the_object_store(policy, rule):
    """F86: on or off per job."""
    assert rule == persist_rule(policy)


@pytest.mark.parametrize(
    ("policy", "match"),
    [
        (OnPreemption(), "use EverySteps, EverySeconds"),
        (AnyOf(EverySteps(5), OnPreemption()), "use EverySteps, EverySeconds"),
        (AnyOf(Auto(), Auto()), "one Auto"),
        (Policy(), "use EverySteps, EverySeconds"),
        (100, "use EverySteps, EverySeconds"),
        (AnyOf(EverySteps(5), EverySteps(7)), "at most one EverySteps"),
    ],
)
def test_a_policy_that_means_nothing_there_is_refused_with_those_that_do(policy, match):
    with pytest.raises(InvalidRequestError, match=match):
        persist_rule(policy)


def test_the_best_steps_are_kept_by_a_metric():
    """F87"""
    kept = Retention(last=3, best=2, metric="loss")

    assert (3, 2, "loss", False) == (kept.last, kept.best, kept.metric, kept.maximize)


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (EverySteps(2), SaveReason.UNSPECIFIED),
        (EverySeconds(3), SaveReason.INTERVAL),
        (Auto(), SaveReason.AUTO),
        (AnyOf(Auto(interval_s_min=5.0), EverySeconds(3)), SaveReason.INTERVAL),
        (AnyOf(Auto(), EverySeconds(3), OnPreemption()), SaveReason.AUTO),
    ],
)
def test_whose_interval_it_is(policy, reason):
    assert reason is chosen_interval(policy, Observed()).reason


@pytest.mark.parametrize(
    ("asked", "means"),
    [
        (2, protection.Copies(2)),
        (Replicas(1, domain="rack"), protection.Copies(1, "rack")),
        (Parity(4, 2), protection.Parity(4, 2)),
        (Parity(2, 1, domain="rack"), protection.Parity(2, 1, "rack")),
    ],
)
def test_a_protection_is_copies_or_parity(asked, means):
    assert protection_of(asked) == means
