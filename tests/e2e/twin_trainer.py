"""A rank of plain DDP whose state is a few parts long; each save waits for its copies.

Prints ``restored <step> <sha256>``, ``step <n> <bytes of its segment>`` for each replicated step,
and ``final <n> <sha256>``.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal

import torch
import torch.distributed as dist
from torch import nn

import holdfast

SIZE, LAYERS = 1024, 12


def fingerprint(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a hash of all values."""
    digest = hashlib.sha256()
    state = [*model.state_dict().values()]
    for kept in optimizer.state.values():
        state += kept.values()
    for tensor in state:
        digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    """Train to a step, or be killed after one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--kill-at", type=int, default=0)
    parser.add_argument("--at-once", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(5)
    net = nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(LAYERS)))
    model = nn.parallel.DistributedDataParallel(net) if dist.is_initialized() else net
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    keeper = holdfast.Checkpointer("twins", state, save=holdfast.Never(), replicas=1)
    restored = keeper.restore()
    begun = restored.step if restored else 0
    print(f"restored {begun} {fingerprint(net, optimizer)}", flush=True)
    for step in range(begun + 1, options.steps + 1):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(1000 * step + rank)
        model(torch.randn(2, SIZE, generator=generator)).square().mean().backward()
        optimizer.step()
        handle = keeper.save(step)
        if not options.at_once:
            # The copy ends with nobody waiting for it: then the slots of others are filled.
            while keeper._saver._performer.engine.busy:
                pass
        handle.wait("replicated", timeout_s=60)
        print(f"step {step} {keeper._saver._performer.plan.length_bytes}", flush=True)
        if step == options.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
    print(f"final {options.steps} {fingerprint(net, optimizer)}", flush=True)
    keeper.close()


if __name__ == "__main__":
    main()
