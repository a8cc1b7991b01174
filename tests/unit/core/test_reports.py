"""What a rank says of itself is checked once, and made one figure with what the others say."""

import math

import pytest

from holdfast.core.announcements import SaveReason
from holdfast.core.ids import STEP_MAX
from holdfast.core.reports import (
    BYTES_MAX,
    NOTE_BYTES_MAX,
    NOTES_COUNT_MAX,
    SAVING_COUNT_MAX,
    RankCosts,
    RankReport,
    StepNote,
    checked,
    together,
)
from holdfast.core.retry import bounded
from holdfast.errors import InvalidRequestError

NO_TIMES = [math.nan, math.inf, -math.inf, -1.0, 5e-324, 1e-300, 1e300]


@pytest.mark.parametrize("value", NO_TIMES)
def test_a_time_that_no_clock_shows_is_not_known(value):
    said = RankReport(
        step_s=value, save_interval_s=value, costs=RankCosts(stall_s=value, load_s=value)
    )

    assert RankReport() == checked(said)


def test_times_and_bytes_that_can_be_stay_as_they_are():
    said = RankReport(step=7, step_s=0.25, costs=RankCosts(copy_s=1e-6, save_bytes=BYTES_MAX))

    assert said == checked(said)


@pytest.mark.parametrize("value", [-1, BYTES_MAX + 1])
def test_bytes_that_no_segment_has_are_not_known(value):
    assert RankCosts() == checked(RankReport(costs=RankCosts(save_bytes=value))).costs


@pytest.mark.parametrize(
    "said",
    [
        RankReport(step=-1),
        RankReport(step=STEP_MAX + 1),
        RankReport(saving=(-1,)),
        RankReport(saving=tuple(range(SAVING_COUNT_MAX + 1))),
    ],
)
def test_steps_that_are_none_are_refused(said):
    with pytest.raises(InvalidRequestError, match="report: "):
        checked(said)


@pytest.mark.parametrize("text", ["a\0b", "x" * (NOTE_BYTES_MAX + 1)])
def test_notes_that_no_catalogue_can_keep_are_left_out(text):
    """P4: they never cost the report, or the save."""
    good = StepNote(step=1, json="{}")
    said = RankReport(notes=(StepNote(step=2, json=text), good))

    assert (good,) == checked(said).notes


def test_only_the_newest_notes_count():
    notes = tuple(StepNote(step=step, json="{}") for step in range(20))

    assert notes[-NOTES_COUNT_MAX:] == checked(RankReport(notes=notes)).notes


def test_what_is_done_stays_done_whatever_comes_late():
    before = RankReport(step=9, loaded=True, step_s=0.5)
    late = RankReport(step=8, step_s=0.4)

    assert RankReport(step=9, loaded=True, step_s=0.4) == late.after(before)


def test_an_attempt_is_as_slow_as_its_slowest_rank_and_as_big_as_all():
    one = RankCosts(stall_s=0.25, save_bytes=10, load_s=2.0)
    other = RankCosts(stall_s=0.5, save_bytes=20, copy_s=1.0)

    assert RankCosts(stall_s=0.5, save_bytes=30, load_s=2.0, copy_s=1.0) == together((one, other))
    assert RankCosts() == together(())


def test_every_reason_has_a_text_of_its_own():
    assert len(SaveReason) == len({reason.text for reason in SaveReason})


@pytest.mark.parametrize(
    ("asked", "waits"),
    [(math.nan, 0.0), (-1.0, 0.0), (0.5, 0.5), (61.0, 60.0), (math.inf, 60.0), (-math.inf, 0.0)],
)
def test_a_wait_that_a_peer_asks_for_is_bounded(asked, waits):
    """A comparison with NaN is false, so ``min`` and ``max`` let it through."""
    assert waits == bounded(asked, 60.0)
