"""A rank of a job whose bits do not depend on the number of ranks, if that is a power of two.

Each rank computes the same gradients, of a batch that the step's number makes. Prints ``did <n>``
after each update, before it tells of it, and ``final <sha256>`` at the end. It takes its time,
``--step-s`` for each step, until the file ``--go`` exists.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import holdfast

STEP_S = 0.05


def policy(text: str) -> holdfast.policy.Policy:
    """Return when the script saves: at steps, by time, or never by itself."""
    if text == "seconds":
        return holdfast.EverySeconds(0.5)
    return holdfast.EverySteps(int(text)) if text.isdigit() else holdfast.Never()


def main() -> None:
    """Train to ``--steps``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--save", default="never")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--go", type=Path)
    parser.add_argument("--step-s", type=float, default=STEP_S)
    options = parser.parse_args()
    torch.manual_seed(3)
    torch.set_num_threads(1)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    model = nn.parallel.DistributedDataParallel(net) if world > 1 else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    checkpointer = None
    begin = 0
    if options.job:
        state: dict[str, object] = {"model": model, "optimizer": optimizer}
        checkpointer = holdfast.Checkpointer(
            options.job, state, save=policy(options.save), replicas=options.replicas
        )
        restored = checkpointer.restore()
        begin = restored.step if restored else 0
        print(f"restored {begin} of {world}", flush=True)
    for step in range(begin + 1, options.steps + 1):
        inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True).tanh())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"did {step}", flush=True)
        if options.go and not options.go.exists():
            time.sleep(options.step_s)
        if checkpointer:
            checkpointer.step(step)
    digest = hashlib.sha256()
    for parameter in net.parameters():
        digest.update(parameter.detach().numpy().tobytes())
        digest.update(optimizer.state[parameter]["exp_avg_sq"].numpy().tobytes())
    print(f"final {digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
