"""The fit finds the parameters of a step-time surface, also where some steps were slow."""

import math

import numpy as np
import pytest

from holdfast.errors import InvalidRequestError
from holdfast.goodput.batches import Batch, BatchLimits, Goodput
from holdfast.goodput.curves import Curve, curve
from holdfast.goodput.efficiency import GradientNoise
from holdfast.goodput.fit import Measured, fit
from holdfast.goodput.profile import profile_of
from holdfast.goodput.step_time import SECONDS_MIN, StepTime

TRUTH = StepTime(
    alpha_c=0.121, beta_c=0.00568, alpha_n=0.0236, beta_n=0.00634, alpha_r=0.0118, beta_r=0.00317,
    gamma=1.14,
)  # fmt: skip
SEEN = ((1, 1), (1, 2), (1, 4), (2, 8), (4, 16), (8, 32))
HELD_OUT = ((1, 3), (3, 12), (12, 48))


def measured(nodes, replicas, batch, slower=1.0, truth=TRUTH):
    return Measured(
        nodes=nodes, replicas=replicas, local_batch=batch,
        compute_s=truth.compute_s(batch) * slower,
        step_s=truth.step_s(nodes, replicas, batch) * slower,
    )  # fmt: skip


def surface(batches=(32, 64, 128, 256)):
    return [measured(*where, batch) for where in SEEN for batch in batches]


def error(model, where, batch=100):
    return abs(model.step_s(*where, batch) / TRUTH.step_s(*where, batch) - 1)


def test_parameters_are_recovered():
    """F96: within 2 % each."""
    assert TRUTH.as_array() == pytest.approx(fit(surface()).as_array(), rel=0.02)


def test_a_start_from_an_earlier_fit_ends_where_one_from_nothing_does():
    points = surface()
    start = fit(points[:9])

    assert fit(points).as_array() == pytest.approx(fit(points, start).as_array(), rel=1e-3)


@pytest.mark.parametrize("seed", range(8))
def test_slow_steps_move_nothing(seed):
    """F96: a few of the points took five times as long, at least one does."""
    drawn = np.random.default_rng(seed)
    batches = (32, 45, 64, 90, 128, 180, 256)
    slow = {drawn.integers(42), *np.flatnonzero(drawn.random(42) < 0.02)}
    places = [(where, batch) for where in SEEN for batch in batches]

    model = fit(
        [measured(*where, b, 5.0 if at in slow else 1.0) for at, (where, b) in enumerate(places)]
    )

    assert max(error(model, where) for where in (*SEEN, *HELD_OUT)) <= 0.05


@pytest.mark.parametrize("seed", range(8))
def test_steps_that_vary_by_a_tenth_are_averaged(seed):
    """F96: with slow ones among them, still within 15 % where it was measured."""
    drawn = np.random.default_rng(seed)
    factors = np.exp(drawn.normal(0, 0.1, 42)) * np.where(drawn.random(42) < 0.02, 5.0, 1.0)
    places = [(where, b) for where in SEEN for b in (32, 45, 64, 90, 128, 180, 256)]

    model = fit([measured(*where, b, f) for (where, b), f in zip(places, factors, strict=True)])

    assert max(error(model, where) for where in SEEN) <= 0.15


def test_of_one_point_half_grows_with_the_batch_and_the_network_costs_nothing():
    """F96: what was never observed has a prior that makes a job try it."""
    model = fit([measured(1, 1, 128)])

    assert measured(1, 1, 128).compute_s / 2 == pytest.approx(model.alpha_c)
    assert measured(1, 1, 128).compute_s / 2 == pytest.approx(128 * model.beta_c, rel=1e-4)
    assert 1e-7 > max(model.alpha_n, model.beta_n, model.alpha_r, model.beta_r)


def test_unseen_nodes_cost_more_than_the_inside_of_one():
    """F96."""
    model = fit([measured(1, replicas, b) for replicas in (1, 2, 4) for b in (32, 64, 128)])

    assert model.alpha_n == pytest.approx(1.1 * model.alpha_r)
    assert model.beta_n == pytest.approx(1.1 * model.beta_r)
    assert 0.02 >= max(error(model, where) for where in ((1, 1), (1, 2), (1, 3), (1, 4)))


def test_without_three_replicas_nothing_is_said_of_more():
    """F96."""
    model = fit([measured(1, replicas, b) for replicas in (1, 2) for b in (32, 64, 128)])

    assert pytest.approx(SECONDS_MIN) == model.beta_r
    assert 0.02 >= error(model, (1, 2))


ABSURD = [
    {"compute_s": math.nan},
    {"step_s": math.inf},
    {"step_s": 1e300},
    {"compute_s": -1.0},
    {"step_s": 0.0},
    {"nodes": 3, "replicas": 2},
    {"local_batch": 0},
]


@pytest.mark.parametrize("wrong", ABSURD)
def test_a_point_that_cannot_be_so_is_left_out(wrong):
    """F106: one absurd number poisons nothing."""
    fields = {"nodes": 1, "replicas": 1, "local_batch": 64, "compute_s": 1.0, "step_s": 1.0}
    lie = Measured(**{**fields, **wrong})

    assert fit(surface()) == fit([lie, *surface(), lie])
    with pytest.raises(InvalidRequestError, match="none of 1 measured step times"):
        fit([lie])


def test_where_the_model_is_wrong_what_was_measured_is_believed():
    """Known of yolov3: two nodes are slower than one, which no seven parameters say."""
    odd = measured(2, 8, 64, slower=1.8)

    profile = profile_of([*surface(), odd])

    model, factor = profile.step_time, float(profile.curves[2, 8].at(np.array(64.0)))
    assert 1 > factor
    assert model.step_s(2, 8, 64) / odd.step_s == pytest.approx(factor)
    assert 1 == pytest.approx(float(profile.curves[1, 4].at(np.array(64.0))), rel=0.02)
    assert 32 == profile.replicas_max
    job = Goodput(
        step_time=model, noise=GradientNoise(sqr=1.0, var=1.0), curves=profile.curves,
        limits=BatchLimits(initial=512, maximum=512),
    )  # fmt: skip
    batch = Batch(local=64, accumulation=0)
    assert 512 / odd.step_s == pytest.approx(job.throughput(2, 8, batch))
    assert job.at(2, 8, batch) == pytest.approx(job.best(2, 8)[0])


def test_between_what_was_measured_the_error_is_linear_and_beyond_it_fades():
    found = curve([(64, 2.0), (256, 0.5), (16, 1.0)]).at(
        np.array([16.0, 64.0, 128.0, 256.0, 256.0 * math.e, 1e12])
    )

    assert [1.0, 2.0, 1.0, 0.5, 0.5 ** (1 / math.e), 1.0] == pytest.approx(list(found))


def test_a_curve_is_bounded():
    many = curve([(local, 1e9) for local in range(1, 500)])

    assert len(many.log_local) <= 32
    assert 4 == pytest.approx(float(many.at(np.array(7.0))))
    with pytest.raises(InvalidRequestError, match="a factor of a curve is"):
        Curve(log_local=(0.0,), log_factor=(math.nan,))
    with pytest.raises(InvalidRequestError, match="by ascending micro-batch"):
        Curve(log_local=(1.0, 0.0), log_factor=(0.0, 0.0))
