"""A rank of a tensor-parallel model whose mesh is what the round has: as long as there are ranks.

Prints ``mesh <shape>``, ``loaded <step> <sha256>`` after a restore, ``step <n> <sha256>`` after
each step, over whole tensors: the same state has the same digest on every mesh. Trains until the
file ``--go`` exists, and then no further than ``--more`` steps.
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path

import torch
from mesh_trainer import SPLIT, digest
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

import holdfast
from holdfast import elastic


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", required=True)
    parser.add_argument("--go", type=Path, required=True)
    parser.add_argument("--more", type=int, default=1)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    elastic.init_process_group("gloo")
    mesh = elastic.device_mesh("cpu")
    print(f"mesh {mesh.shape}", flush=True)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(7, 12), nn.ReLU(), nn.Linear(12, 5), nn.LayerNorm(5), nn.Linear(5, 3)
    )
    parallelize_module(model, mesh["tp"], SPLIT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    state = {"model": model, "optimizer": optimizer}
    with holdfast.Checkpointer(options.job, state, save=holdfast.EverySteps(1)) as checkpointer:
        restored = checkpointer.restore()
        step = restored.step if restored else 0
        print(f"loaded {step} {digest(model, optimizer)}", flush=True)
        left = options.more
        while left:
            step += 1
            model(torch.randn(4, 7, generator=torch.Generator().manual_seed(step))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step} {digest(model, optimizer)}", flush=True)
            checkpointer.step(step)
            going = torch.tensor(int(not options.go.exists()))
            torch.distributed.broadcast(going, 0)
            left -= not going
            time.sleep(0.2 * bool(going))


if __name__ == "__main__":
    main()
