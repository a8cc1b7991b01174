"""Train a small GPT with data parallelism, saving every step with Holdfast.

Plain PyTorch but for four lines, each marked with ``# holdfast``. Run it with ``holdfast run`` or
torchrun.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from data import make_loader
from journal import Journal, die_with_parent, fingerprints, process_started, who
from model import GPT, SIZES
from torch.nn.parallel import DistributedDataParallel

import holdfast

LEARNING_RATE = 3e-4
WARM_UP_STEPS = 10
COLLECTIVE_TIMEOUT = timedelta(seconds=60)


def parse_arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", default="gpt-small", help="name under which a restart finds it")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("build/gpt"), help="folder for journals")
    return parser.parse_args()


def learning_rate(steps: int) -> Callable[[int], float]:
    """Return the factor at each step: a linear warm-up, then half a cosine down to a tenth."""

    def factor(step: int) -> float:
        if step < WARM_UP_STEPS:
            return (step + 1) / WARM_UP_STEPS
        done = (step - WARM_UP_STEPS) / max(steps - WARM_UP_STEPS, 1)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(done, 1.0)))

    return factor


def facts(restored: holdfast.Restored | None) -> dict[str, object]:
    """Return what the demo's report wants to know of a restore; bytes by tier, seconds."""
    sources = dict(restored.sources) if restored else {}
    seconds = dict(restored.seconds) if restored else {}
    return {"sources": sources, "seconds": seconds}


def main() -> None:
    """Train until ``--steps`` are done, from wherever the last attempt got to."""
    arguments = parse_arguments()
    die_with_parent()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    journal = Journal(arguments.out, rank)
    journal.write("start", who(), at=process_started())

    size = SIZES[arguments.size]
    torch.manual_seed(arguments.seed)
    model = DistributedDataParallel(GPT(size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate(arguments.steps))
    loader = make_loader(
        context=size.context,
        batch=size.batch,
        rank=rank,
        world_size=world_size,
        seed=arguments.seed,
    )
    torch.manual_seed(arguments.seed + rank)  # each rank drops out its own units

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    ck = holdfast.Checkpointer(  # holdfast
        arguments.job, state, save=holdfast.EverySteps(1), replicas=1
    )
    journal.write("restoring")
    restored = ck.restore()  # holdfast
    step = restored.step if restored else 0
    journal.write("restored", {"step": step, **facts(restored)})

    save: holdfast.SaveHandle | None = None
    while step < arguments.steps:
        for tokens, targets in loader:
            loss = model(tokens, targets)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            scheduler.step()
            step += 1
            stall_s = save.stall_s if save else None  # of the step before: known only by now
            save = ck.step(step)  # holdfast
            journal.write("step", {"step": step, "loss": loss.item().hex(), "stall_s": stall_s})
            if step == arguments.steps:
                break

    ck.close()  # holdfast
    final = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
    journal.write("done", {"fingerprints": fingerprints(final)})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
