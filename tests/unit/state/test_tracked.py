"""Variables of a script are values of its state, files with their position too."""

from __future__ import annotations

import functools
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


def counter():
    count, best = 0, None

    def step(loss):
        nonlocal count, best
        count += 1
        best = loss if best is None else min(best, loss)
        return count, best

    return step


def test_variables_of_a_closure_come_back():
    step, fresh = counter(), counter()
    kept = holdfast.track(step, "count", "best")
    step(3.0)
    step(2.0)
    holdfast.track(fresh, "count", "best").load_state_dict(kept.state_dict())
    assert fresh(5.0) == (3, 2.0)
    assert step(1.0) == (3, 1.0)


def test_a_closure_is_found_under_decorators_partials_and_methods():
    step = counter()

    @functools.wraps(step)
    def logged(*args):
        return step(*args)

    for kept in (logged, functools.partial(logged, 1.0), SimpleNamespace(step=logged).step):
        assert holdfast.track(kept, "count").state_dict() == {"count": 0}


def test_attributes_of_a_function_are_attributes():
    def step():
        step.count += 1

    step.count = 0
    kept = holdfast.track(step, "count")
    step()
    assert kept.state_dict() == {"count": 1}


def test_a_variable_that_a_closure_does_not_have_or_set_is_refused_with_those_that_it_has():
    with pytest.raises(InvalidRequestError, match="no epoch; its variables are best, count"):
        holdfast.track(counter(), "epoch")

    def late():
        def step():
            return value

        found = pytest.raises(InvalidRequestError, match="value has no value yet")
        with found:
            holdfast.track(step, "value")
        value = 1
        return step

    late()


def test_two_that_share_a_variable_have_one_value():
    def pair():
        count = 0

        def up():
            nonlocal count
            count += 1

        def get():
            return count

        return up, get

    up, get = pair()
    holdfast.track(up, "count").load_state_dict({"count": 7})
    up()
    assert get() == 8
