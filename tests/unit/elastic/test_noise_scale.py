"""Estimates of gradient noise against gradients whose noise is known (F84)."""

import math

import numpy as np
import pytest

from holdfast.elastic.noise_scale import NoiseScale, Norms, estimate, gain

DIM, OFFSET, SIGMA_SQR, INITIAL = 1000, 20.0, 4.0, 8
SQR, VAR = 400.0, SIGMA_SQR * DIM / INITIAL


def drawn(rng, samples, at):
    """The mean gradient of a quadratic over so many samples: its noise is that of their mean."""
    return at + rng.normal(0.0, math.sqrt(SIGMA_SQR / samples), DIM)


def sqr(vector):
    return float(vector @ vector)


def norms_of(gradients, scale, *, biased=False):
    local = sum(map(sqr, gradients)) / len(gradients)
    mean = np.mean(gradients, axis=0)
    return Norms(
        local=(local,), total=(sqr(mean),), count=len(gradients), scale=scale, biased=biased
    )


def averaged(replicas, micro_batches, samples, seed, steps=3000):
    rng = np.random.default_rng(seed)
    at = np.full(DIM, OFFSET / math.sqrt(DIM))
    noise, previous = NoiseScale(1), None
    scale = replicas * micro_batches * samples / INITIAL
    for _ in range(steps):
        gradients = [drawn(rng, samples, at) for _ in range(replicas * micro_batches)]
        if len(gradients) > 1:
            noise.update(norms_of(gradients, scale))
        elif previous is not None:
            noise.update(norms_of([previous, gradients[0]], 2 * scale, biased=True))
        previous = gradients[0]
    return noise


SETTINGS = {
    "4 replicas": (4, 1, 8),
    "1 replica, 4 micro-batches": (1, 4, 8),
    "2 replicas, 2 micro-batches of 4": (2, 2, 4),
    "1 replica, differences": (1, 1, 8),
    "1 replica, differences of batches of 32": (1, 1, 32),
    "8 replicas of 16": (8, 1, 16),
}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_a_quadratic_with_known_noise_is_recovered(setting):
    """Known answer 1: |G|^2 = 400, tr(Sigma)/B0 = 500, noise scale 10, gain(4) = 12/7."""
    noise = averaged(*setting, seed=0)

    assert noise.sqr == pytest.approx(SQR, rel=0.02)
    assert noise.var == pytest.approx(VAR, rel=0.02)
    assert INITIAL * noise.var / noise.sqr == pytest.approx(10, rel=0.04)
    assert noise.gain(4) == pytest.approx(12 / 7, rel=0.02)
    assert noise.biased is (setting[:2] == (1, 1))


@pytest.mark.parametrize(("rate", "bias_max"), [(0.001, 0.02), (0.01, 0.05), (0.05, 0.10)])
def test_one_replica_overestimates_the_noise_of_moving_parameters_within_bounds(rate, bias_max):
    """Known answer 2: what moves between two updates looks like noise; under 10 % up to 0.05."""
    rng = np.random.default_rng(1)
    at, previous = np.full(DIM, OFFSET / math.sqrt(DIM)), None
    noise = NoiseScale(1)
    for _ in range(300):
        gradient = drawn(rng, INITIAL, at)
        if previous is not None:
            noise.update(norms_of([previous, gradient], 2.0, biased=True))
        previous, at = gradient, at - rate * gradient

    assert -0.02 <= noise.var / VAR - 1 < bias_max
    assert noise.biased


def test_the_gain_is_known_at_its_limits():
    """Known answer 3."""
    assert [gain(1.0, 3.0, scale) for scale in (1, 3)] == [1.0, 2.0]
    assert gain(1.0, 3.0, 1e12) == pytest.approx(4)
    assert gain(0.0, 3.0, 7.0) == pytest.approx(7)
    assert gain(1.0, 1e-6, 64.0) == pytest.approx(1, abs=1e-5)
    assert gain(0.0, 0.0, 64.0) == 1


def test_unequal_shares_are_estimated_without_bias():
    """Shares of 2, 1 and 1 samples count as 10/3 gradients."""
    tr, signal = 12.0, 5.0
    local = signal + tr * (1 / 2 + 1 + 1) / 3
    total = signal + tr / 4

    assert estimate(local, total, 10 / 3, 4 / INITIAL) == pytest.approx((signal, tr / INITIAL))


def test_nothing_is_known_before_the_first_estimate():
    noise = NoiseScale(2)

    assert (noise.known, noise.biased) == (False, False)
    assert noise.gains(8.0) == pytest.approx([1, 1], abs=1e-5)
    assert noise.sqr_by_group == [1.0, 1.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["local", "total"])
def test_one_number_that_is_not_finite_changes_nothing(bad, where):
    """F84: also not the groups that are well."""
    noise = NoiseScale(2)
    noise.update(Norms(local=(7.0, 9.0), total=(4.0, 3.0), count=4, scale=1.0))
    before = noise.state_dict()
    numbers = {"local": (7.0, 7.0), "total": (4.0, 4.0), where: (1.0, bad)}

    assert not noise.update(Norms(**numbers, count=4, scale=1.0))
    assert noise.state_dict() == before


def test_numbers_whose_estimate_overflows_change_nothing():
    noise = NoiseScale(1)

    assert not noise.update(Norms(local=(1e300,), total=(1e308,), count=64, scale=1e9))
    assert not noise.known


def test_a_single_gradient_gives_no_estimate():
    noise = NoiseScale(1)

    assert not noise.update(Norms(local=(1.0,), total=(1.0,), count=1, scale=1.0))


def test_groups_have_averages_and_gains_of_their_own_and_a_sum():
    noise = NoiseScale(2)
    noise.update(Norms(local=(7.0, 10.0), total=(4.0, 10.0), count=4, scale=1.0))

    assert noise.sqr_by_group == pytest.approx([3.0, 10.0])
    assert noise.var_by_group == pytest.approx([1.0, 1e-6])
    assert noise.gains(3.0) == pytest.approx([4 / (1 / 3 + 3), 1.0], rel=1e-5)
    assert noise.gain(3.0) == pytest.approx(gain(13.0, 1.0, 3.0), rel=1e-5)


def test_an_average_forgets_by_the_scale_of_its_updates():
    noise = NoiseScale(1)
    noise.update(Norms(local=(7.0,), total=(4.0,), count=4, scale=1.0))
    noise.update(Norms(local=(2.0,), total=(2.0,), count=4, scale=2.0))
    first, second = 0.999**2 * (1 - 0.999), 1 - 0.999**2

    assert noise.sqr == pytest.approx((3 * first + 2 * second) / (first + second))


def test_estimates_that_are_negative_by_chance_stay_in_the_average_and_not_in_what_is_used():
    noise = NoiseScale(1)
    noise.update(Norms(local=(1.0,), total=(4.0,), count=4, scale=1.0))

    assert noise.var == 1e-6

    noise.update(Norms(local=(7.0,), total=(4.0,), count=4, scale=1.0))

    assert noise.var == pytest.approx(1e-6, abs=1e-3)


def test_zero_gradients_are_all_noise_and_nothing_is_divided_by_zero():
    noise = NoiseScale(1)
    noise.update(Norms(local=(0.0,), total=(0.0,), count=4, scale=4.0))

    assert (noise.sqr, noise.var) == (0.0, 1e-6)
    assert noise.gain(4.0) == pytest.approx(4)


def test_the_first_unbiased_estimate_drops_what_differences_said():
    noise = NoiseScale(1)
    for _ in range(50):
        noise.update(Norms(local=(70.0,), total=(4.0,), count=2, scale=2.0, biased=True))
    assert noise.biased

    noise.update(Norms(local=(7.0,), total=(4.0,), count=4, scale=1.0))

    assert (noise.sqr, noise.var, noise.biased) == (pytest.approx(3.0), pytest.approx(1.0), False)


def test_groups_that_are_added_begin_with_nothing_known():
    noise = NoiseScale(1)
    noise.update(Norms(local=(7.0,), total=(4.0,), count=4, scale=1.0))
    noise.add_groups(2)

    assert noise.sqr_by_group == pytest.approx([3.0, 1.0])
    noise.update(Norms(local=(7.0, 7.0), total=(4.0, 4.0), count=4, scale=1.0))
    assert noise.sqr_by_group == pytest.approx([3.0, 3.0])


def test_averages_go_on_bit_for_bit_after_a_restart():
    rng = np.random.default_rng(3)
    one = NoiseScale(2)
    drawn_norms = [
        Norms(local=(a + 4, b + 4), total=(4.0, 4.0), count=4, scale=1.5)
        for a, b in rng.uniform(0, 9, (40, 2))
    ]
    for norms in drawn_norms[:20]:
        one.update(norms)
    other = NoiseScale(2)
    other.load_state_dict(one.state_dict())
    for norms in drawn_norms[20:]:
        one.update(norms)
        other.update(norms)

    assert one.state_dict() == other.state_dict()
