"""HSDP: each parameter is sharded over one axis of the mesh, and copied over the other.

    torchrun --nproc-per-node 4 examples/hsdp.py

Run it, kill it, run it again, with as many ranks or another even number. It runs on CPU as it is,
and Holdfast starts its own services on this machine.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast

BATCH = 48  # divides by 2, 4, 6 and 8 ranks: all of them see the same batch, whatever their number


def build() -> nn.Module:
    """Return the model: two copies, of which each is sharded over half of the ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.Linear(64, 1))
    mesh = init_device_mesh(
        "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("copy", "shard")
    )
    for layer in (model[0], model[2], model[3], model):
        fully_shard(layer, mesh=mesh)
    return model


def main() -> None:
    """Fit a line to noise, saving every tenth step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    steps = parser.parse_args().steps
    dist.init_process_group("gloo")
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    with holdfast.Checkpointer("meshes", state, save=holdfast.EverySteps(10)) as ck:
        restored = ck.restore()
        begin = restored.step if restored else 0
        print(f"begins at step {begin}", flush=True)
        for step in range(begin + 1, steps + 1):
            torch.manual_seed(step)
            inputs = torch.randn(BATCH, 64)[dist.get_rank() :: dist.get_world_size()]
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
