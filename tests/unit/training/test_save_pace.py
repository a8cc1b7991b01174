"""The wish for an interval is steady, and says why once it changes (G7)."""

import logging

import pytest

from holdfast import Auto, EverySeconds
from holdfast.core.announcements import SaveReason
from holdfast.core.failure_record import FailureRecord
from holdfast.core.save_interval import Wish
from holdfast.policy import chosen_interval
from holdfast.training.save_pace import LOOK_S, SavePace

NEVER = FailureRecord()
AUTO = Auto(mtbf_s=3600, interval_s_min=1, interval_s_max=600)


def pace_of(policy, record=NEVER, *, took_s=(), rank=0):
    pace = SavePace(lambda observed: chosen_interval(policy, observed), "j", rank)
    pace.begin(record, took_s, 0.0)
    return pace


def test_the_first_save_comes_soon_and_the_next_after_the_optimum_of_its_stall():
    pace = pace_of(AUTO)
    assert pace.wish(0.0, 0.0).interval_s == 1.0

    wish = pace.wish(0.5, 0.0)

    assert (60.0, SaveReason.AUTO) == (wish.interval_s, wish.reason)
    assert wish.why.startswith("every 60 s: a save stalls training for 0.5 s, no failures in ")


def test_failures_and_a_long_restore_move_it_and_are_named():
    record = FailureRecord(failures_count=3, trained_s=3600.0)
    pace = pace_of(AUTO, record, took_s=(25.0, 200.0))

    wish = pace.wish(0.5, 0.0)

    assert wish.interval_s == pytest.approx((2 * 0.5 * (1800 + 225)) ** 0.5)
    assert "a restore takes 4 min, 3 failures in 60 min of training" in wish.why
    assert "make one in 30 min" in wish.why


def test_noise_of_measurements_is_no_news(caplog):
    """A change of the wish is told to metadata at once: it must be rare."""
    pace = pace_of(AUTO)
    pace.wish(0.5, 0.0)
    with caplog.at_level(logging.INFO):
        wishes = {pace.wish(0.5 + 0.01 * (at % 7), 0.0) for at in range(50)}

    assert len(wishes) == 1
    assert not caplog.records


def test_the_first_save_which_copies_all_at_once_is_soon_forgotten():
    pace = pace_of(AUTO)
    assert pace.wish(8.0, 0.0).interval_s == 240.0

    assert pace.wish(0.5, 0.0).interval_s == 60.0


def test_one_save_that_stalled_long_moves_nothing_and_three_do():
    pace = pace_of(AUTO)
    for stall_s in (0.5, 0.51, 0.5, 0.51):
        pace.wish(stall_s, 0.0)

    assert [60, 60, 240] == [pace.wish(s, 0.0).interval_s for s in (8.0, 9.0, 8.0)]


def test_training_without_a_failure_makes_it_longer():
    pace = pace_of(AUTO)
    before = pace.wish(0.5, 0.0)
    assert before == pace.wish(0.5, LOOK_S / 2)

    assert pace.wish(0.5, 3600.0).interval_s == pytest.approx(7200**0.5)


def test_while_saves_fail_it_is_stretched():
    pace = pace_of(AUTO)

    assert pace.wish(0.5, 0.0, stretch=4.0).interval_s == 240.0
    assert pace.wish(0.5, 0.0).interval_s == 60.0


def test_only_rank_0_tells_why(caplog):
    with caplog.at_level(logging.INFO):
        wish = pace_of(AUTO, rank=1).wish(0.5, 0.0)

    assert (60.0, "") == (wish.interval_s, wish.why)
    assert not caplog.records


def test_an_interval_of_the_users_stays_as_it_is_and_needs_no_reason():
    wish = pace_of(EverySeconds(30)).wish(7.0, 1e6)

    assert Wish(30, SaveReason.INTERVAL) == wish
