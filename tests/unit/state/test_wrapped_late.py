"""A module that is wrapped after its Checkpointer was made."""

import weakref

import pytest
import torch
from tests.unit.state import worlds
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from holdfast.state.capture import Capture
from holdfast.state.survey import Home


def homes(capture):
    return {tensor.home for tensor in capture.survey().tensors}


def test_a_module_that_is_sharded_late_is_saved_by_boxes_from_then_on(world):
    """A plan that was made before is none any more; the names stay."""
    world(1)
    model = nn.Linear(3, 8)
    capture = Capture({"m": model}, rank=1, world_size=4)
    plan = worlds.plan_of(capture)
    assert homes(capture) == {Home.RANK}
    assert plan.is_current()

    fully_shard(model, mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("late1",)))

    assert not plan.is_current()
    assert homes(capture) == {Home.HOLDERS}
    assert capture.names_needs
    specs = {entry.spec.fqn: entry.spec for entry in worlds.plan_of(capture).template.entries}
    assert specs["m.weight"].box.offsets == (2, 0)


def test_a_module_that_is_wrapped_late_is_shared_once_the_wrapper_is_in_the_state(world):
    """Without the wrapper Holdfast cannot know that ranks hold the same: each saves its own."""
    world(1)
    state = {"m": nn.Linear(3, 8)}
    capture = Capture(state, rank=1, world_size=4)
    plan = worlds.plan_of(capture)

    wrapped = DistributedDataParallel(state["m"])
    assert homes(capture) == {Home.RANK}
    state["m"] = wrapped

    assert not plan.is_current()
    assert homes(capture) == {Home.SHARED}


@pytest.mark.filterwarnings("ignore:.broadcast_buffers. is deprecated:FutureWarning")
@pytest.mark.parametrize("broadcast", [True, False])
def test_what_ddp_does_not_keep_alike_is_each_ranks_own(world, broadcast):
    world(1)
    model = nn.BatchNorm1d(3)
    ignored = ["weight", "running_mean"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    state = {"m": DistributedDataParallel(model, broadcast_buffers=broadcast)}

    found = Capture(state, rank=1, world_size=4).survey().tensors

    alike = {"m.bias": Home.SHARED}
    if broadcast:
        alike |= {"m.running_var": Home.FIRST, "m.num_batches_tracked": Home.FIRST}
    assert alike == {tensor.fqn: tensor.home for tensor in found if tensor.home != Home.RANK}
    assert len(found) == 5


@pytest.mark.parametrize("in_place", [True, False])
def test_a_module_that_is_compiled_late_keeps_names_and_optimizer(tmp_path, in_place):
    """In place, or as a wrapper that takes its place in the state."""
    state = {"m": nn.Linear(3, 8)}
    state["o"] = torch.optim.AdamW(state["m"].parameters())
    capture = Capture(state, rank=0, world_size=1)
    plan = worlds.plan_of(capture)
    names = [tensor.fqn for tensor in capture.survey().tensors]
    if in_place:
        state["m"].compile(backend="eager")
    else:
        state["m"] = torch.compile(state["m"], backend="eager")
    state["m"](torch.ones(2, 3)).sum().backward()

    assert plan.is_current() == in_place
    assert names == [tensor.fqn for tensor in capture.survey().tensors]
    capture.check()
    fresh = {"m": nn.Linear(3, 8)}
    fresh["o"] = torch.optim.AdamW(fresh["m"].parameters())
    worlds.there_and_back(tmp_path, state, fresh)
    assert torch.equal(state["m"].weight, fresh["m"].weight)


def walks(capture, monkeypatch):
    """Return a list that grows with each survey of ``capture``."""
    found = []
    survey = Capture.survey
    monkeypatch.setattr(Capture, "survey", lambda self: found.append(self) or survey(self))
    return found


def test_what_has_not_changed_since_it_was_checked_is_not_walked_again(monkeypatch):
    model = nn.Linear(3, 8)
    capture = Capture({"m": model}, rank=0, world_size=1)
    before = capture.boxes, capture.names_needs, capture.estimate()
    surveys = walks(capture, monkeypatch)

    capture.check()

    assert surveys == []
    assert before == (capture.boxes, capture.names_needs, capture.estimate())


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state["m"].to(torch.float64),
        lambda state: setattr(state["m"], "weight", nn.Parameter(torch.ones(8, 3))),
        lambda state: state["m"].register_buffer("more", torch.ones(2)),
        lambda state: state.update(n=nn.Linear(3, 8)),
        lambda state: state["o"].add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
        lambda state: state["o"].step(),
        lambda state: state["m"].weight.requires_grad_(False),
    ],
)
def test_what_has_changed_since_it_was_checked_is_walked_again(monkeypatch, change):
    state = {"m": nn.Linear(3, 8)}
    state["o"] = torch.optim.AdamW(state["m"].parameters())
    state["m"](torch.ones(2, 3)).sum().backward()
    capture = Capture(state, rank=0, world_size=1)
    surveys = walks(capture, monkeypatch)

    change(state)
    capture.check()

    assert surveys == [capture]


def test_what_a_check_has_seen_keeps_no_memory_that_the_script_lets_go():
    model = nn.Linear(3, 8)
    capture = Capture({"m": model}, rank=0, world_size=1)
    memory = weakref.ref(model.weight.untyped_storage())
    model.weight.data = torch.ones(8, 3)

    assert memory() is None
    assert capture.names_needs is False
