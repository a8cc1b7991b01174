"""Tensors beside modules and optimizers: read into what is here, each memory by one of them."""

from __future__ import annotations

import pytest
import torch
from tests.unit.state import worlds
from torch import nn


def test_what_is_here_is_read_into_and_stays_where_it_is(tmp_path):
    deep = {"list": [torch.zeros(3), {"t": torch.zeros(2, 3).t()}], "grad": torch.zeros(2)}
    deep["grad"].requires_grad_()
    tensors = [deep["list"][0], deep["list"][1]["t"], deep["grad"]]
    saved = {"list": [torch.ones(3), {"t": torch.ones(3, 2)}], "grad": torch.ones(2)}

    worlds.there_and_back(tmp_path, {"x": saved}, {"x": deep})

    now = [deep["list"][0], deep["list"][1]["t"], deep["grad"]]
    assert all(before is after for before, after in zip(tensors, now, strict=True))
    assert all((tensor == 1).all() for tensor in now)
    assert deep["grad"].requires_grad


def tied():
    tensor = torch.zeros(4)
    return {"a": tensor, "b": tensor}, tensor


def overlapping():
    tensor = torch.zeros(4)
    return {"a": tensor[:3], "b": tensor[1:]}, tensor[1:]


def of_a_module():
    model = nn.Linear(4, 1, bias=False)
    return {"a": model, "b": model.weight.view(4)}, model.weight.view(4)


@pytest.mark.parametrize("make", [tied, overlapping, of_a_module])
def test_memory_under_two_names_holds_all_of_one_of_them(tmp_path, make):
    """They were saved as two, with other values each: the later one counts, and they never mix."""
    target, memory = make()
    first = target["a"]
    saved = {"a": nn.Linear(4, 1, bias=False) if isinstance(first, nn.Module) else first + 1}
    saved["b"] = torch.full_like(target["b"], 2.0)

    worlds.there_and_back(tmp_path, saved, target)

    assert (memory == 2).all()


def test_a_tensor_of_another_dtype_takes_the_place_of_what_is_here(tmp_path):
    target = {"x": {"t": torch.zeros(3)}}

    worlds.there_and_back(tmp_path, {"x": {"t": torch.ones(3, dtype=torch.int8)}}, target)

    assert target["x"]["t"].dtype is torch.int8
