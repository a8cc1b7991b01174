"""Jobs that run alone take the seconds that the original simulator gives them.

The data is not ours to keep: these are skipped where it does not lie beside the repository.
"""

import pytest
from tests.bench.reference_fit import reference
from tests.bench.sched_jct import ALONE_S, DATA, LACKS

from holdfast_services.scheduler.simulator.alone import alone_s
from holdfast_services.scheduler.simulator.pollux_traces import applications

pytestmark = pytest.mark.skipif(bool(LACKS), reason=LACKS)


@pytest.fixture(scope="module")
def known():
    return applications(DATA)


@pytest.mark.parametrize(
    ("name", "gpus"),
    [("cifar10", 4), ("cifar10", 16), ("bert", 16), ("deepspeech2", 4), ("yolov3", 8), ("ncf", 1)],
)
def test_a_job_alone_takes_what_it_takes_in_the_original(known, name, gpus):
    """Within a percent; the others are in the record ``sched/alone``."""
    found_s = alone_s(known[name], gpus, 4, own=reference())

    assert ALONE_S[name][gpus] == pytest.approx(found_s, rel=0.01)


@pytest.mark.parametrize(
    ("name", "initial", "maximum", "local_min", "local_max"),
    [
        ("bert", 12, 384, 4, 12),
        ("cifar10", 128, 4096, 32, 1024),
        ("imagenet", 200, 12800, 20, 200),
        ("deepspeech2", 20, 640, 10, 80),
        ("yolov3", 8, 512, 4, 8),
    ],
)
def test_limits_are_those_of_the_original(known, name, initial, maximum, local_min, local_max):
    limits = known[name].limits

    assert (initial, maximum, local_min, local_max) == (
        limits.initial, limits.maximum, limits.local_min, limits.local_max,
    )  # fmt: skip


def test_declared_work_is_what_a_job_takes(known):
    """Within 0.02 %: epochs times samples per initial batch, for cifar10 of 50,000 images."""
    cifar10 = known["cifar10"]

    assert 100 * 50_000 / 128 == pytest.approx(cifar10.ends_at(cifar10.epochs - 1), rel=2e-4)
