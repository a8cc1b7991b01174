"""From SIGKILL of a rank, or of a node, to the first new step of all, beside torchrun.

Two ranks on two nodes of one machine train the demo's model and save every step; the same script
under ``holdfast run`` and under torchrun. A node is lost with its launcher, its agent and its
memory, while a third one waits in reserve.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tests.bench.harness import Record, faster
from tests.e2e.stack import Stack, environment, running_stack
from tests.servers.processes import free_port

NAMES = ("recover/rank", "recover/node")
RUNS = 5
RANKS = 2
STEPS_BETWEEN = 5
READY_S = 12.0
"""After a start: by then the next standby has imported all it is to."""
RECOVERED_S_MAX = 90.0
RECOVERY_MS_MAX = 1500.0
TIMES_MIN = 3.0
LEASE_S = 3
NODE_RECOVERY_MS_MAX = (LEASE_S + 1.5) * 1e3
LOST = 1
ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "examples" / "gpt" / "train.py"
BEGUN = Path(__file__).with_name("begun.py")


class Job:
    """One launch of the demo's script on two nodes."""

    def __init__(self, folder: Path, *, size: str, env: Mapping[str, str]) -> None:
        self._folder = folder
        self._job = f"bench-{uuid.uuid4().hex[:8]}"
        self._env = env
        self.words = [
            *(str(BEGUN), str(folder / "begun"), str(TRAIN)),
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

    def kill_rank(self) -> None:
        """Kill rank 1."""
        os.kill(self.begun(1)[0], signal.SIGKILL)

    def lose_node(self, stack: Stack) -> None:
        """Lose a node as by power: what sees deaths on it sees none."""
        agent = stack.agent_pid(LOST)
        assert agent is not None
        os.kill(agent, signal.SIGSTOP)
        self._launchers[LOST].kill()  # its ranks die with it
        for path in stack.arena(LOST).glob("*.*"):
            path.unlink(missing_ok=True)
        os.kill(agent, signal.SIGKILL)

    def recovery(self, strike: Callable[[], None]) -> dict[str, float]:
        """Strike; return the seconds of each phase until all ranks have done a new step."""
        killed_s = time.time()
        strike()
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
    """Yield a record for a rank that is killed, and one for a node that is lost."""
    runs = 1 if quick else RUNS
    size = "tiny" if quick else "small"
    with running_stack(RANKS + 1, forked=False, HOLDFAST_NODE_LEASE_S=str(LEASE_S)) as stack:
        yield _record(
            "recover/rank",
            [_turn(stack, size, nodes=RANKS) for _ in range(1 + runs)][1:],
            note="2 ranks on 2 nodes of one machine, the demo's model; a launch each, in turn",
            times_min=TIMES_MIN,
            value_ms_max=RECOVERY_MS_MAX,
        )
        yield _record(
            "recover/node",
            [_turn(stack, size, nodes=RANKS + 1) for _ in range(1 + runs)][1:],
            note=f"the same, but a node is lost with its memory while a third waits in reserve; a "
            f"lease of {LEASE_S} s, torchrun's signs of life each second, lost after 3",
            times_min=1.0,
            value_ms_max=NODE_RECOVERY_MS_MAX,
        )


def _record(
    name: str,
    turns: list[list[dict[str, float]]],
    *,
    note: str,
    times_min: float,
    value_ms_max: float,
) -> Record:
    ours, peer = (list(phases) for phases in zip(*turns, strict=True))
    return faster(
        name,
        [sum(phases.values()) for phases in ours],
        [sum(phases.values()) for phases in peer],
        peer="torchrun, its fastest safe settings, the same script with Holdfast",
        length_bytes=0,
        note=f"{note}; ms: {_medians(ours)}; torchrun {_medians(peer)}",
        times_min=times_min,
        value_ms_max=value_ms_max,
    )


def _turn(stack: Stack, size: str, *, nodes: int) -> list[dict[str, float]]:
    return [_recovery(stack, name, size, nodes=nodes) for name in ("holdfast run", "torchrun")]


def _recovery(stack: Stack, name: str, size: str, *, nodes: int) -> dict[str, float]:
    """Launch a job of its own, strike once, end it; more nodes than ranks: a node is lost."""
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
        for node in range(RANKS, nodes):
            job.start(_command(name, node, port), stack.node(node)["agent"])
        time.sleep(READY_S)
        return job.recovery(partial(job.lose_node, stack) if nodes > RANKS else job.kill_rank)
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
        ]  # fmt: skip
    return [sys.executable, "-m", "holdfast.cli.main", "run", "--nnodes", str(RANKS)]


def _medians(runs: list[dict[str, float]]) -> str:
    return ", ".join(
        f"{phase} {statistics.median(seconds[phase] for seconds in runs) * 1e3:.0f}"
        for phase in runs[0]
    )
