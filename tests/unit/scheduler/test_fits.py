"""A job that all nodes together could not run is refused, with the sum (F107)."""

import pytest

from holdfast.core.job_spec import JobSpec
from holdfast.errors import ExhaustedError
from holdfast_services.scheduler.domain.cluster import Node
from holdfast_services.scheduler.domain.fits import check_fits

NODES = [
    Node(name="a", gpus=8, gpu_type="H100"),
    Node(name="b", gpus=4, gpu_type="A100"),
    Node(name="c", gpus=8, gpu_type="H100", spot=True),
]


def spec(**what):
    return JobSpec(name="gpt", command=("x.py",), gpus_max=64, **what)


def test_what_fits_once_all_is_free_waits():
    check_fits(spec(gpus_min=20), NODES)
    check_fits(spec(gpus_min=64), [])


@pytest.mark.parametrize(
    ("what", "total"),
    [
        ({"gpus_min": 21}, r"21 GPUs, and all nodes together have 20: a 8 \+ b 4 \+ c 8"),
        (
            {"gpus_min": 17, "gpu_types": ("H100",)},
            r"have 16: a 8 \+ c 8; not counted: b 4 \(type A100\)",
        ),
        ({"gpus_min": 13, "spot": False}, r"have 12: a 8 \+ b 4; not counted: c 8 \(spot\)"),
        ({"gpus_min": 1, "gpu_types": ("TPU",)}, "have 0: none; not counted"),
    ],
)
def test_what_never_fits_is_refused_with_the_sum(what, total):
    with pytest.raises(ExhaustedError, match=total):
        check_fits(spec(**what), NODES)
