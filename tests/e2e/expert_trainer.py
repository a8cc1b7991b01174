"""A rank of a model with experts: DTensors on an axis of the mesh; FSDP2 shards the rest over all.

Prints what ``mesh_trainer`` prints, and is killed as that is. ``--experts``: over how many ranks
they are dealt out; the other axis copies them, or (``--sharded``) shards each of them once more.
All ranks see the same, so that any mesh makes the same bits of them.
"""

from __future__ import annotations

import argparse
import os
import signal
import warnings

import torch
import torch.distributed as dist
from tests.e2e.mesh_trainer import digest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import holdfast

EXPERTS, WIDTH = 4, 6


class Experts(nn.Module):
    """Some of the experts: a matrix and a bias of each."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return a number for each expert that is here."""
        weight, bias = (p.to_local() if isinstance(p, DTensor) else p for p in self.parameters())
        made = torch.stack([inputs @ w + b for w, b in zip(weight, bias, strict=True)])
        return made.square().mean(dim=(1, 2))


class Model(nn.Module):
    """A layer, and experts that look at what it is given, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.experts = Experts()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the loss of what is here."""
        loss: torch.Tensor = self.layer(inputs).square().mean() + self.experts(inputs).sum()
        return loss


def build(experts: int, *, sharded: bool) -> Model:
    """Return the model, its experts dealt out to as many ranks; alone, if that is one process."""
    torch.manual_seed(0)
    model, ranks = Model(), dist.get_world_size()
    if ranks == 1:
        return model
    grid = init_device_mesh("cpu", (ranks // experts, experts), mesh_dim_names=("dp", "ep"))
    for name, parameter in list(model.experts.named_parameters()):
        dealt = distribute_tensor(parameter.detach(), grid["ep"], [Shard(0)])
        model.experts.register_parameter(name, nn.Parameter(dealt))
    if sharded:
        fully_shard(model.experts, mesh=grid["dp"])
    everybody = init_device_mesh("cpu", (ranks,), mesh_dim_names=("all",))
    fully_shard(model.layer, mesh=everybody)
    return model


def main() -> None:
    """Train some steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", required=True)
    parser.add_argument("--experts", type=int, default=1)
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--kill-at", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = build(options.experts, sharded=options.sharded)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    state: dict[str, object] = {"model": model, "optimizer": optimizer}
    checkpointer = holdfast.Checkpointer(options.job, state, save=holdfast.EverySteps(1))
    restored = checkpointer.restore()
    begin = restored.step if restored else 0
    print(f"loaded {begin} {digest(model, optimizer)}", flush=True)
    for step in range(begin + 1, options.steps + 1):
        torch.manual_seed(step)
        optimizer.zero_grad()
        if step == options.kill_at and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.randn(3, WIDTH)).backward()
        optimizer.step()
        handle = checkpointer.step(step)
        assert handle is not None
        handle.wait("replicated", timeout_s=60)
        print(f"step {step} {handle.level} {digest(model, optimizer)}", flush=True)
    checkpointer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
