"""What counts the batches of a pass from outside is found while it asks for one, and moved on."""

from __future__ import annotations

from itertools import islice, repeat

import pytest
from tqdm import tqdm

from holdfast.auto import counters as module
from holdfast.auto.counters import Counters, counters_of


class Batches:
    """Gives 3, 4, ... 10; at the first one three were given before."""

    def __init__(self, first=0):
        self.next = first

    def __iter__(self):
        return self

    def __next__(self):
        if self.next == 0:
            self.found = counters_of(self)
            self.left = self.found.move_on(3)
            self.next = 3
        if self.next > 10:
            raise StopIteration
        self.next += 1
        return self.next - 1


def through(batches):
    yield from batches


@pytest.mark.parametrize(
    ("around", "first", "last"),
    [
        (enumerate, (3, 3), (10, 10)),
        (lambda b: enumerate(b, 1), (4, 3), (11, 10)),
        (lambda b: enumerate(tqdm(b, disable=True)), (3, 3), (10, 10)),
        (lambda b: tqdm(enumerate(b), disable=True), (3, 3), (10, 10)),
        (lambda b: enumerate(through(through(b))), (3, 3), (10, 10)),
        (lambda b: islice(b, 6), 3, 5),
        (lambda b: islice(enumerate(b), 7), (3, 3), (6, 6)),
        (lambda b: enumerate(zip(b, repeat(1), strict=False)), (3, (3, 1)), (10, (10, 1))),
        (lambda b: enumerate(zip(b, Batches(3), strict=False)), (3, (3, 3)), (10, (10, 10))),
        (lambda b: map(str, b), "3", "10"),
    ],
)
def test_it_goes_on_where_it_was(around, first, last):
    batches = Batches()
    taken = list(around(batches))
    assert (taken[0], taken[-1]) == (first, last)
    assert (batches.found.others, batches.left) == ([], [])


@pytest.mark.parametrize(
    ("beside", "name"),
    [(lambda: range(9), "range_iterator"), (lambda: through([1] * 9), "generator")],
)
def test_what_is_beside_the_batches_is_named(beside, name):
    batches = Batches()
    list(zip(beside(), batches, strict=False))
    assert batches.found.others == [f"{name} beside the batches in zip"]


def test_counters_of_other_iterators_are_left_alone():
    batches, other = Batches(), enumerate("abc")
    next(other)
    list(batches)
    assert next(other) == (1, "b")
    assert batches.found == Counters()


def test_it_is_told_whether_they_count_each():
    each, slices = enumerate("abcdef"), islice("abcdef", 4)
    counters = Counters([each], [slices])
    before = counters.values()
    next(each), next(slices)
    assert counters.follow(before, 1)
    next(each)
    assert not counters.follow(before, 2)


def test_a_slice_that_is_used_up_counts_nothing():
    slices = islice("ab", 1)
    list(slices)
    assert Counters(slices=[slices]).values() == [0]


def test_a_slice_that_another_python_keeps_otherwise_is_named(monkeypatch):
    monkeypatch.setattr(module, "_KNOWS_SLICES", False)
    slices = islice("abc", 2)

    assert Counters(slices=[slices]).move_on(1) == ["islice"]
    assert list(slices) == ["a", "b"]
