"""A module that is wrapped after its Checkpointer was made."""

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
