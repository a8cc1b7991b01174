"""What each rank of a world of gloo processes does with DCP; started by the tests.

``python ranks.py save|load|process FOLDER RANK WORLD``
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import holdfast
from holdfast.integrations.dcp import HoldfastReader, HoldfastWriter

FAILING = 2
BACKGROUND, SHRUNK, CACHED, OWN = "background", "shrunk", "cached", "own"


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return model and optimizer over all ranks; no dim divides evenly, one leaves ranks empty."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 11), nn.ReLU(), nn.Linear(11, 3))
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed, foreach=False)
    model(torch.randn(4, 7)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """Return what people give to DCP, values that are no tensors among it."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    extra = {"step": 3, "names": ["a", "b"], "plain": torch.arange(5.0), "when": {"epoch": 1}}
    return {"model": of_model, "optimizer": of_optimizer, "grids": grids(1.0), **extra}


def grids(value: float) -> dict[str, torch.Tensor]:
    """Return tensors over two axes if there are four ranks, else over one axis, or plain."""
    full = value * torch.arange(42.0).view(6, 7)
    if not dist.is_initialized():
        return {"cut": full, "copied": full.clone()}
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, 2) if ranks == 4 else (ranks,))
    cuts = {"cut": [Shard(0), Shard(1)], "copied": [Replicate(), Shard(1)]}
    return {
        name: distribute_tensor(full, mesh, placements[-mesh.ndim :])
        for name, placements in cuts.items()
    }


def whole(state: object) -> object:
    """Return the state with whole tensors; collective."""
    if isinstance(state, DTensor):
        return state.full_tensor()
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    return [whole(item) for item in state] if isinstance(state, list) else state


class FailingPlanner(DefaultSavePlanner):
    """Fails on one rank, when its data are to be written."""

    def resolve_data(self, write_item: object) -> object:
        if dist.get_rank() == FAILING:
            raise RuntimeError("no data here")
        return super().resolve_data(write_item)


def save(folder: Path) -> None:
    """Save in every way; what is in the folder at last is what rank 0 notes."""
    model, optimizer = build(1)
    state = state_of(model, optimizer)
    writer = HoldfastWriter(folder / SHRUNK)
    dcp.save({"step": -1}, storage_writer=writer)
    dcp.save(state, storage_writer=writer)  # in the place of the first
    expected = whole(state)
    if dist.get_rank() == 0:
        torch.save(expected, folder / "expected.pt")
    before = sorted(path.name for path in (folder / SHRUNK).iterdir())
    with pytest.raises(CheckpointException) as caught:
        dcp.save({**state, "step": 9}, storage_writer=writer, planner=FailingPlanner())
    assert list(caught.value.failures) == [FAILING]
    after = [path.name for path in (folder / SHRUNK).iterdir()]
    left = set(after) - set(before)
    assert left <= {".uploads", "dcp-save.json"}, left

    cached = DefaultSavePlanner(enable_plan_caching=True)
    for value in (1, 2):  # of the second one, torch asks for no plan
        state["step"], state["plain"] = value, torch.full((5,), float(value))
        dcp.save(state, checkpoint_id=folder / CACHED / str(value), storage_writer=writer,
                 planner=cached)  # fmt: skip
    answer = dcp.async_save(
        state, checkpoint_id=folder / BACKGROUND, storage_writer=HoldfastWriter()
    )
    answer.result()
    holdfast.save(folder / OWN, {"model": model, "optimizer": optimizer, "extra": {"n": 4}})


def process(folder: Path) -> None:
    """Have a process of torch's save twice, which has its own group and gets the writer pickled."""
    model, optimizer = build(1)
    state = {"model": get_state_dict(model, optimizer)[0]}
    writer = HoldfastWriter()
    for number in (1, 2):
        state["number"] = number
        place = folder / f"process-{number}"
        dcp.async_save(
            state, checkpoint_id=place, storage_writer=writer,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        ).result()  # fmt: skip
        found = {"model": get_state_dict(*build(2))[0], "number": 0}
        dcp.load(found, storage_reader=HoldfastReader(place))
        assert same(whole(found), whole(state))


def load(folder: Path) -> None:
    """Load on this world what four ranks saved, into other values."""
    expected = torch.load(folder / "expected.pt")
    model, optimizer = build(2)
    state = state_of(model, optimizer)
    assert not same(whole(state), expected)
    state |= {
        "grids": grids(0.0),
        "step": 0,
        "names": None,
        "plain": torch.zeros(5),
        "when": {"epoch": 0},
    }
    dcp.load(state, storage_reader=HoldfastReader(folder / SHRUNK))
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    assert same(whole(state), expected)
    assert same(whole(state_of(model, optimizer)), expected)
    reader = HoldfastReader()
    for value in (1, 2):
        state = {"step": 0, "plain": torch.zeros(5)}
        dcp.load(state, checkpoint_id=folder / CACHED / str(value), storage_reader=reader)
        assert state["step"] == value
        assert torch.equal(state["plain"], torch.full((5,), float(value)))
    model, optimizer = build(3)
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder / BACKGROUND, storage_reader=reader)
    assert state["step"] == 2
    assert same(whole(state["model"]), expected["model"])
    model, optimizer = build(3)
    mine = {"model": model.state_dict(), "extra": {"n": 0}}
    dcp.load(mine, checkpoint_id=folder / OWN, storage_reader=reader)
    assert same(whole(mine["model"]), expected["model"])
    assert mine["extra"] == {"n": 4}


def same(one: object, other: object) -> bool:
    """Tell whether two states are the same, bit for bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def main(action: str, folder: Path, rank: int, world: int) -> None:
    """Do it."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world
        )
    {"save": save, "load": load, "process": process}[action](folder)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
