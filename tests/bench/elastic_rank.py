"""One of two ranks of an elastic job that is measured: ``RUNS SIZES...``, then prints JSON.

Micro-batches of each size, with two ranks and with one alone, in rounds, so that what else the
machine does meets all of them; the times are those that loaders take of steps. Then the time that
updates of plain DDP and of ours compute, in turn.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from holdfast import elastic

FEATURES, WIDTH = 128, 768
LARGE, SAMPLES = 2048, 128
ROUNDS, STEPS = 4, 5


def net(width: int = WIDTH) -> nn.Module:
    """Return a model whose step is long beside a call of torch."""
    first, last = nn.Linear(FEATURES, width), nn.Linear(width, 1)
    return nn.Sequential(first, nn.Tanh(), nn.Linear(width, width), last)


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> float:
    """Do one update; return the seconds that this process computed."""
    began_s = time.process_time()
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
    return time.process_time() - began_s


class Configuration:
    """One number of ranks and one size of micro-batches."""

    def __init__(self, group: Any, local: int) -> None:
        self.replicas, self.local = dist.get_world_size(group), local
        module = net()
        self._optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
        self._model = elastic.AdaptiveDataParallel(module, self._optimizer, process_group=group)
        size = local * self.replicas
        data = TensorDataset(torch.randn(STEPS * size, FEATURES))
        self._loader = elastic.AdaptiveDataLoader(data, size, group=group)

    def once(self) -> None:
        """Do one pass."""
        for (inputs,) in self._loader:
            stepped(self._model, self._optimizer, inputs)

    def measured(self) -> dict[str, float]:
        """Return what the loader has measured."""
        (point,) = self._loader._profiles.points()
        return {
            "replicas": self.replicas, "local": self.local,
            "compute": point.compute_s, "step": point.step_s,
        }  # fmt: skip


def profiled(sizes: list[int]) -> list[dict[str, float]]:
    """Return what loaders have measured of each configuration; the second rank rests at times."""
    first, alone = dist.get_rank() == 0, dist.new_group([0])
    both = [Configuration(dist.group.WORLD, local) for local in sizes]
    one = [Configuration(alone, local) for local in sizes] if first else []
    for _ in range(ROUNDS):
        for configuration in (*both, *one):
            configuration.once()
        dist.barrier()
    return [configuration.measured() for configuration in (*both, *one)]


def compared(runs: int) -> list[list[float]]:
    """Return the seconds of updates of plain DDP and of ours, in turn."""
    plain, ours = net(LARGE), net(LARGE)
    pairs: list[tuple[nn.Module, torch.optim.Optimizer]] = []
    for module in (plain, ours):
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
        adapts = module is ours
        wrapped = elastic.AdaptiveDataParallel(module, optimizer) if adapts else None
        pairs.append((wrapped or DistributedDataParallel(module), optimizer))
    inputs = torch.randn(SAMPLES, FEATURES)
    times = [[stepped(*pair, inputs) for pair in pairs] for _ in range(runs + 4)][4:]
    return [list(of) for of in zip(*times, strict=True)]


def main() -> None:
    """Join, measure, print."""
    torch.set_num_threads(1)
    elastic.init_process_group("gloo")
    points = profiled([int(word) for word in sys.argv[2:]])
    times = compared(int(sys.argv[1]))
    if dist.get_rank() == 0:
        parameters = sum(p.numel() for p in net(LARGE).parameters())
        print(json.dumps({
            "points": points, "times": times, "parameters": parameters,
            "medians": [statistics.median(of) for of in times],
        }))  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
