"""What ``holdfast run --auto`` costs a script for each step, beside the script alone.

The same script runs alone, with everything that ``--auto`` puts around it but without saves, and
with a save after each step, in turn, in a process each. What a run gives is the median over its
steps. Hooks do the same for each step, however large the model's layers are, and what they do is
less than one large step differs from the next: so they are timed over many small steps, and told as
a share of a large one. ``python -m tests.bench.auto MODE RESULT SCRIPT ...`` is one run.
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
STEPS = {"hooks": 3000, "saves": 22}
WARM_UP = {"hooks": 200, "saves": 6}
"""Steps of a run that do not count: the first saves make slots."""
HOOKS_MAX, SAVES_MAX = 0.01, 0.05
RUN_S_MAX = 120.0
SCRIPT = Path(__file__).with_name("auto_train.py")


def measure(*, quick: bool) -> Iterator[Record]:
    """Yield what hooks cost, and what a save after each step does."""
    size, runs = ("tiny", 1) if quick else ("large", RUNS)
    with agent():
        bare, hooked = _in_turn("hooks", "tiny", runs)
        alone, saves = _in_turn("saves", size, runs)
    step_s = statistics.median(alone)
    hooks = [(mine - other) / step_s for mine, other in zip(hooked, bare, strict=True)]
    hooks_note = (
        f"no save, as if at exit only: {statistics.median(hooks) * step_s * 1e6:.3g} us more for a "
        f"step of {statistics.median(bare) * 1e3:.3g} ms, median of {_counted('hooks')} such steps"
    )
    yield _record("auto/hooks", hooks, step_s, hooks_note, HOOKS_MAX)
    shares = [mine / other - 1 for mine, other in zip(saves, alone, strict=True)]
    saves_note = (
        f"a save after each: {statistics.median(saves) * 1e3:.3g} ms, "
        f"median of {_counted('saves')} steps"
    )
    yield _record("auto/overhead", shares, step_s, saves_note, SAVES_MAX)


def _counted(mode: str) -> int:
    return STEPS[mode] - WARM_UP[mode]


def _in_turn(mode: str, size: str, runs: int) -> list[list[float]]:
    """Return the seconds of a step alone, and those in this mode, by run."""
    turns = [[_run(how, size, mode) for how in ("alone", mode)] for _ in range(runs)]
    return [list(times) for times in zip(*turns, strict=True)]


def _record(name: str, shares: list[float], step_s: float, note: str, share_max: float) -> Record:
    """Return a record of what a step takes more, in percent of ``step_s``: the median."""
    share = statistics.median(shares)
    return Record(
        name=name,
        value=share * 100,
        unit="%",
        peer="",
        peer_value=None,
        ratio=share / share_max,
        bytes=0,
        note=f"auto_train.py, a thread on two cores, a step alone {step_s * 1e3:.3g} ms; {note}; "
        f"{min(shares) * 100:.2g}..{max(shares) * 100:.2g} %, n={len(shares)}",
        target=f"< {share_max:.0%} of a step",
        met=share < share_max,
    )


def _run(mode: str, size: str, measured: str) -> float:
    """Return the seconds of a step: the median of one run as long as ``measured`` takes."""
    with tempfile.NamedTemporaryFile() as result:
        subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "tests.bench.auto", mode, result.name,
             str(SCRIPT), size, str(STEPS[measured])],
            check=True,
            timeout=RUN_S_MAX,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        times = json.loads(Path(result.name).read_text(encoding="utf-8"))
    return statistics.median(times[WARM_UP[measured] :])


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
    times = [after - before for before, after in pairwise(ends)]
    Path(result).write_text(json.dumps(times), encoding="utf-8")


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
