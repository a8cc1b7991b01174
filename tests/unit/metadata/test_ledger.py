"""Where a job's time went: by the ledger's arithmetic, and by what happens to a run (G23)."""

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
    assert died.months == (Month(name="1970-01", trained_s=60.0, stalled_s=2.0),)

    [month] = died.begun(175.0, saved_at_s=150.0).months

    assert month.lost_s == {Cause.PROCESS: 10.0}
    assert month.down_s == {Cause.PROCESS: 15.0}
    assert (month.productive_s, month.productive_share) == (48.0, 48.0 / 75.0)


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
    assert [month.stalled_s for month in months] == [0, 0, 5.0]


def test_the_newest_months_are_kept():
    ledger = Ledger().begun(NOV_S, None).ended(NOV_S + 400 * 31 * DAY_S, None, 0.0)

    assert len(ledger.months) == MONTHS_COUNT_MAX
    assert ledger.months[-1].name > "2060"


@given(
    st.lists(
        st.tuples(
            st.floats(0, 90 * DAY_S), st.floats(0, 90 * DAY_S), st.floats(-DAY_S, 90 * DAY_S),
            st.one_of(st.none(), st.sampled_from(Cause)), st.floats(-1, 90 * DAY_S),
        ),
        max_size=6,
    ),
)  # fmt: skip
def test_the_parts_are_never_more_than_the_whole(attempts):
    ledger, now_s = Ledger(), NOV_S
    first_s = now_s
    for down_s, trained_s, saved_s, cause, stalled_s in attempts:
        now_s += down_s
        ledger = ledger.begun(now_s, now_s - saved_s)
        now_s += trained_s
        ledger = ledger.ended(now_s, cause, stalled_s)

    spent = total(ledger.months)

    assert spent.trained_s + sum(spent.down_s.values()) <= now_s - first_s + 1e-3
    assert sum(spent.lost_s.values()) <= spent.trained_s + 1e-3
    assert 0 <= spent.stalled_s <= spent.trained_s + 1e-3
    assert spent.productive_share is None or 0 <= spent.productive_share <= 1
