"""Which of its steps a rank saves for one that was announced, and what it gives up (ADR 0067)."""

import threading

import pytest
import torch
from tests.unit.training.savers import saver_of

from holdfast.core.announcements import Announcement, SaveReason
from holdfast.core.session import SessionView
from holdfast.training.saver import PASSED_COUNT_MAX

ANNOUNCED = Announcement(step=25, reason=SaveReason.AUTO)


@pytest.fixture
def saver(tmp_path):
    with saver_of(tmp_path, {"seen": torch.zeros(3)}) as made:
        yield made


def given_up(saver):
    return [one.step for one in saver.session._outbox.abandoned]


@pytest.mark.parametrize("stride", [1, 7, 1000])
def test_an_announced_step_that_is_not_counted_is_the_first_one_after_it(saver, stride):
    """F23: a script may tell of each tenth step only; no wish by time would ever come true."""
    before = given_up(saver)
    steps = range(stride, 2500, stride)
    asked = [step for step in steps if saver.note_step(step, ANNOUNCED)]

    assert asked == [min(step for step in steps if step >= 25)]
    assert given_up(saver) == before


@pytest.mark.parametrize(("stride", "dropped"), [(1, 25), (10, 30), (24, 48)])
def test_who_hears_too_late_gives_up_the_step_that_others_save(saver, stride, dropped):
    """Else its memory would be held until a later step is safe."""
    before = given_up(saver)
    for step in range(stride, 72, stride):
        assert not saver.note_step(step)
    assert not saver.note_step(72, ANNOUNCED)
    assert not saver.note_step(73, ANNOUNCED)

    assert given_up(saver) == [*before, dropped]


def test_who_hears_much_too_late_gives_up_what_was_announced(saver):
    before = given_up(saver)
    for step in range(30, 30 + PASSED_COUNT_MAX):
        assert not saver.note_step(step)
    assert not saver.note_step(5000, ANNOUNCED)

    assert given_up(saver) == [*before, 25]
    assert "not samples or tokens" in str(saver.take_failure())


def hear(saver, announced=ANNOUNCED):
    """Have the watch thread bring a view."""
    view = SessionView(version="1", announcement=announced)
    thread = threading.Thread(target=saver.on_view, args=(view,))
    thread.start()
    thread.join()


def go_on(saver, *steps):
    for step in steps:
        assert not saver.note_step(step)
        saver.leave(step)


def test_who_hears_too_late_says_so_without_another_step(saver):
    """Others wait at the last step of a round, and this rank, in its next one, for them."""
    before = given_up(saver)
    go_on(saver, 10, 20, 30, 40)
    hear(saver)
    assert given_up(saver) == [*before, 30]

    hear(saver)
    go_on(saver, 50)
    assert not saver.note_step(60, ANNOUNCED)
    assert given_up(saver) == [*before, 30], "once"


def test_news_of_a_step_that_is_not_left_yet_are_not_late(saver):
    before = given_up(saver)
    go_on(saver, 24)
    assert not saver.note_step(25)
    hear(saver)
    assert given_up(saver) == before, "its policy may be about to save it"

    saver.leave(25)
    assert given_up(saver) == [*before, 25]


def test_news_that_came_in_time_are_not_late(saver):
    before = given_up(saver)
    go_on(saver, 24)
    hear(saver)
    assert saver.note_step(25, ANNOUNCED)
    saver.leave(25)

    assert given_up(saver) == before


def test_a_step_that_was_saved_for_another_reason_is_not_given_up(saver):
    saver.on_view(SessionView(version="1", leases=(saver.lease(),)))
    before = given_up(saver)
    assert not saver.note_step(25)
    saver.save(25).wait("staged", 60.0)
    saver.leave(25)
    hear(saver)

    assert given_up(saver) == before


def test_a_step_that_is_owed_and_late_is_waited_for_by_nobody(saver):
    """It found no slot, and would be given up with the next step, which others keep from coming."""
    assert not saver.note_step(25)
    saver.save(25)
    assert saver._state.owed == 25
    saver.leave(25)
    before = given_up(saver)
    hear(saver)

    assert given_up(saver) == [*before, 25]
    assert saver._state.owed is None
