"""From SIGKILL of a rank to the first new step of all: under ``holdfast run`` and under torchrun.

Two ranks on two nodes of one machine train the demo's model and save every step; the same script
under both. ``python -m tests.bench.recover BEGUN SCRIPT ...`` notes when it began, then is SCRIPT.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.bench.harness import Record, faster
from tests.e2e.stack import Stack, environment, free_port, running_stack

NAMES = ("recover/rank",)
RUNS = 5
RANKS = 2
STEPS_BETWEEN = 5
READY_S = 12.0
"""After a start: by then the next standby has imported all it is to."""
RECOVERED_S_MAX = 90.0
RECOVERY_MS_MAX = 1500.0
TIMES_MIN = 3.0
ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "examples" / "gpt" / "train.py"


class Job:
    """One launch of the demo's script on two nodes."""

    def __init__(self, folder: Path, *, size: str, env: Mapping[str, str]) -> None:
        self._folder = folder
        self._job = f"bench-{uuid.uuid4().hex[:8]}"
        self._env = env
        self.words = [
            *("tests.bench.recover", str(folder / "begun"), str(TRAIN)),
            *("--job", self._job, "--size", size, "--steps", "100000", "--out", str(folder)),
        ]
        self._launchers: list[subprocess.Popen[bytes]] = []

    def start(self, command: list[str], agent: str) -> None:
        """Start the launcher of one node."""
        env = {**self._env, "HOLDFAST_AGENT": agent, "HOLDFAST_LAUNCH": self._job}
        with (self._folder / "log").open("ab") as log:
            self._launchers.append(
                subprocess.Popen(
                    [*command, *self.words],
                    env=env,
                    stdout=log,
                    stderr=log,
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                )
            )

    def close(self) -> None:
        """End it."""
        for launcher in self._launchers:
            launcher.terminate()
        for launcher in self._launchers:
            try:
                launcher.wait(10.0)
            except subprocess.TimeoutExpired:
                launcher.kill()
                launcher.wait()

    def lines(self, rank: int) -> list[dict[str, Any]]:
        """Return what a rank has written down so far."""
        path = self._folder / f"rank-{rank}.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def begun(self, rank: int) -> tuple[int, float]:
        """Return pid and time of the last process that began as ``rank``."""
        pid, at_s = (self._folder / f"begun-{rank}").read_text().split()
        return int(pid), float(at_s)

    def until_steps(self, count: int, after_s: float) -> list[dict[str, Any]]:
        """Return of each rank the first step after ``after_s``, once it has done ``count``."""
        ends_s = time.monotonic() + RECOVERED_S_MAX
        while time.monotonic() < ends_s:
            restored = [
                [e for e in self.lines(rank) if e["event"] == "restored" and e["at"] > after_s]
                for rank in range(RANKS)
            ]
            steps = [
                [e for e in self.lines(rank) if e["event"] == "step" and e["at"] > found[0]["at"]]
                for rank, found in enumerate(restored)
                if found
            ]
            if len(steps) == RANKS and all(len(done) >= count for done in steps):
                return [done[0] for done in steps]
            time.sleep(0.02)
        log = (self._folder / "log").read_text(errors="replace")
        raise AssertionError(f"no new step within {RECOVERED_S_MAX:.0f} s:\n{log[-3000:]}")

    def recovery(self) -> dict[str, float]:
        """Kill rank 1; return the seconds of each phase until all ranks have done a new step."""
        pid, _ = self.begun(1)
        killed_s = time.time()
        os.kill(pid, signal.SIGKILL)
        first = max(step["at"] for step in self.until_steps(1, killed_s))
        begun = max(self.begun(rank)[1] for rank in range(RANKS))
        asked, restored = (
            max(
                next(e["at"] for e in self.lines(rank) if e["event"] == kind and e["at"] > killed_s)
                for rank in range(RANKS)
            )
            for kind in ("restoring", "restored")
        )
        return {
            "script begins": begun - killed_s,
            "group and model": asked - begun,
            "restore": restored - asked,
            "first step": first - restored,
        }


def measure(*, quick: bool) -> Iterator[Record]:
    """Yield one record."""
    runs = 1 if quick else RUNS
    size = "tiny" if quick else "small"
    with running_stack(RANKS) as stack:
        turns = [
            [_recovery(stack, name, size) for name in ("holdfast run", "torchrun")]
            for _ in range(1 + runs)
        ]
    ours, peer = (list(phases) for phases in zip(*turns[1:], strict=True))
    yield faster(
        "recover/rank",
        [sum(phases.values()) for phases in ours],
        [sum(phases.values()) for phases in peer],
        peer="torchrun, its fastest safe settings, the same script with Holdfast",
        length_bytes=0,
        note=f"2 ranks on 2 nodes of one machine, the demo's model; a launch each, in turn; "
        f"ms: {_medians(ours)}; torchrun {_medians(peer)}",
        times_min=TIMES_MIN,
        value_ms_max=RECOVERY_MS_MAX,
    )


def _recovery(stack: Stack, name: str, size: str) -> dict[str, float]:
    """Launch a job of its own, kill a rank once, end it."""
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    paths = (str(ROOT), str(ROOT / "sdk"), str(ROOT / "services"))
    env = environment(
        GLOO_SOCKET_IFNAME="lo",
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        PYTHONPATH=os.pathsep.join(paths),
    )
    job = Job(folder, size=size, env=env)
    port = free_port()
    try:
        for node in range(RANKS):
            job.start(_command(name, node, port), stack.node(node)["agent"])
        job.until_steps(STEPS_BETWEEN, 0.0)
        time.sleep(READY_S)
        return job.recovery()
    finally:
        job.close()
        shutil.rmtree(folder, ignore_errors=True)


def _command(name: str, node: int, port: int) -> list[str]:
    if name == "torchrun":
        conf = f"is_host={int(node == 0)},keep_alive_interval=1,keep_alive_max_attempt=3"
        return [
            sys.executable, "-m", "torch.distributed.run", f"--nnodes={RANKS}",
            "--nproc-per-node=1", "--max-restarts=100", "--rdzv-backend=c10d", "--rdzv-id=bench",
            f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf={conf}", "--local-addr=127.0.0.1",
            "-m",
        ]  # fmt: skip
    return [sys.executable, "-m", "holdfast.cli.main", "run", "--nnodes", str(RANKS), "-m"]


def _medians(runs: list[dict[str, float]]) -> str:
    return ", ".join(
        f"{phase} {statistics.median(seconds[phase] for seconds in runs) * 1e3:.0f}"
        for phase in runs[0]
    )


def main() -> None:
    """Note when this process began as a rank, then be the script."""
    begun, script = sys.argv[1:3]
    path = Path(f"{begun}-{os.environ['RANK']}")
    path.with_suffix(".new").write_text(f"{os.getpid()} {time.time()}")
    path.with_suffix(".new").rename(path)
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
