"""What each of four gloo processes does with a model on each mesh, in each form that it can have.

``python forms.py FOLDER RANK``: a model is trained, saved by path, and loaded by a fresh one; the
next one, on another mesh or of another form, loads it too. The names of what was saved are those
of the plain model.
"""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import holdfast

WORLD = 4
ALL = "compiled recomputed offloaded"
KINDS = [
    ("fsdp", "compiled"), ("fsdp", "recomputed"), ("fsdp", "offloaded"), ("fsdp", ALL),
    ("hsdp", ALL), ("tp", ALL), ("2d", ALL), ("ddp", ALL),
]  # fmt: skip
"""Each mesh with all forms at once, the one that most people use with each; FSDP2 offloads."""
_WRAPPERS = re.compile(r"(_checkpoint_wrapped_module|_orig_mod|module)\.")


def plain() -> nn.Sequential:
    """Return the model as nobody has cut it; no dim divides evenly by four."""
    return nn.Sequential(
        nn.Linear(7, 12), nn.ReLU(), nn.Linear(12, 5), nn.LayerNorm(5), nn.Linear(5, 3)
    )


def build(mesh: str, form: str, seed: int) -> dict[str, object]:
    """Return a fresh model on the mesh, in the form, and what trains it."""
    torch.manual_seed(seed)
    model: nn.Module = plain()
    sizes = (2, 2) if mesh in ("hsdp", "2d") else (WORLD,)
    grid = init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b")[: len(sizes)])
    if mesh in ("tp", "2d"):
        axis = grid["b"] if mesh == "2d" else grid
        parallelize_module(model, axis, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if "recomputed" in form:
        model = nn.Sequential(*map(checkpoint_wrapper, model))
    if mesh in ("fsdp", "hsdp", "2d"):
        offload = CPUOffloadPolicy(pin_memory=False) if "offloaded" in form else OffloadPolicy()
        for layer in (model[0], model[2], model[3], model[4], model):
            axis = grid["a"] if mesh == "2d" else grid
            fully_shard(layer, mesh=axis, offload_policy=offload)
    if "compiled" in form:
        model = torch.compile(model, backend="eager")
    if mesh == "ddp":
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    return {"model": model, "optimizer": optimizer}


def train(state: dict, steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        state["model"](torch.randn(4, 7)).square().mean().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()


def tensors(state: dict) -> dict[str, torch.Tensor]:
    """Return every tensor of model and optimizer, whole, by its plain name; collective."""
    found = {}
    for wrapped, parameter in state["model"].named_parameters():
        name = f"model.{_WRAPPERS.sub('', wrapped)}"
        found[name] = parameter
        for key, value in state["optimizer"].state.get(parameter, {}).items():
            found[f"optimizer.state.{name}.{key}"] = value
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()
        for name, t in found.items()
    }


def check(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor], what: str) -> None:
    assert expected.keys() == found.keys(), (what, expected.keys() ^ found.keys())
    bad = [name for name in expected if not torch.equal(expected[name], found[name])]
    assert not bad, (what, bad)


def main(folder: Path, rank: int) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD
    )
    before: tuple[str, dict[str, torch.Tensor]] | None = None
    for mesh, form in KINDS:
        name = f"{mesh} {form}"
        state = build(mesh, form, seed=0)
        train(state, 2)
        holdfast.save(folder / name, state)
        expected = tensors(state)
        fresh = build(mesh, form, seed=1)
        holdfast.load(folder / name, fresh)
        check(expected, tensors(fresh), name)
        train(state, 1)
        train(fresh, 1)
        check(tensors(state), tensors(fresh), f"{name} and another step")
        if before is not None:  # into what has trained: an optimizer that has its state
            holdfast.load(folder / before[0], fresh)
            check(before[1], tensors(fresh), f"{before[0]} into {name}")
        before = name, expected
        if rank == 0:
            torch.save(expected, folder / f"{name}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
