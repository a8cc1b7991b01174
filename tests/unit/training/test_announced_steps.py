"""Which of its steps a rank saves for one that was announced, and what it gives up (ADR 0067)."""

import pytest
import torch
from tests.unit.training.savers import saver_of

from holdfast.core.announcements import Announcement, SaveReason
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
