"""FSDP1: parameters lie one behind the other, and each rank holds a piece of the row.

    torchrun --nproc-per-node 4 examples/fsdp1.py

Run it, kill it, run it again, with as many ranks or not. It runs on CPU as it is, and Holdfast
starts its own services on this machine.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import holdfast

BATCH = 48  # divides by 2, 3, 4 and 6 ranks: all of them see the same batch, whatever their number


def build() -> nn.Module:
    """Return the model, of which each layer is sharded over all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.Linear(64, 1))
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        device_id=torch.device("cpu"),
        use_orig_params=True,  # so that the optimizer's parameters have names
    )


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
