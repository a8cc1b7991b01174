"""A tensor whose storage was freed: reading or filling it ends the process, so it is refused."""

from __future__ import annotations

import pytest
import torch
from tests.unit.state import worlds
from torch import nn

from holdfast.errors import InvalidRequestError
from holdfast.state.capture import Capture

FREED = r"memory of tensor '.+' was freed"


def trained():
    """A model whose bias is a piece in the middle of a bigger storage, and a buffer."""
    model = nn.Linear(4, 4)
    model.bias = nn.Parameter(torch.arange(12.0)[4:8])
    model.register_buffer("seen", torch.ones(1000))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return {"m": model, "o": optimizer, "x": torch.ones(5)}


def named(state):
    return {
        "m.weight": state["m"].weight,
        "m.bias": state["m"].bias,
        "m.seen": state["m"].seen,
        "o.state.weight.exp_avg": state["o"].state[state["m"].weight]["exp_avg"],
        "x": state["x"],
    }


@pytest.mark.parametrize("name", named(trained()))
def test_what_was_freed_is_not_planned(name):
    state = trained()
    named(state)[name].untyped_storage().resize_(0)

    with pytest.raises(InvalidRequestError, match=FREED):
        worlds.plan_of(Capture(state, rank=0, world_size=1))


@pytest.mark.parametrize("name", named(trained()))
def test_a_plan_does_not_hold_what_was_freed_since_then(name):
    """However often it is asked; and it holds again once all of it is there."""
    state = trained()
    plan = worlds.plan_of(Capture(state, rank=0, world_size=1))
    assert plan.is_current()
    storage = named(state)[name].untyped_storage()
    length_bytes = storage.nbytes()
    storage.resize_(0)
    for _ in range(2):
        if name == "x":  # of plain values each is looked at anew, and told by name
            with pytest.raises(InvalidRequestError, match=FREED):
                plan.is_current()
        else:
            assert not plan.is_current()
    storage.resize_(length_bytes)

    assert plan.is_current()


@pytest.mark.parametrize("name", named(trained()))
def test_what_was_freed_is_not_filled(name, tmp_path):
    state = trained()
    with worlds.save_all(tmp_path, [Capture(trained(), rank=0, world_size=1)]) as segments:
        named(state)[name].untyped_storage().resize_(0)
        with pytest.raises(InvalidRequestError, match=FREED):
            Capture(state, rank=0, world_size=1).load(segments, step=1)
