"""What can be asked of the scheduler, and what no cluster could run (F95, F107)."""

from dataclasses import replace

import pytest

from holdfast.core import executions
from holdfast.core.executions import ExecutorReport, LaunchState
from holdfast.core.job_spec import JobSpec, check
from holdfast.errors import InvalidRequestError

GOOD = JobSpec(name="gpt/small", command=("--auto", "train.py", "--job", "mine"), gpus_max=8)


def test_a_good_spec_passes():
    check(GOOD)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ({"name": "a b"}, "job name"),
        ({"command": ()}, "command is empty"),
        ({"command": ("--job", "x", "train.py")}, "--job is the scheduler's to say"),
        ({"command": ("--nnodes=2", "train.py")}, "--nnodes=2 is the scheduler's to say"),
        ({"command": ("--mesh", "dp=2", "train.py")}, "--mesh is the scheduler's to say"),
        ({"command": ("x" * 200_000,)}, "command has more than"),
        ({"environment": {"HOLDFAST_MESHES": "dp=2"}}, "HOLDFAST_MESHES is the scheduler's to say"),
        ({"environment": {"HOLDFAST_MESH": "dp=2"}}, "HOLDFAST_MESH is the scheduler's to say"),
        ({"gpus_min": 0}, "gpus_min is 0"),
        ({"gpus_min": 9}, "gpus_min 9 is more than gpus_max 8"),
        ({"gpus_max": 10**9}, "gpus_max is 1e"),
        ({"priority": 10**9}, "priority is"),
        ({"work": -1.0}, "work is -1"),
        ({"grace_s": 1e9}, "grace_s is"),
        ({"retries": -1}, "retries is -1"),
        ({"owner": "a\nb"}, "owner must be"),
        ({"folder": "relative"}, "is no absolute path"),
        ({"environment": {"1A": ""}}, "'1A' is no variable"),
    ],
)
def test_what_makes_no_sense_is_named(what, said):
    with pytest.raises(InvalidRequestError, match=said):
        check(replace(GOOD, **what))


REPORT = ExecutorReport(executor="0" * 32, sequence=1, gpus=8, gpu_type="H100")


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ({"executor": "me"}, "not 32 hex digits"),
        ({"gpus": -1}, "gpus: -1"),
        ({"gpus": 10**6}, "gpus: 1000000"),
        ({"gpu_type": "a b"}, "no name of a type"),
        ({"sequence": -1}, "must not be negative"),
        ({"launches": (LaunchState(job="../x", start=1),)}, "job name"),
        ({"launches": (LaunchState(job="a", start=-1),)}, "makes no sense"),
        ({"launches": (LaunchState(job="a", start=1, reason="x" * 5000),)}, "too long"),
        ({"leaving": "x" * 5000}, "too long"),
    ],
)
def test_a_report_that_makes_no_sense_is_refused(what, said):
    executions.check(REPORT)
    with pytest.raises(InvalidRequestError, match=said):
        executions.check(replace(REPORT, **what))
