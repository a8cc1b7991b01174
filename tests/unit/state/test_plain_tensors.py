"""Tensors beside modules and optimizers: read into what is here, each memory by one of them."""

from __future__ import annotations

import pytest
import torch
from tests.unit.state import worlds
from torch import nn

import holdfast
from holdfast.state.capture import Capture


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


def of_other_sizes():
    tensor = torch.zeros(1)
    # A folder is read in the order of its bytes, and a segment has the bigger items first.
    return {"a": tensor.view(torch.int8), "b": tensor}, tensor


@pytest.mark.parametrize("make", [tied, overlapping, of_a_module, of_other_sizes])
def test_memory_under_two_names_holds_all_of_one_of_them(tmp_path, make):
    """They were saved as two, with other values each: the later one counts, and they never mix."""
    target, memory = make()
    first = target["a"]
    saved = {"a": nn.Linear(4, 1, bias=False) if isinstance(first, nn.Module) else first + 1}
    saved["b"] = torch.full_like(target["b"], 2.0)

    holdfast.save(tmp_path / "c", saved)
    holdfast.load(tmp_path / "c", target)

    assert (memory == 2).all()


def test_a_tensor_of_another_dtype_takes_the_place_of_what_is_here(tmp_path):
    target = {"x": {"t": torch.zeros(3)}}

    worlds.there_and_back(tmp_path, {"x": {"t": torch.ones(3, dtype=torch.int8)}}, target)

    assert target["x"]["t"].dtype is torch.int8


class Ring:
    """Rows that are counted; it begins a load with empty ones."""

    def __init__(self, rows=0.0, count=0):
        self.rows, self.count = torch.full((4,), rows), count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.rows.zero_()
        self.count = state["count"]


def test_what_an_object_writes_while_it_is_loaded_does_not_last(tmp_path):
    saved, target = Ring(7.0, 3), Ring()
    rows = target.rows

    worlds.there_and_back(
        tmp_path, {"ring": saved, "rows": saved.rows}, {"rows": rows, "ring": target}
    )

    assert target.count == 3
    assert (rows == 7).all()


@pytest.mark.parametrize("now", [torch.ones(3, dtype=torch.float64), torch.ones(1, 3)])
def test_a_tensor_that_is_of_another_dtype_or_shape_now_is_not_copied_into_its_old_place(now):
    """A copy converts and expands without a word: what was saved would be another value."""
    state = {"x": {"t": torch.zeros(3)}}
    plan = worlds.plan_of(Capture(state, rank=0, world_size=1))
    assert plan.is_current()
    state["x"]["t"] = now

    assert not plan.is_current()


@pytest.mark.parametrize("turn", [torch.conj, torch._neg_view], ids=["conj", "neg"])
def test_what_is_read_otherwise_than_it_lies_in_memory_is_filled(tmp_path, turn):
    values = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64)
    model, saved = (nn.Module() for _ in range(2))
    model.register_buffer("b", turn(torch.zeros_like(values)))
    saved.register_buffer("b", values)
    target = {"model": model, "t": turn(torch.zeros_like(values))}

    worlds.there_and_back(tmp_path, {"model": saved, "t": values}, target)

    assert torch.equal(target["t"], values)
    assert torch.equal(model.b, values)
