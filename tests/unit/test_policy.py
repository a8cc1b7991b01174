"""Policies are values: due steps, announced intervals, signals."""

import math
import signal

import pytest

from holdfast import (
    AnyOf,
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
from holdfast.core.persistence_rules import PersistRule
from holdfast.errors import InvalidRequestError
from holdfast.policy import Policy, grace_s, interval_reason, persist_rule, protection_of


def test_every_steps_is_due_at_multiples_only():
    """F23"""
    assert [step for step in range(1, 10) if EverySteps(3).due(step)] == [3, 6, 9]


def test_any_of_joins_steps_intervals_and_signals():
    """F22, F24"""
    policy = AnyOf(EverySteps(4), EverySeconds(30), EverySeconds(10), OnPreemption(grace_s=7))

    assert policy.due(8)
    assert not policy.due(9)
    assert policy.interval_s(0.0) == 10
    assert policy.signals() == {signal.SIGTERM, signal.SIGINT}
    assert grace_s(policy) == 7


def test_never_asks_for_nothing():
    policy = Never()

    assert not any(policy.due(step) for step in range(100))
    assert policy.interval_s(1.0) == 0
    assert policy.signals() == frozenset()
    assert grace_s(policy) == 0


def test_auto_follows_youngs_formula_and_its_floor():
    """The interval that minimises stall plus expected lost work: sqrt(2 x stall x mtbf)."""
    policy = Auto(mtbf_s=7200, interval_s_min=5)

    assert policy.interval_s(0.0) == 5
    assert policy.interval_s(0.5) == pytest.approx(math.sqrt(7200))


@pytest.mark.parametrize(
    "make",
    [
        lambda: EverySteps(0),
        lambda: EverySeconds(0),
        lambda: Auto(mtbf_s=0),
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
    ],
)
def test_a_policy_says_what_goes_to_the_object_store(policy, rule):
    """F86: on or off per job."""
    assert rule == persist_rule(policy)


@pytest.mark.parametrize(
    ("policy", "match"),
    [
        (Auto(), "use EverySteps, EverySeconds"),
        (OnPreemption(), "use EverySteps, EverySeconds"),
        (AnyOf(EverySteps(5), Auto()), "use EverySteps, EverySeconds"),
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
    assert reason is interval_reason(policy, 0.0)


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
