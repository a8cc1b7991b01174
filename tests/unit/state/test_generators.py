"""Generators that are copied as they lie in memory say what their own calls say."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from holdfast.state import generators, rng
from holdfast.state.generators import NumpyWords, Own, PythonWords

MEMORY, OWN = "in memory", "by its own calls"


def of_python(how: str) -> Any:
    return generators.python() if how == MEMORY else Own(random)


def of_numpy(how: str) -> Any:
    return generators.numpy(np) if how == MEMORY else Own(np.random)


def draw_python() -> list[float]:
    return [random.random(), random.gauss(0, 1), float(random.getrandbits(40))]


def draw_numpy() -> list[float]:
    return [np.random.rand(), np.random.randn(), float(np.random.randint(1 << 30))]  # noqa: NPY002


BOTH = [(of_python, draw_python), (of_numpy, draw_numpy)]


@pytest.fixture(autouse=True)
def _kept():
    with rng.kept():
        yield


def test_here_it_is_found():
    """Else every batch of a captured loader costs 0.3 ms again, and nobody would see it."""
    assert isinstance(generators.python(), PythonWords)
    assert isinstance(generators.numpy(np), NumpyWords)


@pytest.mark.parametrize(("make", "draw"), BOTH)
@pytest.mark.parametrize("how", [MEMORY, OWN])
@pytest.mark.parametrize("count", range(5))
def test_what_was_taken_is_put_back(make, draw, how, count):
    """Also in the middle of a pair of normal draws, of which the second is kept for later."""
    generator = make(how)
    for _ in range(count):
        draw()
    taken = generator.take()
    first = [draw() for _ in range(700)]
    generator.put(taken)

    assert [draw() for _ in range(700)] == first


@pytest.mark.parametrize(("make", "draw"), BOTH)
@pytest.mark.parametrize("count", range(3))
def test_both_ways_tell_the_same(make, draw, count):
    for _ in range(count):
        draw()
    quick, own = make(MEMORY), make(OWN)
    taken, told = quick.take(), own.take()
    plain, expected = quick.plain(taken), own.plain(told)

    assert repr(quick.told(taken)) == repr(told)
    assert [type(one) for one in plain] == [type(one) for one in expected]
    assert repr(plain) == repr(expected)
    assert (plain[1] == expected[1]).all()


def test_numpys_other_bits_are_taken_by_its_own_calls():
    """``set_bit_generator`` gives the global functions something else to draw from."""
    generator = of_numpy(MEMORY)
    before, held = generator.take(), np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.MT19937(8))
        taken = generator.take()
        first = draw_numpy()
        generator.put(taken)
        assert draw_numpy() == first
    finally:
        np.random.set_bit_generator(held)
    generator.put(before)
    assert repr(generator.take()) == repr(before)


@pytest.mark.parametrize(("kind", "make"), [(PythonWords, of_python), (NumpyWords, of_numpy)])
def test_what_is_not_what_it_seems_is_not_believed(monkeypatch, kind, make):
    """Another interpreter, another NumPy: slower, and right."""
    monkeypatch.setattr(kind, "told", lambda *_: "something else")

    assert isinstance(make(MEMORY), Own)
