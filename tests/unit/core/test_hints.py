"""Hints are refused by name, and never cost the report that they came with (F106)."""

import math
from dataclasses import replace

import pytest

from holdfast.core import reports
from holdfast.core.hints import COUNT_MAX, POINTS_COUNT_MAX, JobHints, StepPoint, check, checked
from holdfast.core.reports import RankReport
from holdfast.errors import InvalidRequestError

POINT = StepPoint(nodes=1, replicas=4, local_batch=32, compute_s=0.1, step_s=0.15, count=9)
HINTS = JobHints(
    initial_batch=64, batch=128, batch_max=1024, local_min=8, local_max=64, accumulates=True,
    sqr=1.5, var=20.0, progress=123.5, points=(POINT,),
)  # fmt: skip


def test_what_a_job_can_have_is_taken_as_it_is():
    check(HINTS)

    assert checked(HINTS) == HINTS
    assert checked(JobHints()) == JobHints()


ABSURD = [
    ("sqr", math.nan), ("var", 1e300), ("var", -1.0), ("sqr", math.inf), ("progress", -1.0),
    ("progress", 1e300), ("initial_batch", -1), ("batch", COUNT_MAX + 1), ("batch_max", 32),
    ("local_min", 65), ("local_max", -5),
]  # fmt: skip
ABSURD_POINTS = [
    ("nodes", 0), ("nodes", 5), ("replicas", -1), ("local_batch", 0), ("count", 0),
    ("compute_s", math.nan), ("step_s", 1e300), ("step_s", -0.1), ("compute_s", 0.0),
    ("step_s", math.inf), ("step_s", 5e-324),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), ABSURD)
def test_a_number_that_no_job_has_is_refused_by_name(name, value):
    bad = replace(HINTS, **{name: value})

    with pytest.raises(InvalidRequestError, match=name):
        check(bad)
    refused = checked(bad)
    assert name in refused.refused
    assert refused == JobHints(refused=refused.refused)


@pytest.mark.parametrize(("name", "value"), ABSURD_POINTS)
def test_a_point_that_nobody_can_have_measured_is_refused_with_its_configuration(name, value):
    bad = replace(HINTS, points=(POINT, replace(POINT, **{name: value})))

    with pytest.raises(InvalidRequestError, match=f"{name}.* samples"):
        check(bad)
    assert checked(bad).refused


def test_more_points_than_a_rank_keeps_are_refused():
    with pytest.raises(InvalidRequestError, match="65 measured points"):
        check(replace(HINTS, points=(POINT,) * (POINTS_COUNT_MAX + 1)))


@pytest.mark.parametrize("reason", ["x" * 201, "a\0b"])
def test_a_reason_of_somebody_elses_is_not_passed_on(reason):
    assert checked(JobHints(refused=reason)).refused == "hints: a reason that is no text of ours"


def test_absurd_hints_leave_the_report_as_it_was():
    report = RankReport(step=7, step_s=0.5, hints=replace(HINTS, var=math.nan))
    taken = reports.checked(report)

    assert (taken.step, taken.step_s) == (7, 0.5)
    assert "var" in taken.hints.refused
    assert reports.checked(replace(report, hints=HINTS)).hints == HINTS
    assert reports.checked(replace(report, hints=None)).hints is None


def test_hints_press_nobody_to_report():
    """They change with training, and wait for the next report."""
    assert RankReport(hints=HINTS).lasting() == RankReport().lasting()
