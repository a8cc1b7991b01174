"""What a loader's parts remember is found, taken and put back: by attribute, in bounds."""

from __future__ import annotations

import logging
import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from holdfast.errors import InvalidRequestError
from holdfast.state import places
from holdfast.state.places import Places


class Numbers(Dataset[int]):
    """Ten numbers; ``held`` is what it remembers."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)

    def __len__(self) -> int:
        return 10

    def __getitem__(self, at: int) -> int:
        return at


class InOrder(Sampler[int]):
    """All of them in order; ``held`` is what it remembers."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)

    def __iter__(self):
        return iter(range(10))

    def __len__(self) -> int:
        return 10


def with_sampler(**held: Any) -> DataLoader[int]:
    return DataLoader(Numbers(), sampler=InOrder(**held))


def with_dataset(**held: Any) -> DataLoader[int]:
    return DataLoader(Numbers(**held), sampler=InOrder())


def chain(length: int, **last: Any) -> SimpleNamespace:
    """Return ``length`` objects, each held by the one before; the last has the attributes."""
    made = SimpleNamespace(**last)
    for _ in range(length - 1):
        made = SimpleNamespace(next=made)
    return made


def values(found: Places) -> dict[str, str]:
    return found.take()["values"]


def generators(found: Places) -> dict[str, Any]:
    return found.take()["generators"]


# What is taken: what has changed.


def test_what_has_not_changed_is_not_taken():
    """Else a loader here would get the settings of there, which were never its to remember."""
    loader = with_sampler(epoch=1, seen=[1], name="abc")
    assert {} == values(Places(loader))


def test_what_has_changed_is_taken():
    loader = with_sampler(epoch=1, seen=[1], late=2.5)
    found = Places(loader)
    loader.sampler.epoch = 2
    loader.sampler.seen.append(2)  # the very object of before

    assert {"sampler.epoch": "2", "sampler.seen": "[1, 2]"} == values(found)


@pytest.mark.parametrize(
    "value", [None, True, 3, 2.5, "abc", b"abc", (1,), {1}, frozenset({1}), deque([1]), {"a": 1}]
)
def test_every_plain_kind_comes_back_as_it_was(value):
    there, here = with_sampler(kept="at first"), with_sampler(kept="at first")
    of_there, of_here = Places(there), Places(here)
    there.sampler.kept = value
    of_here.put(of_there.take())

    assert value == here.sampler.kept
    assert type(value) is type(here.sampler.kept)


@pytest.mark.parametrize(
    "value", [np.float32(2.5), np.arange(6).reshape(2, 3), torch.Size([2, 3])], ids=repr
)
def test_values_of_numpy_and_sizes_come_back_as_they_were(value):
    there, here = with_sampler(kept=None), with_sampler(kept=None)
    of_there, of_here = Places(there), Places(here)
    there.sampler.kept = value
    of_here.put(of_there.take())

    assert type(value) is type(here.sampler.kept)
    assert np.array_equal(value, here.sampler.kept)


@pytest.mark.parametrize(
    "value",
    [torch.zeros(2), [torch.zeros(2)], logging.INFO.__add__, object(), [object()], 1 << 5000],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_plain_is_left(value):
    found = Places(loader := with_sampler(kept=1))
    loader.sampler.kept = value
    assert {} == values(found)


def test_of_a_dataset_only_single_values_are_taken():
    """What it holds in lists are its samples."""
    found = Places(loader := with_dataset(at=1, items=[1], lines="a"))
    loader.dataset.at, loader.dataset.lines = 2, "b"
    loader.dataset.items.append(2)
    assert {"dataset.at": "2", "dataset.lines": '"b"'} == values(found)


def test_nor_of_the_dataset_of_a_second_loader():
    found = Places(with_dataset(), loader := with_dataset(at=1, items=[1]))
    loader.dataset.items.append(2)
    loader.dataset.at = 2
    assert {"1/dataset.at": "2"} == values(found)


def test_lists_are_taken_of_a_collate_function_and_a_batch_sampler():
    class Collate:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def __call__(self, batch):
            return batch

    loader = DataLoader(Numbers(), batch_sampler=InOrder(sizes=[1]), collate_fn=Collate())
    found = Places(loader)
    loader.collate_fn.seen.append(3)
    loader.batch_sampler.sizes.append(2)
    assert {"batch_sampler.sizes": "[1, 2]", "collate_fn.seen": "[3]"} == values(found)


def test_two_loaders_have_places_of_their_own():
    first, second = with_sampler(epoch=0), with_sampler(epoch=0)
    found = Places(first, second)
    first.sampler.epoch, second.sampler.epoch = 1, 2
    marks = found.take()
    assert {"sampler.epoch": "1", "1/sampler.epoch": "2"} == marks["values"]

    first.sampler.epoch = second.sampler.epoch = 7
    found.put(marks)
    assert (1, 2) == (first.sampler.epoch, second.sampler.epoch)


# Limits.


@pytest.mark.parametrize(
    ("one", "most"),
    [("x", places.TEXT_MAX), (b"x", places.TEXT_MAX), (bytearray(b"x"), places.TEXT_MAX - 1)],
    ids=["str", "bytes", "bytearray"],
)
def test_a_text_as_long_as_the_limit_is_taken_and_a_longer_one_is_not(one, most):
    found = Places(loader := with_sampler(kept=None))
    loader.sampler.kept = one * most
    assert ["sampler.kept"] == list(values(found))
    loader.sampler.kept = one * (most + 1)
    assert {} == values(found)


@pytest.mark.parametrize(
    "made",
    [
        lambda count: list(range(count - 1)),
        lambda count: [list(range(count - 2))],
        lambda count: [[0] * (count // 2), [0] * (count - count // 2 - 3)],
        lambda count: dict.fromkeys(range(count - 1), 0),
        lambda count: ["x" * 16] * (count // 2 - 1) + [0] * (count % 2 + 1),
        lambda count: [bytearray(16 * (count - 2))],
        lambda count: [np.zeros(count - 2, np.int8)],
        lambda count: np.zeros(count - 1, np.int8),
    ],
    ids=[
        "list",
        "inner list",
        "two lists",
        "dict",
        "texts",
        "bytearray",
        "list of an array",
        "array",
    ],
)
def test_so_many_values_are_taken_and_no_more(made):
    found = Places(loader := with_sampler(kept=None))
    loader.sampler.kept = made(places.ITEMS_MAX)
    assert ["sampler.kept"] == list(values(found))
    loader.sampler.kept = made(places.ITEMS_MAX + 1)
    assert {} == values(found)


def test_a_list_of_a_million_is_not_gone_through():
    """Counted by its length: a look at each sample would cost more than the batch."""

    class Shy(list[int]):
        def __iter__(self):
            raise AssertionError("gone through")

    found = Places(loader := with_sampler(kept=None))
    loader.sampler.kept = [Shy(range(places.ITEMS_MAX + 1))]
    assert {} == values(found)


def test_a_long_list_inside_another_is_left():
    found = Places(loader := with_sampler(kept=None))
    loader.sampler.kept = [[0] * (2 * places.ITEMS_MAX)]
    assert {} == values(found)


def test_a_complex_number_comes_back():
    """It is plain, and neither a single value of a data set nor a container."""
    there, here = with_sampler(kept=None), with_sampler(kept=None)
    of_there, of_here = Places(there), Places(here)
    there.sampler.kept = 1 + 2j
    of_here.put(of_there.take())
    assert 1 + 2j == here.sampler.kept


def test_a_list_that_holds_itself_is_left():
    found = Places(loader := with_sampler(kept=None))
    loader.sampler.kept = kept = [1]
    kept.append(kept)
    assert {} == values(found)


def test_few_values_that_are_long_as_json_are_left():
    """``ITEMS_MAX`` does not count keys."""
    found = Places(loader := with_sampler(kept=None))
    loader.sampler.kept = {"k" * 200 + str(number): 0 for number in range(500)}
    assert ["sampler.kept"] == list(values(found))
    loader.sampler.kept = {"k" * 300 + str(number): 0 for number in range(500)}
    assert {} == values(found)


def test_objects_are_looked_at_so_deep_and_no_deeper():
    held = chain(places.DEPTH_MAX, at=0, next=SimpleNamespace(at=0))
    found = Places(with_sampler(first=held))
    for _ in range(places.DEPTH_MAX - 1):
        held = held.next
    held.at = held.next.at = 1
    assert ["sampler.first" + ".0.next" * (places.DEPTH_MAX - 1) + ".0.at"] == list(values(found))


def test_so_many_objects_are_looked_at_and_no_more():
    """The loader, its four parts, and what these hold."""
    many = [SimpleNamespace(at=0) for _ in range(places.HOLDERS_MAX)]
    found = Places(loader := with_sampler(many=many))
    for each in many:
        each.at = 1
    taken = [path for path in values(found) if path.startswith("sampler.many.")]
    parts = (loader, loader.sampler, loader.batch_sampler, loader.dataset)
    assert places.HOLDERS_MAX - len(parts) == len(taken)


def test_a_longer_list_of_objects_is_not_gone_through():
    many = [SimpleNamespace(at=0) for _ in range(places.HOLDERS_MAX + 1)]
    found = Places(with_sampler(many=many))
    many[0].at = 1
    assert {} == values(found)


def test_objects_that_hold_each_other_are_looked_at_once():
    held = SimpleNamespace(at=0)
    held.back = SimpleNamespace(at=0, again=held)
    found = Places(loader := with_sampler(held=held))
    held.loader = loader
    found.look()
    held.at = held.back.at = 1
    assert {"sampler.held.0.at": "1", "sampler.held.0.back.0.at": "1"} == values(found)


@pytest.mark.parametrize("container", [list, tuple])
def test_what_a_list_of_objects_remembers_is_found(container):
    """As ``ConcatDataset`` holds its parts."""
    held = container([SimpleNamespace(at=0), SimpleNamespace(at=0)])
    found = Places(with_dataset(parts=held))
    held[1].at = 1
    assert {"dataset.parts.1.at": "1"} == values(found)


def test_nothing_is_looked_for_in_what_belongs_to_the_process():
    """A logger leads to all handlers, a module to all that it imported, a class to its users."""

    class Settings:
        at = 0

    def function() -> None: ...

    function.at = 0
    logger, module = logging.getLogger("holdfast.tests.places"), logging
    opaque = {
        "logger": logger,
        "manager": logging.Logger.manager,
        "handler": logging.NullHandler(),
        "module": module,
        "kind": Settings,
        "function": function,
        "method": InOrder(at=0).__len__,
        "tensor": torch.zeros(1),
    }
    opaque["tensor"].at = 0
    found = Places(with_sampler(**opaque))
    paths = [path for path, _ in found._found.items()]

    assert set(opaque) <= {path.removeprefix("sampler.") for path in paths}
    assert [] == [path for path in paths if path.count(".") > 1 and path.startswith("sampler.")]


# What is put back, and where.


def test_what_had_not_changed_there_is_as_at_first_here():
    """A loader that has been used here goes back, too."""
    there, here = with_sampler(epoch=0, seen=[]), with_sampler(epoch=0, seen=[])
    marks, of_here = Places(there).take(), Places(here)
    here.sampler.epoch = 3
    here.sampler.seen.append(1)
    of_here.put(marks)
    assert (0, []) == (here.sampler.epoch, here.sampler.seen)


def test_what_is_as_it_was_saved_stays_the_very_object():
    """Somebody else may hold it."""
    there, here = with_sampler(seen=[]), with_sampler(seen=[])
    of_there, of_here = Places(there), Places(here)
    there.sampler.seen.append(1)
    here.sampler.seen.append(1)
    held = here.sampler.seen
    of_here.put(of_there.take())
    assert held is here.sampler.seen


def test_a_part_that_was_replaced_gets_what_was_saved():
    there, here = with_sampler(part=SimpleNamespace(at=0)), with_sampler(part=None)
    of_there, of_here = Places(there), Places(here)
    there.sampler.part.at = 5
    here.sampler.part = old = SimpleNamespace(at=0)
    of_here.look()
    here.sampler.part = new = SimpleNamespace(at=0)
    of_here.put(of_there.take())
    assert (0, 5) == (old.at, new.at)


def test_an_attribute_that_only_the_saved_one_had_is_made():
    """As by a sampler that keeps a cursor from its first pass on."""
    there, here = with_sampler(other=0), with_sampler(other=0)
    of_there = Places(there)
    there.sampler.cursor = 7
    there.sampler.rng = random.Random(5)
    of_there.look()
    Places(here).put(of_there.take())
    assert 7 == here.sampler.cursor
    assert random.Random(5).getstate() == here.sampler.rng.getstate()


def test_it_is_made_on_the_object_that_had_it():
    there, here = (with_sampler(a=chain(1, at=0), b=chain(1, at=0)) for _ in range(2))
    of_there = Places(there)
    there.sampler.b.cursor = 7
    of_there.look()
    Places(here).put(of_there.take())
    assert {"at": 0, "cursor": 7} == vars(here.sampler.b)
    assert {"at": 0} == vars(here.sampler.a)
    assert "cursor" not in vars(here.sampler)


def test_a_part_that_is_missing_is_named():
    there, here = with_sampler(part=SimpleNamespace(at=0)), with_sampler(part=None)
    of_there = Places(there)
    there.sampler.part.at = 5
    with pytest.raises(InvalidRequestError, match=r"'sampler\.part\.0\.at'.*build it as then"):
        Places(here).put(of_there.take())


def test_a_generator_in_the_place_of_a_value_is_not_overwritten_with_the_value():
    """A sampler may make its generator at its first pass."""
    there, here = with_sampler(rng=None), with_sampler(rng=None)
    of_there, of_here = Places(there), Places(here)
    there.sampler.rng = random.Random(5)
    of_here.put(of_there.take())
    assert random.Random(5).getstate() == here.sampler.rng.getstate()


def test_the_second_normal_of_a_pair_is_kept_whoever_drew_the_first():
    """It is an attribute of Python's generator, which the loader here had otherwise at first."""
    there, here = (with_sampler(rng=random.Random(1)) for _ in range(2))
    there.sampler.rng.gauss(0, 1)
    of_there, of_here = Places(there), Places(here)
    of_here.put(of_there.take())
    assert there.sampler.rng.gauss(0, 1) == here.sampler.rng.gauss(0, 1)


def test_generators_alone_can_be_put_back():
    there, here = (with_sampler(rng=random.Random(1), epoch=0) for _ in range(2))
    of_there, of_here = Places(there), Places(here)
    there.sampler.rng.random()
    there.sampler.epoch = 1
    of_here.put_generators(of_there.take())
    assert there.sampler.rng.getstate() == here.sampler.rng.getstate()
    assert 0 == here.sampler.epoch
