"""Where a job's time went: by the ledger's arithmetic, and by what happens to a run (G23)."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_services.metadata.domain.ledger import (
    MONTHS_COUNT_MAX,
    Cause,
    Ledger,
    Month,
    total,
)

DAY_S = 86400.0
NOV_S = 1793491200.0
"""2026-11-01."""


def test_an_attempt_that_died_costs_what_no_checkpoint_had_and_the_time_until_the_next_trains():
    died = Ledger().begun(100.0, None).ended(160.0, Cause.PROCESS, stalled_s=2.0)
    assert died.settled().months == (Month(name="1970-01", trained_s=60.0, stalled_s=2.0),)

    [month] = died.begun(175.0, saved_at_s=130.0).months

    assert month.lost_s == {Cause.PROCESS: 30.0}
    assert month.down_s == {Cause.PROCESS: 15.0}
    assert month.stalled_s == 1.0, "half of it is lost with the rest"
    assert (month.productive_s, month.productive_share) == (29.0, 29.0 / 75.0)


@pytest.mark.parametrize(
    ("saved_at_s", "lost_s"),
    [
        (None, 60.0),  # it begins anew, or nobody knows when its step was saved
        (90.0, 60.0),  # the attempt before had saved nothing itself
        (150.0, 10.0),
        (170.0, 0.0),  # heard of later than of the end
    ],
)
def test_no_more_is_lost_than_the_attempt_had_trained(saved_at_s, lost_s):
    died = Ledger().begun(100.0, None).ended(160.0, Cause.NODE, 0.0)

    [month] = died.begun(175.0, saved_at_s).months

    assert sum(month.lost_s.values()) == lost_s


def test_after_an_end_in_order_nobody_was_down_and_nothing_is_lost():
    ended = Ledger().begun(100.0, None).ended(160.0, None, 0.0)

    assert ended.begun(10_000.0, 120.0).months == (Month(name="1970-01", trained_s=60.0),)


def test_an_attempt_that_never_trained_leaves_the_job_down():
    died = Ledger().begun(100.0, None).ended(160.0, Cause.PROCESS, 0.0)

    again = died.ended(200.0, Cause.NODE, 0.0)

    assert again == died
    assert again.begun(260.0, 160.0).months[0].down_s == {Cause.PROCESS: 100.0}


def test_a_span_is_cut_where_months_begin():
    begin_s, end_s = NOV_S - 2 * DAY_S, NOV_S + 31 * DAY_S

    months = Ledger().begun(begin_s, None).ended(end_s, None, 5.0).months

    assert [(month.name, month.trained_s / DAY_S) for month in months] == [
        ("2026-10", 2), ("2026-11", 30), ("2026-12", 1),
    ]  # fmt: skip
    assert [month.stalled_s for month in months] == pytest.approx([5 * n / 33 for n in (2, 30, 1)])


def test_what_is_lost_is_lost_in_the_months_in_which_it_was_done():
    """It may be more than the month of the attempt's end has of it."""
    died = Ledger().begun(NOV_S - 2 * DAY_S, None).ended(NOV_S + DAY_S, Cause.NODE, 0.0)

    october, november = died.begun(NOV_S + 2 * DAY_S, NOV_S - DAY_S).months

    assert (october.lost_s, october.productive_s) == ({Cause.NODE: DAY_S}, DAY_S)
    assert (november.lost_s, november.productive_s) == ({Cause.NODE: DAY_S}, 0.0)
    assert total((october, november)).productive_s == DAY_S


def test_of_an_attempt_that_waited_for_saves_only_nothing_is_counted_twice():
    died = Ledger().begun(100.0, None).ended(160.0, Cause.PROCESS, stalled_s=1e9)

    [month] = died.begun(160.0, saved_at_s=None).months

    assert (month.trained_s, month.stalled_s, month.lost_s) == (60.0, 0.0, {Cause.PROCESS: 60.0})


def test_an_attempt_that_ended_later_than_the_next_one_began_trained_until_then():
    """The database's clock was ahead, and was set right."""
    ahead = Ledger().begun(NOV_S, None).ended(NOV_S + 400 * DAY_S, Cause.NODE, 0.0)

    [month] = ahead.begun(NOV_S + DAY_S, None).months

    assert (month.name, month.trained_s, month.down_s) == ("2026-11", DAY_S, {})


def test_an_attempt_that_ended_before_it_began_was_not_down_meanwhile():
    odd = Ledger().begun(100.0, None).ended(90.0, Cause.NODE, 1.0)

    assert odd.begun(120.0, None).months == (Month(name="1970-01", down_s={Cause.NODE: 20.0}),)


def test_training_that_began_on_a_clock_that_was_ahead_counts_from_when_it_is_heard():
    late_s = NOV_S + 400 * DAY_S
    ahead = Ledger().begun(late_s, None).heard(late_s, 1.0).heard(NOV_S, 1.0)
    assert ahead.heard_s == NOV_S

    [month] = ahead.ended(NOV_S + 60.0, None, 0.0).months

    assert (month.name, month.trained_s) == ("2026-11", 60.0)


def test_months_of_a_clock_that_was_years_ahead_leave_room_for_the_true_ones():
    ahead = Ledger().begun(NOV_S, None).ended(NOV_S + 40 * 365 * DAY_S, None, 0.0)
    assert ahead.months[0].name > "2060"

    months = ahead.begun(NOV_S, None).ended(NOV_S + 60.0, None, 0.0).months

    assert months == (Month(name="2026-11", trained_s=60.0),)


def test_of_a_clock_that_was_a_month_ahead_the_true_months_stay():
    ledger = Ledger().begun(NOV_S - 800 * DAY_S, None).ended(NOV_S + 31 * DAY_S, None, 0.0)
    assert [month.name for month in ledger.months[-2:]] == ["2026-11", "2026-12"]

    assert ledger.begun(NOV_S, None).months == ledger.months[:-1]


def test_what_is_left_of_a_month_is_never_less_than_nothing():
    """0.3 is less than 0.1 and 0.2 together, to a processor."""
    assert Month(name="", trained_s=0.3, stalled_s=0.1, lost_s={Cause.NODE: 0.2}).productive_s == 0


def test_months_of_a_clock_that_is_behind_drive_no_true_ones_out_while_there_is_room():
    ledger = Ledger().begun(NOV_S, None).ended(NOV_S + 60.0, None, 0.0)

    months = ledger.begun(NOV_S - DAY_S, None).ended(NOV_S - DAY_S + 5.0, None, 0.0).months

    assert [month.name for month in months] == ["2026-10", "2026-11"]


def test_a_word_of_an_attempt_is_news_after_a_rest_only():
    heard = Ledger().heard(100.0, 1.0)

    assert heard.heard_s == 100.0
    assert heard.heard(100.5, 1.0) is heard
    assert heard.heard(0.0, 1.0) is heard, "nobody was heard"
    assert heard.heard(101.0, 1.0).heard_s == 101.0


def test_the_newest_months_are_kept():
    ledger = Ledger().begun(NOV_S, None).ended(NOV_S + 400 * 31 * DAY_S, None, 0.0)

    assert len(ledger.months) == MONTHS_COUNT_MAX
    assert ledger.months[-1].name > "2060"


SPAN = st.one_of(st.floats(0, 90 * DAY_S), st.floats(0, 1e-3), st.just(0.0))
ATTEMPTS = st.lists(
    st.tuples(
        SPAN, SPAN, st.one_of(st.none(), st.floats(-DAY_S, 90 * DAY_S)),
        st.one_of(st.none(), st.sampled_from(Cause)),
        st.one_of(st.floats(-1, 90 * DAY_S), st.sampled_from((math.inf, math.nan))),
    ),
    max_size=8,
)  # fmt: skip


def check_parts(months):
    """All that trained was productive, stalled or lost, in each month and in all of them."""
    for month in (*months, total(months)):
        parts = [month.productive_s, month.stalled_s, *month.lost_s.values()]
        assert min(*parts, *month.down_s.values(), 0.0) >= 0
        assert sum(parts) == pytest.approx(month.trained_s, abs=1e-3)
        assert month.productive_share is None or 0 <= month.productive_share <= 1
    assert len(months) <= MONTHS_COUNT_MAX
    assert [month.name for month in months] == sorted({month.name for month in months})


@given(ATTEMPTS)
def test_all_parts_together_are_the_time_that_has_passed(attempts):
    """From when the first attempt trained, but for the time after one that ended in order."""
    ledger, now_s, passed_s, owed_s = Ledger(), NOV_S, 0.0, None
    for down_s, trained_s, saved_s, cause, stalled_s in attempts:
        now_s += down_s
        passed_s += 0.0 if owed_s is None else owed_s + down_s
        ledger = ledger.begun(now_s, None if saved_s is None else now_s - saved_s)
        now_s += trained_s
        ledger = ledger.ended(now_s, cause, stalled_s)
        owed_s = 0.0 if cause else None
        passed_s += trained_s

    months = ledger.settled().months

    check_parts(months)
    if now_s - NOV_S < (MONTHS_COUNT_MAX - 2) * 28 * DAY_S:
        spent = total(months)
        assert spent.trained_s + sum(spent.down_s.values()) == pytest.approx(passed_s, abs=1e-2)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("begun", "heard", "ended")), st.floats(0, 5e9),
            st.one_of(st.none(), st.sampled_from(Cause)), st.floats(0, 5e9),
        ),
        max_size=12,
    ),
)  # fmt: skip
def test_whatever_the_clock_does_the_parts_are_those_of_the_whole(story):
    ledger = Ledger()
    for what, at_s, cause, other_s in story:
        if what == "begun" and ledger.since_s is None:
            ledger = ledger.begun(at_s, other_s)
        elif what == "heard":
            ledger = ledger.heard(at_s, 1.0)
        elif what == "ended":
            ledger = ledger.ended(at_s, cause, other_s)
        check_parts(ledger.settled().months)
