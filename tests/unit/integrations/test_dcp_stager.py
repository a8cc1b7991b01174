"""F8, S1: HoldfastStager copies while training goes on, and no step writes what it copies."""

from __future__ import annotations

import gc
import inspect
import threading
import weakref
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.optim.optimizer import _global_optimizer_pre_hooks

from holdfast.errors import InvalidRequestError, PreconditionError
from holdfast.integrations.dcp import HoldfastReader, HoldfastStager, HoldfastWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


@pytest.fixture
def stager():
    with HoldfastStager() as made:
        yield made


def trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model, optimizer):
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


class Held:
    """Holds the copy thread until ``go``, as a big state would."""

    def __init__(self, stager):
        self.go = threading.Event()
        stager._copies._pool.submit(self.go.wait)


def test_every_method_of_the_protocol_of_the_installed_torch_is_there():
    """F8: contract."""
    methods = [name for name, value in vars(AsyncStager).items() if callable(value)]
    asked = [name for name in methods if not name.startswith("_")]
    assert {"stage", "synchronize_staging", "close"} <= set(asked)
    for name in asked:
        here, there = (
            list(inspect.signature(getattr(cls, name)).parameters)
            for cls in (HoldfastStager, AsyncStager)
        )
        assert there == here[: len(there)], name
    with HoldfastStager() as stager:
        assert isinstance(stager, AsyncStager)
        assert not stager.should_synchronize_after_execute


def test_a_closed_stager_keeps_no_hook_no_thread_and_no_memory():
    hooks, threads = dict(_global_optimizer_pre_hooks), set(threading.enumerate())
    with HoldfastStager() as stager:
        staged = stager.stage({"t": torch.ones(3)}).result(60)
        memory = weakref.ref(staged.pop("t").untyped_storage())

    assert hooks == _global_optimizer_pre_hooks
    assert threads == set(threading.enumerate())
    assert memory() is None


@pytest.mark.parametrize("ours", [True, False])
def test_async_save_returns_at_once_and_saves_the_state_as_it_was(stager, tmp_path, ours):
    """F8: with our writer and with torch's."""
    model, optimizer = trained()
    held = Held(stager)
    state = state_of(model, optimizer) | {"n": [1, {"a": 2}]}
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    writer = HoldfastWriter(tmp_path) if ours else FileSystemWriter(tmp_path)
    saving = dcp.async_save(state, storage_writer=writer, async_stager=stager)
    state["n"][1]["a"] = 3
    model(torch.randn(5, 3))  # moves the running mean of BatchNorm
    assert isinstance(saving, AsyncSaveResponse)
    assert not saving.staging_completion.done()
    held.go.set()
    step(model, optimizer)
    saving.staging_completion.result(60)
    saving.upload_completion.result(60)
    found = {"model": {k: torch.zeros_like(v) for k, v in expected.items()}, "n": [0, {"a": 0}]}
    reader = HoldfastReader(tmp_path) if ours else FileSystemReader(tmp_path)
    dcp.load(found, storage_reader=reader)

    assert all(torch.equal(expected[name], found["model"][name]) for name in expected)
    assert [1, {"a": 2}] == found["n"]


def test_the_next_step_waits_for_the_copy_and_nothing_else_does(stager):
    """S1"""
    model, optimizer = trained()
    held = Held(stager)
    before = model[0].weight.detach().clone()
    future = stager.stage(state_of(model, optimizer))
    model(torch.randn(5, 3)).sum().backward()
    stepping = threading.Thread(target=optimizer.step)
    stepping.start()
    assert torch.equal(before, model[0].weight)
    assert not future.done()
    held.go.set()
    stepping.join(60)

    assert torch.equal(before, future.result(60)["model"]["0.weight"])
    assert not torch.equal(before, model[0].weight)


def test_saves_that_failed_do_not_hold_the_memory_of_the_next(stager):
    """P4: their errors hold frames that hold the copy, until the collector comes round."""
    state, failed = {"w": torch.ones(3)}, []
    gc.disable()
    try:
        for _ in range(4):
            bad = HoldfastWriter("/proc/none/here")
            saving = dcp.async_save(state, storage_writer=bad, async_stager=stager)
            try:
                saving.upload_completion.result(60)
            except BaseException as error:
                failed.append(type(error).__name__)
            del saving
    finally:
        gc.enable()

    assert ["CheckpointException"] * 4 == failed


def test_what_no_step_was_seen_to_write_is_copied_before_it_returns(stager):
    """A state of no optimizer, or of one that has not stepped since: nobody would be held."""
    model, optimizer = trained()
    stager.stage(state_of(model, optimizer)).result(60)
    held = Held(stager)
    future = stager.stage(state_of(model, optimizer) | {"plain": torch.ones(2)})

    assert future.done()
    held.go.set()


def test_what_an_optimizer_has_and_does_not_train_is_copied_before_it_returns(stager):
    """A frozen parameter, such as that of an average: not only steps write it."""
    model, optimizer = trained()
    model[0].weight.requires_grad_(False)
    step(model, optimizer)
    before = model[0].weight.clone()
    held = Held(stager)
    future = stager.stage(state_of(model, optimizer))
    model[0].weight.zero_()
    held.go.set()

    assert torch.equal(before, future.result(60)["model"]["0.weight"])


def test_optimizers_that_are_gone_and_states_of_any_kind_hinder_no_save(stager):
    """What an optimizer keeps for a parameter need be no dict of tensors."""
    model, gone = trained()
    del gone
    _, optimizer = trained()
    optimizer.state[model[0].weight] = [1]
    optimizer.state[model[0].bias] = {"n": 1}
    step(model, torch.optim.SGD(model.parameters()))
    gc.collect()
    optimizer.step()

    assert {"n": 1} == stager.stage({"n": 1}).result(60)


def test_a_parameter_written_meanwhile_costs_that_save_and_later_ones_do_not_defer(stager):
    """As with a Checkpointer: what the gate cannot see is seen afterwards."""
    model, optimizer = trained()
    held = Held(stager)
    future = stager.stage(state_of(model, optimizer))
    with torch.no_grad():
        model[0].weight.zero_()
    held.go.set()
    with pytest.raises(PreconditionError, match="outside an optimizer"):
        future.result(60)
    step(model, optimizer)
    held = Held(stager)

    assert stager.stage(state_of(model, optimizer)).done()
    held.go.set()


def test_memory_is_used_again_once_nobody_reads_it_and_is_bounded(stager):
    """What a save still reads is never written over: not even through a view of a view."""
    state = {"t": torch.ones(100)}
    first = stager.stage(state).result(60)
    part = first.pop("t").view(10, 10)[3]
    state["t"].fill_(2)
    second = stager.stage(state).result(60)
    with pytest.raises(PreconditionError, match="still being written"):
        stager.stage(state)
    place = second["t"].data_ptr()
    del second
    third = stager.stage(state).result(60)

    assert torch.equal(torch.ones(10), part)
    assert place == third["t"].data_ptr()
    third = None
    assert 7 == len(stager.stage({"t": torch.ones(7)}).result(60)["t"])
    assert 2 == len(stager._memory._buffers)


class Pair(NamedTuple):
    """A tuple with names."""

    a: object
    b: object


def test_all_kinds_of_values_are_staged_as_they_are(stager):
    turned = torch.arange(6.0).view(2, 3).t()
    values = {
        "turned": turned, "empty": torch.zeros(0, 3), "zero": torch.tensor(3, dtype=torch.int64),
        "nested": [1, (torch.ones(1), "x"), Pair(1, torch.ones(2, dtype=torch.bool))],
        "ordered": OrderedDict(b=1, a=torch.ones(1, dtype=torch.bfloat16)), "n": None,
    }  # fmt: skip
    found = stager.stage(values).result(60)

    assert str(values) == str(found)
    assert type(found["ordered"]) is OrderedDict
    assert type(found["nested"][2]) is Pair


def test_a_tensor_of_a_kind_that_cannot_be_staged_is_named(stager):
    with pytest.raises(InvalidRequestError, match=r"'a\.1'"):
        stager.stage({"a": [1, torch.ones(2).to_sparse()]})
    stager.close()
    with pytest.raises(PreconditionError, match="closed"):
        stager.stage({})
