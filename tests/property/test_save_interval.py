"""Laws of the interval that ``Auto()`` chooses, whatever was measured or told (G7)."""

import math

from hypothesis import given
from hypothesis import strategies as st

from holdfast import Auto
from holdfast.core.failure_record import FailureRecord
from holdfast.core.save_interval import Observed, optimum_s

times = st.floats(min_value=0, max_value=1e9)
positive = st.floats(min_value=1e-3, max_value=1e9)
anything = st.floats()
records = st.builds(
    FailureRecord,
    failures_count=st.integers(-(1 << 63), (1 << 63) - 1),
    trained_s=anything,
)


@given(
    mtbf_s=positive, least=positive, more=times, stall_s=times, restore_s=times,
    training_s=times, record=records,
)  # fmt: skip
def test_the_interval_stays_within_its_bounds_and_can_be_told(
    mtbf_s, least, more, stall_s, restore_s, training_s, record
):
    """Also for what no peer should say: NaN, infinite times, failures below zero."""
    auto = Auto(mtbf_s=mtbf_s, interval_s_min=least, interval_s_max=least + more)
    observed = Observed(stall_s=stall_s, restore_s=restore_s, training_s=training_s, record=record)

    assert least <= auto.interval_s(observed) <= least + more
    assert auto.why(observed).startswith("every ")


@given(cost_s=times, mtbf_s=positive, restart_s=times)
def test_no_interval_is_longer_than_the_time_between_failures(cost_s, mtbf_s, restart_s):
    assert 0 <= optimum_s(cost_s, mtbf_s, restart_s) <= mtbf_s


@given(
    cost_s=st.floats(1e-3, 10.0), mtbf_s=st.floats(1e4, 1e6), restart_s=st.floats(0, 600),
    factor=st.sampled_from([0.5, 0.8, 1.25, 2.0]),
)  # fmt: skip
def test_any_other_interval_costs_more(cost_s, mtbf_s, restart_s, factor):
    """By Daly's model of the whole run, of which the formula is the first order."""

    def wall_s(interval_s):
        work_s = interval_s - cost_s
        return mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1(interval_s / mtbf_s) / work_s

    best_s = optimum_s(cost_s, mtbf_s, restart_s)
    if min(best_s, best_s * factor) > 2 * cost_s:
        assert wall_s(best_s) <= wall_s(best_s * factor) * (1 + 1e-9)


@given(
    assumed_s=positive,
    trained_s=times,
    failures=st.integers(0, 1000),
    more_s=positive,
)
def test_training_makes_failures_rarer_and_failures_make_them_more_frequent(
    assumed_s, trained_s, failures, more_s
):
    seen = FailureRecord(failures_count=failures, trained_s=trained_s).mtbf_s(assumed_s)
    later = FailureRecord(failures_count=failures, trained_s=trained_s + more_s).mtbf_s(assumed_s)
    failed = FailureRecord(failures_count=failures + 1, trained_s=trained_s).mtbf_s(assumed_s)

    assert failed < seen <= later
