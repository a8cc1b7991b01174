"""Goodput has the numbers of AdaptDL's own code, which were written down from a run of it."""

import math

import numpy as np
import pytest

from holdfast.errors import InvalidRequestError
from holdfast.goodput.batches import Batch, BatchLimits, Goodput, best_batches
from holdfast.goodput.efficiency import GradientNoise
from holdfast.goodput.step_time import StepTime, predict

PARAMETERS = StepTime(
    alpha_c=0.121, beta_c=0.00568, alpha_n=0.0236, beta_n=0.00634, alpha_r=0.0118, beta_r=0.00317,
    gamma=1.14,
)  # fmt: skip
FEW = BatchLimits(initial=128, maximum=1280, local_min=64, local_max=256, accumulation=True)
MANY = BatchLimits(initial=128, maximum=12800, local_min=64, local_max=256, accumulation=True)
QUIET, NOISY = GradientNoise(sqr=0.00136, var=0.000502), GradientNoise(sqr=0.00136, var=0.502)
JOB = Goodput(step_time=PARAMETERS, noise=QUIET, limits=FEW)


@pytest.mark.parametrize(
    ("nodes", "replicas", "batch", "throughput", "efficiency", "goodput"),
    [
        (1, 1, Batch(local=128, accumulation=0), 150.9363, 1, 150.9363),
        (1, 4, Batch(local=64, accumulation=0), 517.6406, 0.577902, 299.1455),
        (1, 4, Batch(local=128, accumulation=1), 600.4591, 0.163592, 98.2301),
        (2, 8, Batch(local=64, accumulation=0), 975.6024, 0.313363, 305.7172),
        (4, 16, Batch(local=80, accumulation=0), 1959.8634, 0.132038, 258.7765),
    ],
)
def test_goodput_is_throughput_times_efficiency(
    nodes, replicas, batch, throughput, efficiency, goodput
):
    """F96."""
    assert throughput == pytest.approx(JOB.throughput(nodes, replicas, batch), rel=1e-6)
    assert efficiency == pytest.approx(JOB.efficiency(batch.size(replicas)), rel=1e-5)
    assert goodput == pytest.approx(JOB.at(nodes, replicas, batch), rel=1e-6)


@pytest.mark.parametrize(
    ("limits", "noise", "nodes", "replicas", "goodput", "batch"),
    [
        (FEW, QUIET, 1, 1, 150.9363, (128, 0)),
        (FEW, QUIET, 1, 2, 260.8690, (64, 0)),
        (FEW, QUIET, 1, 4, 299.1455, (64, 0)),
        (FEW, QUIET, 2, 8, 305.7172, (64, 0)),
        (FEW, QUIET, 4, 16, 297.0319, (64, 0)),
        (MANY, NOISY, 1, 1, 160.4627, (239, 1)),
        (MANY, NOISY, 1, 4, 633.5268, (249, 0)),
        (MANY, NOISY, 4, 16, 2295.8691, (245, 0)),
    ],
)
def test_the_best_batch_is_chosen(limits, noise, nodes, replicas, goodput, batch):
    """F83, F96."""
    found, chosen = Goodput(step_time=PARAMETERS, noise=noise, limits=limits).best(nodes, replicas)

    assert goodput == pytest.approx(found, rel=1e-6)
    assert batch == (chosen.local, chosen.accumulation)


def test_one_step_time_is_that_of_many():
    places = [(1, 1), (1, 2), (1, 4), (2, 2), (16, 64)]
    nodes, replicas = (np.array(column, dtype=np.float64) for column in zip(*places, strict=True))

    _, found = predict(PARAMETERS.as_array(), nodes, replicas, np.float64(100.0))

    assert found == pytest.approx([PARAMETERS.step_s(*place, 100) for place in places], rel=1e-12)


def test_many_jobs_are_answered_as_each_alone():
    noisy = Goodput(step_time=PARAMETERS, noise=NOISY, limits=MANY)
    pairs = [(job, nodes) for job in (JOB, noisy) for nodes in range(1, 300)]

    found = best_batches(
        [job for job, _ in pairs], [n for _, n in pairs], [4 * n for _, n in pairs]
    )

    for at in (0, 1, 298, 299, 300, 597):
        job, nodes = pairs[at]
        assert (found.goodput[at], found.batch(at)) == job.best(nodes, 4 * nodes)


def test_on_more_replicas_than_there_are_samples_there_is_no_goodput():
    assert 20 == FEW.replicas_max
    assert JOB.best(6, 21)[0] == 0


def test_a_fixed_batch_is_kept():
    limits = BatchLimits(
        initial=256, minimum=32768, maximum=32768, local_max=32768, accumulation=True
    )

    _, batch = Goodput(step_time=PARAMETERS, noise=NOISY, limits=limits).best(1, 1)

    assert (16384, 1) == (batch.local, batch.accumulation)
    assert batch == limits.first(1)


def test_without_accumulation_one_replica_keeps_its_batch():
    """Noise cannot be told from signal there, so a larger one has no known gain."""
    limits = BatchLimits(initial=128, maximum=12800, local_min=64, local_max=256)
    job = Goodput(step_time=PARAMETERS, noise=NOISY, limits=limits)

    assert Batch(local=128, accumulation=0) == job.best(1, 1)[1]
    assert 128 < job.best(1, 2)[1].size(2) <= 512


def test_the_first_batch_is_the_least_that_is_allowed():
    assert Batch(local=128, accumulation=0) == FEW.first(1)
    assert Batch(local=64, accumulation=0) == FEW.first(4)
    assert 1024 == FEW.first(16).size(16)


def test_the_gain_is_between_one_and_the_scale():
    """F83: AdaScale's gain at its limits."""
    noise = GradientNoise(sqr=1.0, var=3.0)

    assert 1 == noise.gain(1)
    assert 2 == noise.gain(3)
    assert 4 == pytest.approx(noise.gain(1e12))
    assert 7 == pytest.approx(GradientNoise(sqr=0.0, var=3.0).gain(7))
    assert 1 == pytest.approx(GradientNoise(sqr=1.0, var=1e-6).gain(7), rel=1e-5)
    assert 1 == GradientNoise(sqr=0.0, var=0.0).gain(7)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_noise_that_cannot_be_is_refused(value):
    """F106."""
    with pytest.raises(InvalidRequestError, match="var of gradients is"):
        GradientNoise(sqr=1.0, var=value)


@pytest.mark.parametrize("noise", [(1e300, 1e-300), (1e-300, 1e300), (1e16, 1e17)])
def test_noise_of_any_size_has_a_gain(noise):
    sqr, var = noise

    assert 1 <= GradientNoise(sqr=sqr, var=var).gain(8) <= 8


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"initial": 128, "maximum": 64}, "minimum 128 is more than maximum 64"),
        ({"initial": 0, "maximum": 64}, "1 is more than initial 0"),
        ({"initial": 8, "maximum": 64, "local_min": 9, "local_max": 8}, "local_min 9 is more than"),
        ({"initial": 8, "maximum": 1 << 60}, "the most that is believed"),
    ],
)
def test_limits_that_no_batch_keeps_are_refused(limits, said):
    """F107."""
    with pytest.raises(InvalidRequestError, match=said):
        BatchLimits(**limits)


@pytest.mark.parametrize("value", [math.nan, -1.0, 1e300])
def test_a_model_that_cannot_be_is_refused_by_the_parameter(value):
    """F106."""
    with pytest.raises(InvalidRequestError, match="beta_n of a step-time model"):
        StepTime(
            alpha_c=0.1, beta_c=0.1, alpha_n=0.1, beta_n=value, alpha_r=0.1, beta_r=0.1, gamma=1.0
        )
