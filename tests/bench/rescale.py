"""A job of two ranks gets a third, and gives it back: from the plan to the first new step of all.

The demo's script under the scheduler, on one node with three places, and on three nodes with one
each. Another job has the third place, with a higher priority: it is cancelled, then submitted anew.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.bench.harness import Record
from tests.e2e.stack import Stack, running_stack

from holdfast.rpc import rest

NAMES = ("rescale/live",)
RUNS = 5
RESCALE_S_MAX = 3.0
WAIT_S_MAX = 120.0
SILENT_S = 12.0
"""After its first round a job that says nothing of how it scales has as many as it asked for."""
STEPS_BETWEEN = 20
ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "examples" / "gpt" / "train.py"


class Elastic:
    """The demo's script with two or three ranks."""

    def __init__(self, stack: Stack, folder: Path, size: str) -> None:
        self._stack, self._folder = stack, folder
        self.name = f"bench-{uuid.uuid4().hex[:8]}"
        stack.holdfast(
            *("submit", "--job", self.name, "--gpus", "2:3", "--env", "OMP_NUM_THREADS=1"),
            *("--env", "GLOO_SOCKET_IFNAME=lo", "--", str(TRAIN), "--job", self.name),
            *("--size", size, "--steps", "1000000", "--out", str(folder)),
        )

    def lines(self, rank: int) -> list[dict[str, Any]]:
        """Return what a rank has written down so far."""
        path = self._folder / f"rank-{rank}.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def first_steps(self, ranks: int, after_s: float, count: int) -> list[dict[str, Any]] | None:
        """Return the restore and the first step after it of each rank, once it has done some."""
        found = []
        for rank in range(ranks):
            lines = [line for line in self.lines(rank) if line["at"] > after_s]
            restored = [at for at, line in enumerate(lines) if line["event"] == "restored"]
            if not restored:
                return None
            since = lines[restored[0] :]
            steps = [line for line in since if line["event"] == "step"]
            if len(steps) < count:
                return None
            found.append({"restored": since[0], "step": steps[0]})
        return found

    def steps_before(self, at_s: float) -> int:
        """Return the last step that a rank had written down before then."""
        steps = [
            line["step"] for line in self.lines(0) if line["event"] == "step" and line["at"] < at_s
        ]
        return max(steps, default=0)


class Blocker:
    """A job that has one place for as long as it is wanted."""

    def __init__(self, stack: Stack, folder: Path) -> None:
        self._stack = stack
        self.name = f"block-{uuid.uuid4().hex[:8]}"
        script = folder / "block.py"
        script.write_text("import signal\nsignal.pause()\n")
        self._words = (
            *("submit", "--job", self.name, "--priority", "9", "--grace", "5", "--"),
            *("--no-standby", str(script)),
        )

    def submit(self) -> None:
        """Have it take a place."""
        self._stack.holdfast(*self._words)

    def cancel(self) -> None:
        """Have it give its place back."""
        self._stack.holdfast("cancel", self.name)


def measure(*, quick: bool) -> Iterator[Record]:
    """Yield the record."""
    size = "tiny" if quick else "small"
    turns = 1 if quick else RUNS
    one = _turns(1, 3, size, turns)
    many = _turns(3, 1, size, turns)
    grown, shrunk = (statistics.median(turn[at][0] for turn in one) for at in (0, 1))
    lost = sum(steps for turn in (*one, *many) for _, steps in turn)
    value = max(grown, shrunk)
    wide, narrow = (statistics.median(turn[at][0] for turn in many) for at in (0, 1))
    yield Record(
        name="rescale/live",
        value=value,
        unit="s",
        peer="",
        peer_value=None,
        ratio=value / RESCALE_S_MAX,
        bytes=0,
        note=f"2 ranks to 3 and back, the demo's model, from the plan to the first new step of "
        f"all; on one node {grown:.2f} and {shrunk:.2f} s, on three, where a launcher begins "
        f"first, {wide:.2f} and {narrow:.2f} s; steps lost: {lost}; n={len(one)}",
        target=f"<= {RESCALE_S_MAX:g} s, no step lost",
        met=value <= RESCALE_S_MAX and lost == 0,
    )


def _turns(
    nodes: int, gpus: int, size: str, count: int
) -> list[tuple[tuple[float, int], tuple[float, int]]]:
    """Return seconds and steps lost of growth and of shrinking, of ``count`` turns after one."""
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    with running_stack(
        nodes, "--scheduler", "--gpus", str(gpus),
        HOLDFAST_POLICY="fifo", HOLDFAST_PLAN_S="1", HOLDFAST_NODE_LEASE_S="10",
    ) as stack:  # fmt: skip
        url = json.loads((stack.home / "stack.json").read_text())["scheduler_url"]
        try:
            blocker = Blocker(stack, folder)
            blocker.submit()
            job = Elastic(stack, folder, size)
            _until(lambda: job.first_steps(2, 0.0, STEPS_BETWEEN), "it trains")
            time.sleep(SILENT_S)
            turns = []
            for _ in range(1 + count):
                blocker.cancel()
                grown = _rescaled(job, url, 3)
                blocker = Blocker(stack, folder)
                blocker.submit()
                turns.append((grown, _rescaled(job, url, 2)))
            stack.holdfast("cancel", job.name)
            return turns[1:]
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _rescaled(job: Elastic, url: str, ranks: int) -> tuple[float, int]:
    """Return how long it took from the plan to the first new step of all, and steps lost."""
    planned_s = _until(lambda: _planned(url, job.name, ranks), f"a plan of {ranks} ranks")
    found = _until(lambda: job.first_steps(ranks, planned_s, STEPS_BETWEEN), "a new step")
    began_s = min(one["restored"]["at"] for one in found)
    lost = max(0, job.steps_before(began_s) - found[0]["restored"]["step"])
    return max(one["step"]["at"] for one in found) - planned_s, lost


def _planned(url: str, name: str, ranks: int) -> float:
    """Return when the newest plan was made, if it gives the job so many; else 0."""
    plan = rest.ask("GET", f"{url}/api/v1/plan")
    wished = plan["jobs"].get(name, {"gpus": {}})["gpus"]
    return float(plan["made_at"]) if sum(wished.values()) == ranks else 0.0


def _until(condition: Any, what: str) -> Any:
    ends_s = time.monotonic() + WAIT_S_MAX
    while time.monotonic() < ends_s:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError(f"not within {WAIT_S_MAX:.0f} s: {what}")
