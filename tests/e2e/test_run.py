"""``holdfast run`` over a real stack of two nodes: kills, and the bits of training in peace.

The same trainer as under torchrun; a launcher for each node, with one rank each.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.e2e.stack import (
    PLAIN,
    TRAINER,
    environment,
    processes,
    running_stack,
    until,
)
from tests.e2e.three_generations import check_three_generations

from holdfast import locks
from holdfast.embedded import stop_stack

STEPS = "30"
END_S_MAX = 180


@pytest.fixture
def stack(request):
    """Two nodes with a lease: long enough that a busy machine loses none that it is not to lose."""
    with running_stack(nodes=2, HOLDFAST_NODE_LEASE_S=request.param) as running:
        yield running


class Launch:
    """A launcher for each of two nodes."""

    def __init__(self, stack, folder):
        self.job = f"run{secrets.randbelow(1 << 32)}"
        self._stack = stack
        self._folder = folder
        self.launchers = {}

    def start(self, node, *options):
        """Start the launcher of a node, the first or one in place of another."""
        env = environment(HOLDFAST_AGENT=self._stack.node(node)["agent"], LAUNCH=self.job)
        with self._log(node).open("a") as out:
            self.launchers[node] = subprocess.Popen(
                self.command(*options),
                env=env,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )

    def command(self, *options):
        """Return what a node runs."""
        return [
            sys.executable, "-m", "holdfast.cli.main", "run", "--nnodes", "2", "--job", self.job,
            *options, str(TRAINER), "--job", self.job, "--steps", STEPS, "--wait", "replicated",
        ]  # fmt: skip

    def kill_rank(self, node):
        """Kill the rank of a node."""
        os.kill(self.rank(node), signal.SIGKILL)

    def lose_node(self, node):
        """End all that runs on a node, and what its memory holds."""
        self.launchers[node].kill()
        os.kill(self._stack.agent_pid(node), signal.SIGKILL)
        for path in self._stack.arena(node).glob("*.*"):
            path.unlink(missing_ok=True)
        self.launchers[node].wait(END_S_MAX)

    def rank(self, node):
        words = ("HOLDFAST_ATTEMPT=", str(self._stack.node(node)["agent"]))
        return until(lambda: self._ranks(*words), f"a rank on node {node}")[-1]

    def _ranks(self, *words):
        """Return the pids of ranks; the environment of a process is what it began with."""
        held = self._stack.arena(0).parent.glob("*/sessions/*")
        pids = {locks.holder_of(path) for path in held}
        return [
            pid for pid in processes(f"LAUNCH={self.job}", "rank_process", words[1]) if pid in pids
        ]

    def said(self, node, pattern):
        """Return what the ranks of a node have printed so far, of all rounds."""
        return re.findall(pattern, self._log(node).read_text(), re.MULTILINE)

    def until_step(self, step):
        """Wait until the rank of node 0 has done ``step`` and has all its copies."""
        until(lambda: self.said(0, rf"^step {step} "), f"step {step}", END_S_MAX)

    def succeed(self):
        """Wait; every launcher must end well, and leave no process."""
        codes = {node: launcher.wait(END_S_MAX) for node, launcher in self.launchers.items()}
        assert set(codes.values()) == {0}, self.texts()
        until(lambda: not processes(f"LAUNCH={self.job}"), "no process is left")

    def texts(self):
        return "\n---\n".join(self._log(n).read_text()[-3000:] for n in self.launchers)

    def close(self):
        for launcher in self.launchers.values():
            with contextlib.suppress(ProcessLookupError):
                launcher.kill()
            launcher.wait()

    def _log(self, node):
        return self._folder / f"{node}.log"


@pytest.fixture
def launch(stack, tmp_path):
    made = Launch(stack, tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("stack", ["20"], indirect=True)
def test_a_rank_and_a_node_are_lost_and_no_bit_is(stack, launch):
    """Generations 1, 2, 3."""
    launch.start(0)
    launch.start(1)
    launch.until_step(6)
    launch.kill_rank(1)
    launch.until_step(14)
    launch.lose_node(1)
    launch.start(1)
    launch.succeed()

    check_three_generations(stack, launch, least=(5, 13), steps=STEPS)
    spent = stack.rest(f"jobs/{launch.job}/ledger")["total"]
    assert 0 < spent["productive_s"] < spent["trained_s"]
    assert {"process", "node"} >= set(spent["down_s"]) > set(), spent


@pytest.mark.parametrize("stack", ["600"], indirect=True)
def test_a_launcher_that_is_killed_is_missed_at_once_however_long_the_lease(stack, launch):
    """Its agent sees it: else the one in its place would be refused for as long as the lease."""
    launch.start(0, "--no-standby")
    launch.start(1, "--no-standby")
    launch.until_step(6)
    rank = launch.rank(1)
    launch.launchers[1].kill()
    launch.launchers[1].wait(END_S_MAX)
    until(lambda: rank not in processes(f"LAUNCH={launch.job}"), "its rank has ended with it")
    launch.start(1, "--no-standby")
    launch.succeed()

    assert [len(launch.said(node, r"^restored (\d+)")) for node in (0, 1)] == [2, 2]
    assert "has a launcher of" not in launch.texts()


@pytest.mark.parametrize("stack", ["2"], indirect=True)
def test_metadata_and_an_agent_are_away_for_longer_than_a_lease_and_nobody_stops(stack, launch):
    launch.start(0, "--no-standby")
    launch.start(1, "--no-standby")
    launch.until_step(6)
    os.kill(stack.agent_pid(1), signal.SIGSTOP)
    node = stack.node(1)["name"]
    until(lambda: f"node {node} is not heard" in launch.texts(), "its lease has run out")
    os.kill(stack.metadata_pid(), signal.SIGKILL)
    os.kill(stack.agent_pid(1), signal.SIGKILL)
    launch.succeed()

    assert [len(launch.said(node, r"^restored (\d+)")) for node in (0, 1)] == [1, 1]
    assert "all nodes are heard again" in launch.texts()


def test_one_machine_alone_brings_its_services_and_restarts_a_rank(tmp_path):
    """Its ranks import all of torch and take it apart at the end, as those of users do."""
    home = Path(tempfile.mkdtemp(prefix="hf-"))
    command = [
        sys.executable, "-m", "holdfast.cli.main", "run", "--standalone", "--nproc-per-node", "2",
        "--local-addr", "localhost", "--job", "alone", str(TRAINER), "--job", "alone",
        "--steps", STEPS, "--wait", "local",
    ]  # fmt: skip
    log = tmp_path / "log"
    env = environment(HOLDFAST_HOME=str(home), LAUNCH=str(home), PYTHONPATH=PLAIN)
    try:
        with log.open("wb") as out:
            launcher = subprocess.Popen(
                command, env=env, stdout=out, stderr=out, stdin=subprocess.DEVNULL
            )
        until(lambda: "step 6 " in log.read_text(), "step 6", END_S_MAX)
        ranks = processes(f"LAUNCH={home}", "rank_process", "LOCAL_RANK=1")
        os.kill(ranks[0], signal.SIGKILL)

        assert launcher.wait(END_S_MAX) == 0, log.read_text()[-3000:]
        said = log.read_text()
        assert said.count("final ") == 2
        assert said.count("rank 0 of localhost") == 2
        restored = [int(step) for step in re.findall(r"^restored (\d+)", said, re.MULTILINE)]
        assert restored[:2] == [0, 0]
        assert len(restored) == 4
        assert min(restored[2:]) >= 5
        assert not processes(f"LAUNCH={home}", "rank_process")
    finally:
        stop_stack(home)
        shutil.rmtree(home, ignore_errors=True)
