"""Under torchrun's elastic agents: restarts make one attempt, whoever restarts whom.

Interleaving 12; the commands are those of docs/howto/torchrun.md.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e.stack import TRAINER, environment, processes, running_stack, until
from tests.e2e.three_generations import check_three_generations
from tests.servers.processes import free_port

STEPS = "30"
END_S_MAX = 120
LAUNCH_S_MAX = 30


@pytest.fixture
def stack():
    with running_stack(nodes=2) as running:
        yield running


class Launch:
    """One torchrun for each of two nodes, with a rank each; the store is in that of node 0."""

    def __init__(self, stack, folder: Path) -> None:
        self.job = f"rdzv{secrets.randbelow(1 << 32)}"
        self._stack = stack
        self._folder = folder
        self._endpoint = f"127.0.0.1:{free_port()}"
        self._torchruns: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, node: int) -> None:
        """Start the torchrun of a node, the first or one in place of another."""
        env = environment(
            HOLDFAST_AGENT=self._stack.node(node)["agent"],
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        )
        settings = f"is_host={int(node == 0)},keep_alive_interval=1,keep_alive_max_attempt=3"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1",
            f"--rdzv-id={self.job}", "--rdzv-backend=c10d", f"--rdzv-endpoint={self._endpoint}",
            f"--rdzv-conf={settings}", "--max-restarts=5", "--monitor-interval=0.1",
            str(TRAINER), "--job", self.job, "--steps", STEPS, "--wait", "replicated",
        ]  # fmt: skip
        with self._log(node).open("a") as out:
            self._torchruns[node] = subprocess.Popen(
                command, env=env, stdout=out, stderr=subprocess.STDOUT
            )

    def kill_rank(self, node: int) -> None:
        """Kill the rank of a node."""
        os.kill(self._rank(node), signal.SIGKILL)

    def lose_node(self, node: int) -> None:
        """End all that runs on a node, and what its memory holds."""
        rank = self._rank(node)
        self._torchruns[node].kill()
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)
        os.kill(self._stack.agent_pid(node), signal.SIGKILL)
        for path in self._stack.arena(node).glob("*.*"):
            path.unlink(missing_ok=True)
        self._torchruns[node].wait(END_S_MAX)

    def _rank(self, node: int) -> int:
        words = ("TORCHELASTIC_RUN_ID=" + self.job, str(self._stack.node(node)["agent"]))
        return until(lambda: processes(str(TRAINER), *words), f"a rank on node {node}")[-1]

    def said(self, node: int, pattern: str) -> list[str]:
        """Return what the ranks of a node have printed so far, of all attempts."""
        return re.findall(pattern, self._log(node).read_text(), re.MULTILINE)

    def until_step(self, step: int) -> None:
        """Wait until the rank of node 0 has done ``step`` and has all its copies."""
        until(lambda: self.said(0, rf"^step {step} "), f"step {step}")

    def succeed(self) -> None:
        """Wait; every torchrun must end well."""
        codes = {node: torchrun.wait(END_S_MAX) for node, torchrun in self._torchruns.items()}
        assert codes == {0: 0, 1: 0}, self._log(0).read_text()[-3000:]

    def close(self) -> None:
        """End what is left."""
        for torchrun in self._torchruns.values():
            torchrun.terminate()
        for torchrun in self._torchruns.values():
            torchrun.wait(LAUNCH_S_MAX)

    def _log(self, node: int) -> Path:
        return self._folder / f"{node}.log"


@pytest.fixture
def launch(stack, tmp_path):
    made = Launch(stack, tmp_path)
    yield made
    made.close()


def test_two_agents_restart_their_workers_into_one_generation_both_times(stack, launch):
    """P5, G8: a rank is killed, then all of a node and its memory lost, and another torchrun
    comes in its place: generations 1, 2, 3, and the bits of a run that nothing disturbed."""
    launch.start(0)
    launch.start(1)
    launch.until_step(6)
    launch.kill_rank(1)
    launch.until_step(12)
    launch.lose_node(1)
    launch.start(1)
    launch.succeed()

    check_three_generations(stack, launch, least=(5, 11), steps=STEPS)
