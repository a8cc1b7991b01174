"""A rank that reads more than it trains: a loader that remembers, plain values that move.

Each step's batch and draws go into a digest that is part of the state, so ``final <sha256>`` at the
end tells whether any step, before or after a restore, saw something else. ``--kill-at`` makes it
SIGKILL itself before that step.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast

SIZE, BATCH = 20, 3
LEAVE_EVERY = 4


class Wandering(Sampler[int]):
    """Starts where its own generator says, then draws each step from the global stream."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(5)
        self.epoch = 0

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        at = int(self.rng.integers(SIZE)) + self.epoch
        for _ in range(SIZE):
            at += int(torch.randint(1, 4, ()))
            yield at % SIZE


def make_loader(kind: str) -> Any:
    """Return the loader of one kind, as it is captured."""
    data = torch.arange(float(SIZE))
    if kind == "wandering":
        return holdfast.ResumableLoader(DataLoader(data, BATCH, sampler=Wandering()))
    generator = torch.Generator().manual_seed(5)
    return StatefulDataLoader(data, BATCH, shuffle=True, generator=generator)


def use(extra: dict[str, Any], batch: torch.Tensor) -> None:
    """Let one step change every plain value: order, keys, counts, and the digest over all."""
    drawn = (batch.tolist(), torch.rand(2).tolist(), random.random())
    recent: OrderedDict[str, int] = extra["recent"]
    recent[f"{int(batch[0]) % 5}"] = extra["step"]
    recent.move_to_end(f"{int(batch[0]) % 5}")
    extra["seen"][int(batch[-1])] += 1
    extra["first"].pop(f"key {extra['step']}", None)
    text = repr((extra["digest"], drawn, recent, sorted(extra["seen"].items()), extra["first"],
                 len(extra["epochs"])))  # fmt: skip
    extra["digest"] = hashlib.sha256(text.encode()).hexdigest()


def save(checkpointer: holdfast.Checkpointer, extra: dict[str, Any]) -> None:
    """Save if this step was not saved in the loop; wait, so that a kill finds it."""
    handle = checkpointer.step(extra["step"])
    if handle is not None:
        handle.wait("local", timeout_s=30)
        print(f"step {extra['step']} {handle.level} {extra['digest'][:8]}", flush=True)


def main() -> None:
    """Read to the last step; prints ``restored``, ``step`` and ``final`` lines."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", required=True)
    parser.add_argument("--kind", required=True)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--kill-at", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(11)
    random.seed(11)
    extra: dict[str, Any] = {
        "step": 0, "digest": "", "epochs": [], "recent": OrderedDict.fromkeys("01234", 0),
        "seen": Counter(), "first": {f"key {step}": step for step in range(20)},
    }  # fmt: skip
    state: dict[str, Any] = {"loader": make_loader(options.kind), "extra": extra}
    with holdfast.Checkpointer(options.job, state, save=holdfast.EverySteps(1)) as checkpointer:
        restored = checkpointer.restore()
        print(f"restored {restored.step if restored else 0}", flush=True)
        extra = checkpointer.state["extra"]
        loader = state["loader"]
        while extra["step"] < options.steps:
            for batch in loader:
                extra["step"] += 1
                if extra["step"] == options.kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                use(extra, batch)
                if options.kind == "stateful" and extra["step"] % LEAVE_EVERY == 0:
                    break
                save(checkpointer, extra)
                if extra["step"] == options.steps:
                    break
            extra["epochs"].append(np.str_(""))
            save(checkpointer, extra)
    print(f"final {extra['digest']}", flush=True)


if __name__ == "__main__":
    main()
