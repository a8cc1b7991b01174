"""Kinds of state by registry: what users register is saved and put back like what we know."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import numpy as np
import pytest
import torch
from tests.unit.state import worlds
from torch import nn

import holdfast
from holdfast.errors import InvalidRequestError
from holdfast.state import kinds
from holdfast.state.capture import Capture


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """Each test registers for itself."""
    monkeypatch.setattr(kinds, "_registered", {})


class Average:
    """An object that Holdfast knows nothing of."""

    def __init__(self, value: float) -> None:
        self.mean = torch.full((3,), value)
        self.count = int(value)


class Weighted(Average):
    pass


class Colour(Enum):
    RED = 1


class Pair(NamedTuple):
    first: int
    second: int


def take(average: Average) -> dict[str, object]:
    return {"mean": average.mean, "count": average.count}


def put(average: Average, tree: dict[str, object]) -> None:
    average.mean, average.count = tree["mean"], tree["count"]


def test_an_object_of_a_registered_type_comes_back(tmp_path):
    """Anywhere in the state, in place, its tensors bit for bit."""
    holdfast.register_handler(Average, take, put)
    here = {"a": Average(0), "deep": {"list": [Average(0)]}}
    first, second = here["a"], here["deep"]["list"][0]
    worlds.there_and_back(tmp_path, {"a": Average(3), "deep": {"list": [Average(4)]}}, here)

    assert (first, second) == (here["a"], here["deep"]["list"][0])
    assert (3, 4) == (first.count, second.count)
    assert torch.equal(torch.full((3,), 4.0), second.mean)


def test_a_handler_holds_for_one_shot_checkpoints_too(tmp_path):
    holdfast.register_handler(Average, take, put)
    holdfast.save(tmp_path / "x", {"a": Average(3)})
    here = {"a": Average(0)}
    holdfast.load(tmp_path / "x", here)

    assert 3 == here["a"].count


def test_the_most_specific_type_wins(tmp_path):
    used = []
    holdfast.register_handler(Average, lambda a: used.append("base") or take(a), put)
    holdfast.register_handler(Weighted, lambda a: used.append("sub") or take(a), put)

    class Third(Weighted):
        pass

    here = {"a": Average(0), "w": Third(0)}
    worlds.there_and_back(tmp_path, {"a": Average(1), "w": Third(2)}, here)

    assert {"base", "sub"} == set(used)
    assert (1, 2) == (here["a"].count, here["w"].count)
    assert kinds.kind_of("w", Third(0)) is kinds.kind_of("w", Weighted(0))


def test_a_class_below_one_that_we_know_can_have_a_way_of_its_own(tmp_path):
    """A module that is registered is asked, and its tables are not surveyed."""

    class Frozen(nn.Linear):
        pass

    holdfast.register_handler(Frozen, lambda m: {"w": m.weight.detach()[:1]}, lambda m, tree: (
        m.weight.data.fill_(float(tree["w"][0, 0])), None)[1])  # fmt: skip
    there, here = Frozen(2, 2), Frozen(2, 2)
    worlds.there_and_back(tmp_path, {"m": there}, {"m": here})

    assert torch.equal(there.weight[:1, :1].expand(2, 2), here.weight)
    assert [] == Capture({"m": there}, rank=0, world_size=1).survey().tensors


def test_state_dict_is_asked_unless_a_handler_is_there(tmp_path):
    class Both(Average):
        def state_dict(self):
            return {"never": 1}

        def load_state_dict(self, tree):
            raise AssertionError(tree)

    holdfast.register_handler(Average, take, put)
    here = {"a": Both(0)}
    worlds.there_and_back(tmp_path, {"a": Both(2)}, here)

    assert 2 == here["a"].count


def test_each_class_is_registered_once():
    holdfast.register_handler(Average, take, put)
    with pytest.raises(InvalidRequestError, match="Average has a handler"):
        holdfast.register_handler(Average, take, put)
    holdfast.register_handler(Weighted, take, put)


@pytest.mark.parametrize(
    "kind",
    [dict, int, str, torch.Tensor, nn.Parameter, object, nn.Module, holdfast.State, "text",
     np.ndarray, np.float32, torch.Size],
)  # fmt: skip
def test_what_is_saved_as_it_is_takes_no_handler(kind):
    with pytest.raises(InvalidRequestError, match=r"register|pass the class"):
        holdfast.register_handler(kind, take, put)


def test_what_a_handler_raises_names_the_objects_place(tmp_path):
    """S4: the save it costs says which value it was, and so does a restore."""

    def broken(*_):
        raise ValueError("out of luck")

    holdfast.register_handler(Average, broken, put)
    capture = Capture({"deep": {"a": Average(1)}}, rank=0, world_size=1)
    with pytest.raises(ValueError, match="out of luck") as caught:
        capture.live(capture.survey())
    assert ["while taking state 'deep.a'"] == caught.value.__notes__

    holdfast.register_handler(Weighted, take, broken)
    with pytest.raises(ValueError, match="out of luck") as caught:
        worlds.there_and_back(tmp_path, {"b": Weighted(1)}, {"b": Weighted(0)})
    assert ["while loading state 'b'"] == caught.value.__notes__


def test_a_tree_that_only_pickle_could_express_is_refused_by_its_place():
    holdfast.register_handler(Average, lambda _: {"bad": object()}, put)
    capture = Capture({"a": Average(1)}, rank=0, world_size=1)
    with pytest.raises(InvalidRequestError, match=r"'a\.bad'"):
        capture.live(capture.survey())


def test_a_tree_may_be_a_tensor_alone(tmp_path):
    holdfast.register_handler(Average, lambda a: a.mean, lambda a, mean: setattr(a, "mean", mean))
    here = {"a": Average(0), "deep": [Average(0)]}
    worlds.there_and_back(tmp_path, {"a": Average(3), "deep": [Average(4)]}, here)

    assert torch.equal(torch.full((3,), 3.0), here["a"].mean)
    assert torch.equal(torch.full((3,), 4.0), here["deep"][0].mean)


@pytest.mark.parametrize("inner", ["module", "itself"])
def test_an_object_inside_a_tree_is_refused_at_the_save(tmp_path, inner):
    """P1: it would be named and never saved, and no restore could find it."""
    holdfast.register_handler(
        Average, lambda a: {"in": nn.Linear(1, 1) if inner == "module" else a}, put
    )
    with pytest.raises(InvalidRequestError, match=r"'a\.in' is a .* inside the state of another"):
        holdfast.save(tmp_path / "x", {"a": Average(1)})


@pytest.mark.parametrize("made", [lambda: Average(1), torch.Generator, np.random.default_rng])
def test_without_a_handler_it_is_refused_with_the_cure(made):
    with pytest.raises(
        InvalidRequestError, match=r"'deep\.0' holds a .* holdfast.register_handler"
    ):
        Capture({"deep": [made()]}, rank=0, world_size=1)


@pytest.mark.parametrize("value", [Colour.RED, Pair(1, 2)])
def test_what_is_nearly_plain_needs_no_handler_but_its_plain_value(value):
    with pytest.raises(InvalidRequestError, match=r"keep (a plain tuple|its name)") as caught:
        Capture({"a": value}, rank=0, world_size=1)
    assert "register_handler" not in str(caught.value)


class Resuming(Average):
    """Has the usual methods, which a handler takes the place of."""

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, tree):
        self.count = tree["count"]


def test_a_handler_that_is_registered_before_a_restore_counts_there(tmp_path):
    """Between the Checkpointer's making and its restore: no object of the state has changed."""
    capture = Capture({"a": Resuming(0)}, rank=0, world_size=1)
    holdfast.register_handler(Average, take, put)
    saved = Capture({"a": Resuming(3)}, rank=0, world_size=1)

    with worlds.save_all(tmp_path, [saved]) as segments:
        capture.check()
        capture.load(segments, step=1)

    assert 3.0 == float(capture.state["a"].mean[0])
