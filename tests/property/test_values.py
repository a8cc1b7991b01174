"""Plain values: what a save takes comes back equal in value, type and order, or is refused (F1).

Both ways back are tried: ``decode`` alone, and ``merge`` into what a fresh process has there.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from enum import Enum, IntEnum
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import InvalidRequestError, ManifestError
from holdfast.format.tree import decode, encode
from holdfast.state.values import make_numpy, merge

DTYPES = [
    "?", "<i1", "<u2", ">i4", "<i8", "<u8", "<f2", ">f4", "<f8", "<f16", "<c8", "<c16",
    "<M8", "<M8[ns]", "<m8[25s]", "<U0", "<U3", ">U2", "|S0", "|S2", "|V0", "|V3",
]  # fmt: skip


def numpy_arrays() -> st.SearchStrategy[np.ndarray]:
    """Return arrays of every dtype, of 0 to 3 dims and any of them 0, with any bytes."""

    def fill(dtype: np.dtype, shape: tuple[int, ...], seed: int) -> np.ndarray:
        count = dtype.itemsize * int(np.prod(shape, dtype=int))
        if dtype.kind == "U":
            flat = np.random.default_rng(seed).integers(0, 0xD7FF, count // 4, dtype="u4")
            flat = flat.astype(dtype.byteorder + "u4")
        else:
            flat = np.random.default_rng(seed).integers(0, 256, count, dtype="u1")
        return np.ndarray(shape, dtype=dtype, buffer=bytearray(flat.tobytes()))

    shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
    return st.builds(fill, st.sampled_from(DTYPES).map(np.dtype), shapes, st.integers(0, 2**32))


def numpy_scalars() -> st.SearchStrategy[np.generic]:
    """Return NumPy scalars, texts and bytes that end with NUL or are empty among them."""
    texts = st.text(max_size=3).map(np.str_) | st.binary(max_size=3).map(np.bytes_)
    numbers = numpy_arrays().filter(lambda a: a.size and a.dtype.kind not in "USV")
    return texts | numbers.map(lambda a: a.reshape(-1)[0])


scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
    | st.binary(max_size=3) | st.complex_numbers()
)  # fmt: skip
keys = st.recursive(
    scalars.filter(lambda value: value == value),  # noqa: PLR0124 - NaN finds nothing
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=2),
    max_leaves=3,
)


def containers(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    """Return every container that is saved, with ``inner`` in it."""
    lists = st.lists(inner, max_size=3)
    dicts = st.dictionaries(keys, inner, max_size=3)
    factories = st.sampled_from([None, int, list, dict])
    return (
        lists | dicts | lists.map(tuple) | dicts.map(OrderedDict)
        | st.builds(deque, lists, st.none() | st.integers(3, 5))
        | st.sets(keys, max_size=3) | st.frozensets(keys, max_size=3)
        | st.dictionaries(keys, st.integers(), max_size=3).map(Counter)
        | st.builds(defaultdict, factories, dicts)
        | st.lists(st.integers(0, 2**40), max_size=3).map(torch.Size)
    )  # fmt: skip


leaves = scalars | numpy_arrays() | numpy_scalars() | st.binary(max_size=3).map(bytearray)
values = st.recursive(leaves, containers, max_leaves=8)


def there_and_back(value: object) -> object:
    text = json.dumps(encode(value, path="state", leaf=lambda *_: None))
    return decode(json.loads(text), leaf=str, numpy=make_numpy, size=torch.Size)


def exact(value: object) -> object:
    """Return what two values share if and only if they are equal in value, type and order."""
    kind = type(value)
    if isinstance(value, dict):
        pairs = [(exact(key), exact(item)) for key, item in value.items()]
        return kind, getattr(value, "default_factory", None), pairs
    if isinstance(value, list | tuple | deque):
        return kind, getattr(value, "maxlen", None), [exact(item) for item in value]
    if isinstance(value, set | frozenset):
        return kind, sorted(repr(exact(item)) for item in value)
    if isinstance(value, np.ndarray):
        return kind, value.dtype.str, value.shape, value.tobytes(), value.flags.writeable
    if isinstance(value, np.generic):
        return kind, value.dtype.str, value.tobytes()
    return kind, repr(value)  # tells -0.0 from 0.0, and one NaN is like another


@given(values)
def test_what_is_taken_comes_back_equal_in_value_type_and_order(value):
    """G9; defects T1, T3, T5."""
    assert exact(value) == exact(there_and_back(value))


@given(values, values)
def test_a_restore_into_other_values_gives_what_was_saved(value, here):
    """G9; defects T2, T5: the order is the saved one, and what had been removed stays away."""
    assert exact(value) == exact(merge(here, there_and_back(value), "x"))


@given(st.dictionaries(keys, values, max_size=4), st.randoms(use_true_random=False))
def test_a_restore_into_the_same_keys_in_another_order_keeps_the_saved_order(value, random):
    """G9; defect T2: the usual case, a dict whose order moved while it trained."""
    order = list(value)
    random.shuffle(order)
    here = dict.fromkeys([*order, "only here"])
    back = merge(here, there_and_back(value), "x")

    assert back is here
    assert exact(value) == exact(back)


def test_a_lenient_restore_leaves_the_keys_that_only_this_process_has():
    """F20: ``strict=False`` loads what matches and leaves the rest alone."""
    here = {"new": 1, "a": {"new": 2, "b": 0}}

    assert {"a": {"b": 5, "new": 2}, "new": 1} == merge(here, {"a": {"b": 5}}, "x", exact=False)
    assert ["a", "new"] == list(here)


class Color(Enum):
    """Compared by ``is``."""

    RED = 1


class Size(IntEnum):
    """An int that is more than one."""

    BIG = 1


class Point(NamedTuple):
    """A tuple that is more than one."""

    x: int


def subclasses() -> list[object]:
    """Return a value of a subclass of each type that is saved."""
    made = [
        type(f"My{kind.__name__}", (kind,), {})()
        for kind in (dict, list, tuple, int, float, str, set, frozenset, OrderedDict, Counter,
                     deque, bytes, bytearray, complex, UserDict)
    ]  # fmt: skip
    return [*made, UserDict(), defaultdict(lambda: 0), Color.RED, Size.BIG, Point(1)]


def numpy_refused(folder: object) -> list[object]:
    """Return values of NumPy that would come back as something else."""
    return [
        np.memmap(f"{folder}/map", dtype="f4", mode="w+", shape=(5,)),
        np.matrix([[1, 2], [3, 4]]),
        np.ma.masked_array([1, 2], mask=[0, 1]),
        np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f4")]),
        np.zeros(2, dtype=[("a", "i4")]),
        np.zeros(1, dtype=[("a", "i4")])[0],
        np.array([object()]),
        np.array(["text"], dtype=np.dtypes.StringDType()),
    ]


@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_what_would_come_back_as_something_else_is_refused_by_name(tmp_path):
    """F1; defects T1 and T5: a memmap came back as its first element, an Enum as a number."""
    for value in [*subclasses(), *numpy_refused(tmp_path)]:
        for held in (value, [value], {"a": value}):
            with pytest.raises(InvalidRequestError, match=r"state 'x") as refused:
                encode(held, path="x", leaf=lambda *_: None)
            assert type(value).__name__ in str(refused.value) or "NumPy value" in str(refused.value)


@pytest.mark.parametrize(
    "body",
    [
        ["|O", [1], "AAAAAAAAAAA="], ["|T16", [1], "AAAAAAAAAAAAAAAAAAAAAA=="],
        ["<U0", [-1], ""], ["<f4", [-1, -1], "AAAAAA=="], ["<f4", [1], ""], ["<f4", None, ""],
        ["<i4,<f4", [1], "AAAAAAAAAAA="], ["O,O", [0], ""], [5, [1], ""], ["<f4", [0.5], ""],
        ["<f4", "ab", ""], ["<U1", None, "////fw=="],
        ["<f4", [1], "AAAAAAAAAAA="], ["<f4", None, "AAAAAAAAAAA="],
        ["(2,)<i4", [1], "AAAAAAAAAAA="],
    ],
)  # fmt: skip
def test_a_malformed_array_is_refused_before_numpy_sees_it(body):
    """P9: an array of objects made from bytes, or with a negative dim, ends the process.

    More bytes than the shape takes, or items that have a shape, would be another array in silence.
    """
    with pytest.raises(ManifestError, match="numpy"):
        decode({"$numpy": body}, leaf=str, numpy=make_numpy)
