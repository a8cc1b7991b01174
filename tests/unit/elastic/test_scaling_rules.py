"""Rules for the learning rate against numbers known beforehand (F83)."""

import math

import pytest

from holdfast.elastic.noise_scale import NoiseScale, Norms
from holdfast.elastic.scaling_rules import (
    AdamScale,
    AdaScale,
    LEGWScale,
    LinearScale,
    SqrtScale,
    Update,
)
from holdfast.errors import InvalidRequestError


def update(scale, progress=0.0, noisy=True):
    """Group 0 has sqr 1, var 3, group 1 hardly any noise."""
    noise = NoiseScale(2)
    if noisy:
        noise.update(Norms(local=(10.0, 5.0), total=(4 - 3 + 3.0, 5.0), count=3, scale=1.0))
    return Update(scale=scale, noise=noise, progress=progress, groups_count=2)


def test_the_example_has_the_noise_of_known_answer_3():
    assert update(1).noise.sqr_by_group == pytest.approx([1.0, 5.0])
    assert update(1).noise.var_by_group == pytest.approx([3.0, 1e-6])


@pytest.mark.parametrize(
    ("rule", "scale", "factors"),
    [
        (AdaScale(), 3, [2.0, 1.0]),
        (AdaScale(), 1, [1.0, 1.0]),
        (AdaScale(), 1e12, [4.0, 1.0]),
        (AdamScale(), 3, [math.sqrt(2), 1.0]),
        (AdamScale(power=1.0), 3, [2.0, 1.0]),
        (LinearScale(), 3, [3.0, 3.0]),
        (SqrtScale(), 4, [2.0, 2.0]),
    ],
)
def test_factors_are_those_of_the_definition(rule, scale, factors):
    assert rule.factors(update(scale)) == pytest.approx(factors, rel=1e-5)


def test_adamscale_of_four_is_the_root_of_the_gain_of_four():
    """Known answer 3."""
    at = update(4)

    assert AdamScale().factors(at) == [math.sqrt(g) for g in at.noise.gains(4)]


@pytest.mark.parametrize(("progress", "warm"), [(0, 0.0), (250, 0.25), (1000, 1.0), (5000, 1.0)])
def test_legw_warms_up_over_epochs_that_are_as_many_times_longer(progress, warm):
    """One epoch of 500 updates at the initial batch is 2,000 updates' worth at four times it."""
    rule = LEGWScale(base_warmup_epochs=0.5, data_size=5000, batch_size=10)

    assert rule.factors(update(4, progress)) == pytest.approx([2 * warm] * 2)


def test_legw_without_a_warm_up_begins_at_once():
    assert LEGWScale(0, 5000, 10).factors(update(4)) == [2.0, 2.0]


@pytest.mark.parametrize("rule", [AdaScale(), AdamScale(), LinearScale(), SqrtScale()])
def test_the_initial_batch_has_the_learning_rate_that_was_chosen_for_it(rule):
    assert rule.factors(update(1)) == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("rule", [AdaScale(), AdamScale()])
def test_as_long_as_nothing_is_known_the_learning_rate_stays(rule):
    assert rule.factors(update(8, noisy=False)) == pytest.approx([1.0, 1.0], abs=1e-5)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: AdamScale(power=0.0), "power=0.0"),
        (lambda: AdamScale(power=math.nan), "power=nan"),
        (lambda: LEGWScale(-1, 10, 10), "base_warmup_epochs=-1"),
        (lambda: LEGWScale(1, 0, 10), "data_size=0"),
        (lambda: LEGWScale(1, 10, 0), "batch_size=0"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused_by_name(make, named):
    with pytest.raises(InvalidRequestError, match=named):
        make()
