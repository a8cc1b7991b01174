"""Variables of a script are values of its state, files with their position too."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import holdfast
from holdfast.errors import InvalidRequestError


def test_values_come_back_by_name():
    kept = holdfast.track(step=3, best=0.5, hidden=torch.ones(2))
    fresh = holdfast.track(step=0, best=9.0, hidden=None)
    fresh.load_state_dict(kept.state_dict())
    assert (fresh.step, fresh.best) == (3, 0.5)
    assert fresh.hidden is kept.hidden


def test_attributes_of_an_object_come_back():
    trainer = SimpleNamespace(epoch=2, best=1.0, name="a")
    fresh = SimpleNamespace(epoch=0, best=0.0, name="b")
    kept = holdfast.track(trainer, "epoch", "best")
    trainer.epoch = 5
    holdfast.track(fresh, "epoch", "best").load_state_dict(kept.state_dict())
    assert fresh == SimpleNamespace(epoch=5, best=1.0, name="b")


@pytest.mark.parametrize("mode", ["a", "ab", "r+", "a+"])
def test_what_was_written_behind_the_checkpoint_is_cut_off(tmp_path, mode):
    path = tmp_path / "log"
    path.write_text("old\n")
    text = (lambda line: line.encode()) if "b" in mode else str
    with path.open(mode) as log:
        log.seek(0, 2)
        log.write(text("one\n"))
        state = holdfast.track(log=log).state_dict()
        log.write(text("two\n"))
    with path.open(mode) as again:
        holdfast.track(log=again).load_state_dict(state)
        again.write(text("three\n"))
    assert path.read_text() == "old\none\nthree\n"


def test_reading_goes_on_where_it_was(tmp_path):
    path = tmp_path / "data"
    path.write_text("ab\ncd\nef\n")
    with path.open() as data:
        assert data.readline() == "ab\n"
        state = holdfast.track(data=data).state_dict()
    with path.open() as again:
        holdfast.track(data=again).load_state_dict(state)
        assert again.read() == "cd\nef\n"


def test_a_file_that_was_emptied_is_refused_and_nothing_is_changed(tmp_path):
    path = tmp_path / "log"
    with path.open("w") as log:
        log.write("one\n")
        state = holdfast.track(log=log, step=4).state_dict()
    with path.open("w") as emptied:
        kept = holdfast.track(log=emptied, step=0)
        with pytest.raises(InvalidRequestError, match=r"'log' ends at 0, but had got to 4.*\"a\""):
            kept.load_state_dict(state)
        assert kept.step == 0


def test_other_names_are_refused():
    with pytest.raises(InvalidRequestError, match="tracked are a, but b were saved"):
        holdfast.track(a=1).load_state_dict(holdfast.track(b=1).state_dict())


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (holdfast.track, "there are no values"),
        (lambda: holdfast.track(state_dict=1), "state_dict is taken"),
        (lambda: holdfast.track(SimpleNamespace(a=1)), "name some of its attributes"),
        (lambda: holdfast.track(SimpleNamespace(a=1), "a", "b"), "it has no b"),
    ],
)
def test_what_cannot_be_tracked_is_refused(call, text):
    with pytest.raises(InvalidRequestError, match=text):
        call()
