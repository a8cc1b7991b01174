"""A process whose GPU fails for good while it saves: says what became of its saves, and ends."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from tests.gpu.slow_cuda import SlowCuda
from tests.unit.copying.late_training import LateTraining


def main(folder: Path) -> None:
    """Save, have a kernel read where nothing is, and save again."""
    training = LateTraining(folder, SlowCuda(cycles=1000))
    training.train()
    first = training.save()
    index = torch.full((1,), 1 << 40, device="cuda")
    torch.ones(4, device="cuda")[index]  # a device-side assertion
    training._pinned = False  # nothing can be registered any more
    training.engine.wait(30)
    failures = []
    for step in (2, 3):
        training.step = step
        try:
            failures.append(training.save().reason)
        except Exception as error:
            failures.append(str(error))
        training.engine.wait(30)
    failures.append(training.engine.lost(training.plan.accelerators))
    print("abandoned:", *[bool(text) for text in failures], "first:", first.reason)
    print("\n".join(failures), flush=True)
    os._exit(0)  # torch's own end of a lost context is not what is tested


if __name__ == "__main__":
    main(Path(sys.argv[1]))
