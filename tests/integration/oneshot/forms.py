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
from tests.e2e.mesh_trainer import pieces_of_flat, put_together, states
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import holdfast

WORLD = 4
ALL = "compiled recomputed offloaded"
KINDS = [
    ("fsdp", "compiled"), ("fsdp", "recomputed"), ("fsdp", "offloaded"), ("fsdp", ALL),
    ("hsdp", ALL), ("tp", ALL), ("2d", ALL), ("ddp", ALL),
    ("fsdp1", "offloaded"), ("fsdp1", "mixed"), ("zero", "compiled"), ("fsdp1", "ignoring"),
    ("fsdp1 grad op", ALL + "mixed"), ("fsdp1 hybrid", ALL), ("fsdp1 none", ALL), ("zero", "views"),
]  # fmt: skip
"""Each mesh with all forms at once, the one that most people use with each; FSDP offloads."""
_FSDP1 = {
    "fsdp1": ShardingStrategy.FULL_SHARD,
    "fsdp1 grad op": ShardingStrategy.SHARD_GRAD_OP,
    "fsdp1 hybrid": ShardingStrategy.HYBRID_SHARD,
    "fsdp1 none": ShardingStrategy.NO_SHARD,
}
_WRAPPERS = re.compile(r"(_checkpoint_wrapped_module|_orig_mod|_fsdp_wrapped_module|module)\.")


def plain() -> nn.Sequential:
    """Return the model as nobody has cut it; few dims divide by four, and some are less."""
    return nn.Sequential(
        nn.Linear(7, 12),
        nn.ReLU(),
        nn.Linear(12, 5),
        nn.LayerNorm(5),
        nn.Linear(5, 3),
        nn.Linear(3, 1),
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
    if mesh in _FSDP1:
        model = flattened(model, mesh, form)
    if "compiled" in form:
        model = torch.compile(model, backend="eager")
    if mesh in ("ddp", "zero"):
        model = DistributedDataParallel(model)
    if mesh == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer  # it warns when imported

        optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, lr=0.01, foreach=False,
            parameters_as_bucket_view="views" in form,
        )  # fmt: skip
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    return {"model": model, "optimizer": optimizer}


def flattened(model: nn.Sequential, mesh: str, form: str) -> nn.Module:
    """Return the model with FSDP1 around its first layer, and around the rest of it."""
    grid = None
    if mesh == "fsdp1 hybrid":
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    settings = {
        "sharding_strategy": _FSDP1[mesh],
        "device_mesh": grid,
        "device_id": torch.device("cpu"),
        "use_orig_params": True,
        "cpu_offload": CPUOffload("offloaded" in form),
        "mixed_precision": half if "mixed" in form else None,
    }
    model[0] = Fsdp(model[0], **settings)
    return Fsdp(model, ignored_states=[model[3]] if "ignoring" in form else None, **settings)


def train(state: dict, steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        state["model"](torch.randn(4, 7)).square().mean().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()


def tensors(state: dict) -> dict[str, torch.Tensor]:
    """Return every tensor of model and optimizer, whole, by its plain name; collective."""
    model, optimizer = state["model"], state["optimizer"]
    found, pieces = {}, pieces_of_flat(model)
    kept = states(model, optimizer)
    for name, parameter in model.named_parameters():
        values = {"": parameter.detach(), **kept.get(name, {})}
        plain_name = _WRAPPERS.sub("", name)
        if name in pieces:
            shape = plain().get_parameter(plain_name).shape
            together = put_together(pieces[name], values)
            values = {key: t.view(shape) if t.dim() else t for key, t in together.items()}
        found[f"model.{plain_name}"] = values.pop("")
        for key, value in values.items():
            found[f"optimizer.state.model.{plain_name}.{key}"] = value
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).clone()
        for name, t in found.items()
    }


def check(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor], what: str) -> None:
    assert expected.keys() == found.keys(), (what, expected.keys() ^ found.keys())
    bad = [name for name in expected if not torch.equal(expected[name], found[name])]
    assert not bad, (what, bad)


def main(folder: Path, rank: int) -> None:
    warnings.simplefilter("ignore")
    # What FSDP1 asks of a device when it offloads, and a CPU does not have.
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign, assignment]
    torch.cpu.Stream.synchronize = lambda _: None  # type: ignore[attr-defined]
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
        if not (mesh in _FSDP1 and "offloaded" in form):  # on a CPU it adds last step's gradients
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
