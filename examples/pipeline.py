"""A pipeline that is restored on any number of stages: run it, kill it, run it on others.

    torchrun --nproc-per-node 4 examples/pipeline.py
    torchrun --nproc-per-node 2 examples/pipeline.py       # goes on with twice the layers per stage
    torchrun --nproc-per-node 1 examples/pipeline.py       # and in one process

Each rank has one stage, cut by hand. With ``--traced`` torch cuts the model, which then keeps its
names. Runs on CPU as it is. Nothing needs to be started: with no service configured Holdfast starts
its own on this machine.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, SplitPoint, pipeline

import holdfast

WIDTH, LAYERS, BATCH, PARTS = 32, 8, 16, 4


class Model(nn.Module):
    """Some of the layers: all of them, or those of one stage, counted from 0."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return as many numbers as came."""
        for layer in self.layers:
            inputs = inputs + torch.tanh(layer(inputs))
        return inputs


def by_hand(rank: int, stages: int) -> tuple[PipelineStage, nn.Module | holdfast.Section]:
    """Return this rank's stage, and what the Checkpointer is given."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    each = LAYERS // stages
    first = rank * each
    module = Model(layers[first : first + each])
    names = {f"layers.{i}": f"layers.{first + i}" for i in range(each)}
    stage = PipelineStage(module, rank, stages, torch.device("cpu"))
    return stage, holdfast.Section(module, names)


def traced(rank: int, stages: int) -> tuple[PipelineStage, nn.Module | holdfast.Section]:
    """Return the same, cut by torch."""
    torch.manual_seed(0)
    model = Model([nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    each = LAYERS // stages
    cuts = {f"layers.{at}": SplitPoint.BEGINNING for at in range(each, LAYERS, each)}
    pipe = pipeline(model, (torch.zeros(BATCH // PARTS, WIDTH),), split_spec=cuts)
    stage = pipe.build_stage(rank, torch.device("cpu"))
    return stage, stage.submod


def main() -> None:
    """Fit noise, saving every tenth step."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--traced", action="store_true", help="let torch cut the model")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--job", default="pipeline")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, stages = dist.get_rank(), dist.get_world_size()
    stage, model = (traced if options.traced else by_hand)(rank, stages)
    optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=0.01)
    schedule = ScheduleGPipe(stage, PARTS, loss_fn=nn.functional.mse_loss)
    state = {"model": model, "optimizer": optimizer}
    with holdfast.Checkpointer(options.job, state, save=holdfast.EverySteps(10)) as ck:
        restored = ck.restore()
        begin = restored.step if restored else 0
        print(f"begins at step {begin}", flush=True)
        for step in range(begin + 1, options.steps + 1):
            torch.manual_seed(step)  # the first stage and the last one need the same batch
            inputs, wanted = torch.randn(2, BATCH, WIDTH)
            optimizer.zero_grad()
            losses: list[torch.Tensor] = []
            first = [inputs] if stage.is_first else []
            schedule.step(*first, **({"target": wanted, "losses": losses} if stage.is_last else {}))
            optimizer.step()
            ck.step(step)
            if stage.is_last and step % 10 == 0:
                print(f"step {step}: loss {sum(losses).item():.9f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
