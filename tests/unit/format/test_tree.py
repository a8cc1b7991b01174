"""``core.tree``: plain data as JSON that gives back exactly what went in (P9, F1)."""

import json
import math
from collections import OrderedDict
from typing import NamedTuple

import pytest

from holdfast.errors import InvalidRequestError, ManifestError
from holdfast.format import tree


def there_and_back(value):
    taken = {}

    def leaf(item, path):
        if type(item).__name__ != "Tensor":
            return None
        taken[path] = item
        return path

    text = json.dumps(tree.encode(value, path="state", leaf=leaf), allow_nan=False)
    return tree.decode(json.loads(text), leaf=taken.__getitem__)


def decode(value):
    return tree.decode(value, leaf=lambda name: name)


class Tensor:
    """Stands for what is taken out."""


@pytest.mark.parametrize(
    "value",
    [
        None, True, 0, -1, 2**127, 0.1, -0.0, 1e308, "ä\ud800\x00", b"", b"\xff\x00",
        bytearray(b"x"),
        1 + 2j, complex("inf"), (), (1,), [], [(), [()]], {}, {"": 1}, {"$": 1}, {"$ref": "x"},
        {"a": 1, "$b": 2}, {1: "a", "1": "b"}, {True: 1}, {None: 1}, {(1, (2,)): [3]}, {1.5: {}},
        {1, 2}, frozenset({1}), {frozenset({1}): {frozenset()}}, {b"k": (1, {2})},
    ],
)  # fmt: skip
def test_plain_data_survives_exactly(value):
    """G9: a resumed run is given what the first one had, types included."""
    back = there_and_back(value)

    assert value == back
    assert repr(value) == repr(back) or isinstance(value, set | frozenset)
    assert type(value) is type(back)


def test_bool_int_and_float_keep_their_types():
    assert [bool, int, float] == [type(item) for item in there_and_back([True, 1, 1.0])]


def test_numbers_that_json_has_not_survive():
    nan, up, down, zero = there_and_back([float("nan"), float("inf"), -float("inf"), -0.0])

    assert math.isnan(nan)
    assert (float("inf"), -float("inf"), "-0.0") == (up, down, str(zero))


def test_dict_order_survives():
    assert ["b", "a"] == list(there_and_back({"b": 1, "a": 2}))
    assert [2, "a", 1] == list(there_and_back({2: 0, "a": 0, 1: 0}))


def test_an_ordered_dict_comes_back_as_a_dict():
    assert {"a": 1} == there_and_back(OrderedDict(a=1))


def test_what_leaf_takes_out_leaves_its_name():
    tensor = Tensor()
    value = {"model": [tensor], 3: tensor}

    assert {"$ref": "state.model.0"} == tree.encode(
        {"model": [tensor]}, path="state", leaf=lambda _, path: path
    )["model"][0]
    assert value == there_and_back(value)


@pytest.mark.parametrize(
    "value",
    [object(), len, {"f": lambda: None}, NamedTuple("Point", [("x", int)])(1),
     [Exception("x")], range(3), memoryview(b"x"), {Tensor: 1}],
)  # fmt: skip
def test_what_only_pickle_could_express_is_refused_by_name(value):
    """P9, F1: nothing that is loaded can execute."""
    with pytest.raises(InvalidRequestError, match="state") as caught:
        tree.encode(value, path="state", leaf=lambda *_: None)
    assert caught.value.context["key"].startswith("state")


def test_the_path_of_the_culprit_is_named():
    with pytest.raises(InvalidRequestError, match=r"'extra\.a\.1\.b'"):
        tree.encode({"a": [0, {"b": object()}]}, path="extra", leaf=lambda *_: None)


def test_a_structure_that_contains_itself_is_refused():
    value = []
    value.append(value)
    with pytest.raises(InvalidRequestError, match="deeper than 64"):
        tree.encode(value, path="state", leaf=lambda *_: None)


def test_the_deepest_tree_that_is_written_can_be_read():
    value = 1
    for kind in range(tree.DEPTH_MAX):
        value = ({0: value}, (value,), [value])[kind % 3]

    assert value == there_and_back(value)


def test_an_integer_that_python_cannot_read_back_is_refused():
    assert 2**4095 == there_and_back(2**4095)
    with pytest.raises(InvalidRequestError, match="4097 bits"):
        there_and_back(-(2**4096))


@pytest.mark.parametrize(
    "value",
    [
        {"$pickle": "gASV"}, {"$ref": 1}, {"$float": "1e3"}, {"$float": 1.0}, {"$bytes": "!"},
        {"$bytes": "ä"}, {"$bytes": ["a"]}, {"$tuple": "ab"}, {"$set": [[1]]}, {"$frozenset": {}},
        {"$complex": ["1"]}, {"$complex": ["a", "b"]}, {"$dict": ["ab"]}, {"$dict": [[1]]},
        {"$dict": [[[1], 2]]}, {"$dict": {"a": 1}}, {"$": []}, {"$bytearray": None},
        {"$complex": [[], {}]}, {"$tuple": None},
    ],
)  # fmt: skip
def test_a_marker_that_is_not_ours_is_refused(value):
    """P9: state comes from a peer."""
    with pytest.raises(ManifestError, match=r"\$"):
        decode([value])


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: {"a": v}, lambda v: {"$tuple": [v]}])
def test_deep_nesting_is_refused_before_the_stack_ends(wrap):
    value = 0
    for _ in range(500):
        value = wrap(value)
    with pytest.raises(ManifestError, match="nested deeper"):
        decode(value)
