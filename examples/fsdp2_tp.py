"""FSDP2 with tensor parallelism: pairs of ranks share a layer's work, and each piece is sharded.

    torchrun --nproc-per-node 4 examples/fsdp2_tp.py

Run it, kill it, run it again, with as many ranks or another even number. It runs on CPU as it is,
and Holdfast starts its own services on this machine.
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

BATCH = 48  # divides by 2, 4, 6 and 8 ranks; a pair takes the same part of it


def build(mesh: DeviceMesh) -> nn.Module:
    """Return the model, its two wide layers cut over each pair of ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.Linear(64, 1))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (model[0], model[2], model[3], model):
        fully_shard(layer, mesh=mesh["dp"])
    return model


def main() -> None:
    """Fit a line to noise, saving every tenth step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    steps = parser.parse_args().steps
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    model = build(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)  # two kinds of DTensors
    state = {"model": model, "optimizer": optimizer}
    with holdfast.Checkpointer("meshes", state, save=holdfast.EverySteps(10)) as ck:
        restored = ck.restore()
        begin = restored.step if restored else 0
        print(f"begins at step {begin}", flush=True)
        for step in range(begin + 1, steps + 1):
            torch.manual_seed(step)
            inputs = torch.randn(BATCH, 64)[mesh["dp"].get_local_rank() :: mesh["dp"].size()]
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
