"""Loading a part leaves the mapping whole: what is saved afterwards is all of it (X6)."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import InvalidRequestError


def trained(*, lr=0.1, steps=2):
    """A model and an optimizer with state of its own."""
    torch.manual_seed(3)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    return model, optimizer


def through(tmp_path, saved, here, **options):
    """Save ``saved``, load it into ``here``; return what was different."""
    holdfast.save(tmp_path / "one", saved)
    return holdfast.load(tmp_path / "one", here, **options)


def test_an_object_stays_where_the_checkpoint_has_a_plain_value(tmp_path):
    """X6: a decay rate became an averaged model; the model must not leave the mapping."""
    model, _ = trained()
    average = torch.optim.swa_utils.AveragedModel(model)
    here = {"model": model, "average": average, "nested": {"average": average}}

    saved = {"model": model, "average": 0.9, "nested": {"average": 0.9}}
    found = through(tmp_path, saved, here, strict=False)

    assert here["average"] is average
    assert here["nested"]["average"] is average
    assert {"average"} <= set(found.missing)


def test_a_plain_value_stays_where_the_checkpoint_has_an_object(tmp_path):
    """X6: an averaged model became a decay rate; nothing stands for the model in its place."""
    model, _ = trained()
    average = torch.optim.swa_utils.AveragedModel(model)
    here = {"model": model, "nested": {"average": 0.9}, "all": [0.8, 1]}

    through(
        tmp_path,
        {"model": model, "nested": {"average": average}, "all": [average, 2]},
        here,
        strict=False,
    )

    assert here == {"model": model, "nested": {"average": 0.9}, "all": [0.8, 2]}


def test_plain_values_that_only_one_side_has_are_told(tmp_path):
    """X6: of what was not restored the script hears, or else trains on with it."""
    here = {"both": 0, "here": 2}

    found = through(tmp_path, {"both": 1, "there": 3}, here, strict=False)

    assert here == {"both": 1, "here": 2}
    assert (found.missing, found.unexpected) == (("here",), ("there",))
    assert holdfast.load(tmp_path / "one", here).missing == ()
    assert here == {"both": 1, "here": 2, "there": 3}


def test_a_tensor_takes_the_place_of_a_number_and_a_number_that_of_a_tensor(tmp_path):
    """A best loss that was a float and is a tensor now: what was saved comes back as it was."""
    here = {"best": torch.zeros(2), "worst": 7}

    through(tmp_path, {"best": 0.5, "worst": torch.ones(2)}, here)

    assert here["best"] == 0.5
    assert torch.equal(here["worst"], torch.ones(2))


def test_objects_of_a_longer_list_stay_and_those_of_a_shorter_one_leave_no_hole(tmp_path):
    """X6: an optimizer more, or less, than was saved."""
    first, second = trained()[1], trained(lr=0.5)[1]
    model = nn.Linear(2, 2)
    more = {"optimizers": [first, second], "model": model}
    less = {"optimizers": [first], "model": model}

    found = through(tmp_path, less, more, strict=False)

    assert more["optimizers"] == [first, second]
    assert found.missing == ("optimizers.1",)
    holdfast.save(tmp_path / "two", more)
    found = holdfast.load(tmp_path / "two", less, strict=False)
    assert less["optimizers"] == [first]
    assert found.unexpected == ("optimizers.1",)


def test_plain_values_of_a_list_are_those_that_were_saved(tmp_path):
    here = {"losses": [9.0, 9.0, 9.0]}

    through(tmp_path, {"losses": [1.0]}, here, strict=False)

    assert here == {"losses": [1.0]}


def test_a_part_that_is_only_here_is_saved_with_the_rest(tmp_path):
    """X6: add a part once; the next load is strict again, and bit for bit."""
    model, optimizer = trained()
    old = {"model": model, "optimizer": optimizer}
    fresh, stepped = trained(lr=9.0, steps=0)
    state = {"model": fresh, "optimizer": stepped, "average": nn.Linear(4, 3)}
    found = through(tmp_path, old, state, strict=False)
    assert ("average",) == found.missing

    holdfast.save(tmp_path / "two", state)
    again, other = trained(lr=9.0, steps=0)
    back = {"model": again, "optimizer": other, "average": nn.Linear(4, 3)}
    holdfast.load(tmp_path / "two", back)

    for name, module in back.items():
        for key, value in module.state_dict().items():
            torch.testing.assert_close(state[name].state_dict()[key], value, rtol=0, atol=0)
    torch.testing.assert_close(optimizer.state_dict(), other.state_dict(), rtol=0, atol=0)


def test_only_some_parts_are_loaded_and_all_are_saved_afterwards(tmp_path):
    """X6: what is not named stays as it is, also plain values and the random stream."""
    model, optimizer = trained()
    fresh, stepped = trained(lr=0.5, steps=0)
    state = {"model": fresh, "optimizer": stepped, "extra": {"tokens": 7}}
    random.seed(5)
    before = random.getstate()

    saved = {"model": model, "optimizer": optimizer, "extra": {"tokens": 1}}
    through(tmp_path, saved, state, only=["model"])

    assert torch.equal(fresh.weight, model.weight)
    assert state["extra"] == {"tokens": 7}
    assert not stepped.state
    assert stepped.param_groups[0]["lr"] == 0.5
    assert random.getstate() == before
    holdfast.save(tmp_path / "two", state)
    back = {"model": nn.Linear(4, 3), "extra": {"tokens": 0}}
    back["optimizer"] = torch.optim.SGD(back["model"].parameters(), lr=1.0, momentum=0.9)
    holdfast.load(tmp_path / "two", back)
    assert back["extra"] == {"tokens": 7}
    assert torch.equal(back["model"].weight, model.weight)


def test_a_strict_load_says_the_way_out(tmp_path):
    """X6: an average was added; the error names it and what loads the rest."""
    model, _ = trained()

    with pytest.raises(
        InvalidRequestError, match=r"'average' exists only in the script.*strict=False"
    ):
        through(tmp_path, {"model": model}, {"model": model, "average": nn.Linear(4, 3)})


@pytest.mark.parametrize(
    ("there", "here"),
    [
        (lambda t: {0: t}, lambda t: {"0": t}),
        (lambda t: [{"x": {0: t}}], lambda t: [{"x": {"0": t}}]),
        (lambda t: {"a.b": t}, lambda t: {"a": {"b": t}}),
    ],
    ids=["number and text", "further down", "with a dot"],
)
@pytest.mark.parametrize("value", [torch.ones, lambda count: nn.Linear(count, 1)])
def test_keys_that_make_the_same_name_are_not_taken_for_each_other(tmp_path, value, there, here):
    """Such as numbers that became texts in JSON: one tensor would stand under both."""
    mine = value(3)
    before = mine.weight.clone() if isinstance(mine, nn.Module) else mine.clone()

    with pytest.raises(InvalidRequestError, match=r"under the keys \[.+\] of 'x' now, and was"):
        through(tmp_path, {"x": there(value(3))}, {"x": here(mine)}, strict=False)

    assert torch.equal(before, mine.weight if isinstance(mine, nn.Module) else mine)


@pytest.mark.parametrize("value", [float, np.float64])
def test_plain_values_under_such_keys_stay_apart(tmp_path, value):
    here = {"x": {"0": [value(1.5)]}}

    through(tmp_path, {"x": {0: [value(2.5)]}}, here, strict=False)

    assert here == {"x": {0: [2.5], "0": [1.5]}}
