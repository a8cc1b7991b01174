"""What ``holdfast run --auto`` costs a script for each step, beside the script alone.

The same script runs alone, with everything that ``--auto`` puts around it but without saves, and
with a save after each step, in turn, in a process each. What a run gives is the median over its
steps. ``python -m tests.bench.auto MODE RESULT SCRIPT ...`` is one run.
"""

from __future__ import annotations

import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from tests.bench.harness import Record
from tests.bench.subject import agent

NAMES = ("auto/hooks", "auto/overhead")
RUNS = 5
STEPS = 22
WARM_UP = 6
"""Steps of a run that do not count: the first saves make slots."""
MODES = ("alone", "hooks", "saves")
HOOKS_MAX, SAVES_MAX = 0.01, 0.05
RUN_S_MAX = 120.0
SCRIPT = Path(__file__).with_name("auto_train.py")


def measure(*, quick: bool) -> Iterator[Record]:
    """Yield what hooks cost, and what a save after each step does."""
    size, runs = ("tiny", 1) if quick else ("large", RUNS)
    with agent():
        turns = [[_run(mode, size) for mode in MODES] for _ in range(runs)]
    alone, hooks, saves = (list(times) for times in zip(*turns, strict=True))
    note = f"auto_train.py {size}, a thread on two cores, median of {STEPS - WARM_UP} steps"
    yield _record("auto/hooks", hooks, alone, f"{note}; no save, as if at exit only", HOOKS_MAX)
    yield _record("auto/overhead", saves, alone, f"{note}; a save after each", SAVES_MAX)


def _record(
    name: str, ours: list[float], alone: list[float], note: str, share_max: float
) -> Record:
    """Return a record of what a step takes more, in percent: the median over the turns."""
    shares = [mine / other - 1 for mine, other in zip(ours, alone, strict=True)]
    share = statistics.median(shares)
    return Record(
        name=name,
        value=share * 100,
        unit="%",
        peer="",
        peer_value=None,
        ratio=share / share_max,
        bytes=0,
        note=f"{note}; a step alone {statistics.median(alone) * 1e3:.3g} ms, so "
        f"{statistics.median(ours) * 1e3:.3g} ms; "
        f"{min(shares) * 100:.2g}..{max(shares) * 100:.2g} %, n={len(shares)}",
        target=f"< {share_max:.0%} of a step",
        met=share < share_max,
    )


def _run(mode: str, size: str) -> float:
    """Return the seconds of a step: the median of one run."""
    with tempfile.NamedTemporaryFile() as result:
        subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "tests.bench.auto", mode, result.name,
             str(SCRIPT), size, str(STEPS)],
            check=True,
            timeout=RUN_S_MAX,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        return float(json.loads(Path(result.name).read_text(encoding="utf-8")))


def _inside(mode: str, result: str, words: list[str]) -> None:
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    ends: list[float] = []
    register_optimizer_step_pre_hook(lambda *_: ends.append(time.perf_counter()))
    if mode != "alone":
        from holdfast import auto

        if mode == "hooks":
            _save_nothing()
        auto.install(f"bench-{uuid.uuid4().hex[:8]}")
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
    times = [after - before for before, after in pairwise(ends)][WARM_UP:]
    Path(result).write_text(json.dumps(statistics.median(times)), encoding="utf-8")


def _save_nothing() -> None:
    """Have each Checkpointer begin paused: what is left is what ``--auto`` does around the loop."""
    from holdfast import Checkpointer

    restore = Checkpointer.restore

    def restore_and_pause(checkpointer: Checkpointer, *args: object, **kwargs: object) -> object:
        found = restore(checkpointer, *args, **kwargs)  # type: ignore[arg-type]
        checkpointer.pause()
        return found

    Checkpointer.restore = restore_and_pause  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    _inside(sys.argv[1], sys.argv[2], sys.argv[3:])
