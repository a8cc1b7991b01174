"""One rank of an elastic job that is measured: ``SIZES... `` of micro-batches, then prints JSON.

For each size one pass with its own loader: the times that the loader has taken of steps. Then the
time of updates of plain DDP and of ours, in turn.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from holdfast import elastic

FEATURES, WIDTH = 128, 768
LARGE, SAMPLES = 2048, 128
STEPS = 24


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


def profiled(local: int) -> dict[str, float]:
    """Return what a loader measures of micro-batches of this size."""
    replicas = torch.distributed.get_world_size()
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    model = elastic.AdaptiveDataParallel(module, optimizer)
    data = TensorDataset(torch.randn(STEPS * local * replicas, FEATURES))
    loader = elastic.AdaptiveDataLoader(data, local * replicas)
    for (inputs,) in loader:
        stepped(model, optimizer, inputs)
    (point,) = loader._profiles.points()
    return {"replicas": replicas, "local": local, "compute": point.compute_s, "step": point.step_s}


def compared(runs: int) -> list[list[float]]:
    """Return the seconds of updates of plain DDP and of ours, in turn."""
    plain, ours = net(LARGE), net(LARGE)
    pairs = []
    for module, wrap in ((plain, DistributedDataParallel), (ours, elastic.AdaptiveDataParallel)):
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
        model = wrap(module) if wrap is DistributedDataParallel else wrap(module, optimizer)
        pairs.append((model, optimizer))
    inputs = torch.randn(SAMPLES, FEATURES)
    times = [[stepped(*pair, inputs) for pair in pairs] for _ in range(runs + 4)][4:]
    return [list(of) for of in zip(*times, strict=True)]


def main() -> None:
    """Join, measure, print."""
    torch.set_num_threads(1)
    elastic.init_process_group("gloo")
    sizes = [int(word) for word in sys.argv[2:]]
    points = [profiled(local) for local in sizes]
    times = compared(int(sys.argv[1]))
    if torch.distributed.get_rank() == 0:
        parameters = sum(p.numel() for p in net(LARGE).parameters())
        print(json.dumps({
            "points": points, "times": times, "parameters": parameters,
            "medians": [statistics.median(of) for of in times],
        }))  # fmt: skip
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
