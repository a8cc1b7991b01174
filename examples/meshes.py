"""A model that several ranks hold together, saved and restored on any mesh: run it, kill it, again.

    torchrun --nproc-per-node 4 examples/meshes.py --mesh fsdp
    torchrun --nproc-per-node 2 examples/meshes.py --mesh tp       # goes on, on another mesh

Runs on CPU as it is. Nothing needs to be started: with no service configured Holdfast starts its
own on this machine.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import holdfast

WIDTH = 64


class Block(nn.Module):
    """A residual MLP: the part of a transformer that tensor parallelism cuts in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return as many numbers as came."""
        hidden: torch.Tensor = self.down(torch.relu(self.up(self.norm(inputs))))
        return inputs + hidden


def build(mesh: str, ranks: int) -> nn.Module:
    """Return the same model on the mesh of that name."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(WIDTH, 1))
    if mesh == "fsdp":
        shard(model, init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",)))
    elif mesh == "hsdp":
        shard(model, init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("copy", "dp")))
    elif mesh == "tp":
        split(model, init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",)))
    else:
        grid = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "tp"))
        split(model, grid["tp"])
        shard(model, grid["dp"])
    return model


def split(model: nn.Sequential, mesh: DeviceMesh) -> None:
    """Cut the wide layers of each block over the mesh."""
    for block in model[:-1]:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def shard(model: nn.Sequential, mesh: DeviceMesh) -> None:
    """Shard each block by itself, then what is left."""
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def main() -> None:
    """Fit a line to noise, saving every tenth step."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mesh", choices=["fsdp", "hsdp", "tp", "fsdp+tp"], default="fsdp")
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    model = build(options.mesh, dist.get_world_size())
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)  # some DTensors, some not
    state = {"model": model, "optimizer": optimizer}
    with holdfast.Checkpointer("meshes", state, save=holdfast.EverySteps(10)) as ck:
        restored = ck.restore()
        begin = restored.step if restored else 0
        print(f"begins at step {begin}", flush=True)
        for step in range(begin + 1, options.steps + 1):
            torch.manual_seed(step)  # all ranks of tensor parallelism need the same batch
            inputs = torch.randn(32, WIDTH)
            loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ck.step(step)
            if step % 10 == 0 and dist.get_rank() == 0:
                print(f"step {step}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
