"""A module that is wrapped after its Checkpointer was made, and a parameter of two optimizers."""

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


def two_optimizers():
    model = nn.Linear(2, 2)
    pair = {
        "adam": torch.optim.AdamW(model.parameters()),
        "sgd": torch.optim.SGD([model.weight], lr=0.1, momentum=0.9),
    }
    model(torch.ones(1, 2)).sum().backward()
    for optimizer in pair.values():
        optimizer.step()
    return {"m": model, **pair}


def test_a_parameter_of_two_optimizers_has_the_state_of_each(tmp_path):
    saved, target = two_optimizers(), two_optimizers()
    for name in ("adam", "sgd"):
        for state in target[name].state.values():
            for tensor in state.values():
                tensor.zero_()

    worlds.there_and_back(tmp_path, saved, target)

    weight, here = saved["m"].weight, target["m"].weight
    assert torch.equal(weight, here)
    for name, key in (("adam", "exp_avg"), ("sgd", "momentum_buffer")):
        assert torch.equal(saved[name].state[weight][key], target[name].state[here][key])
        assert target[name].state[here][key].any()
