"""``holdfast run --auto``: a rank is killed, then the launch is told to end and started again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.e2e.stack import environment, processes, running_stack, until
from tests.e2e.test_corpus import CORPUS
from tests.e2e.test_docs import newest_step

from holdfast import locks

PACED = Path(__file__).with_name("paced.py")
ENDED_BY_SIGTERM = 143
END_S_MAX = 120.0
STEP_S = "0.5"


@pytest.fixture(scope="module")
def stack():
    with running_stack(nodes=1) as running:
        yield running


class Launch:
    """``holdfast run --auto`` of the two ranks of the corpus's ``ddp.py``."""

    def __init__(self, stack, folder, job):
        self.mark = f"LAUNCH={job}-{os.getpid()}"
        """In the environment of its processes, and of no other test run's on this machine."""
        name, value = self.mark.split("=")
        self._env = environment(HOLDFAST_AGENT=stack.node(0)["agent"], **{name: value})
        self._stack = stack
        self.job = job
        self.out = folder / f"{job}.pt"
        self.log = folder / f"{job}.log"
        self.hurry = folder / f"{job}.hurry"

    def start(self):
        command = [
            sys.executable, "-m", "holdfast.cli.main", "run", "--auto", "--job", self.job,
            "--nproc-per-node", "2", str(PACED), STEP_S, str(self.hurry),
            str(CORPUS / "ddp.py"), str(self.out),
        ]  # fmt: skip
        with self.log.open("a") as log:
            return subprocess.Popen(
                command, env=self._env, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def until_safe(self, step):
        """Wait for a checkpoint of ``step`` or a later one; return which it is."""
        until(lambda: (newest_step(self._stack, self.job) or 0) >= step, f"step {step} to be safe")
        return newest_step(self._stack, self.job)

    def kill_rank(self):
        """Kill one of the ranks that train; standbys look the same but have no session."""
        held = [locks.holder_of(path) for path in self._stack.arena(0).glob("sessions/*")]
        ranks = processes(self.mark, "rank_process")
        os.kill(next(pid for pid in ranks if pid in held), signal.SIGKILL)

    def begun(self):
        return [int(n) for n in re.findall(r"goes on after step (\d+),", self.log.read_text())]


def test_it_goes_on_after_a_kill_and_after_an_end_and_no_bit_is_lost(stack, tmp_path):
    calm, killed = (Launch(stack, tmp_path, job) for job in ("calm", "killed"))
    calm.hurry.touch()
    assert calm.start().wait(END_S_MAX) == 0, calm.log.read_text()

    launcher = killed.start()
    first = killed.until_safe(3)
    killed.kill_rank()
    until(killed.begun, "a second round")
    second = killed.until_safe(killed.begun()[0] + 3)
    launcher.terminate()
    assert launcher.wait(END_S_MAX) == ENDED_BY_SIGTERM, killed.log.read_text()
    assert not killed.out.exists()
    killed.hurry.touch()
    assert killed.start().wait(END_S_MAX) == 0, killed.log.read_text()

    begun = killed.begun()
    assert begun[0] >= first
    assert begun[1] >= second
    until(lambda: not processes(killed.mark), "no process is left")
    expected, found = (torch.load(launch.out, weights_only=True) for launch in (calm, killed))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("option", ["--fresh", "--auto-steps-by=Adam"])
def test_its_options_are_refused_without_it(option):
    ended = subprocess.run(
        [sys.executable, "-m", "holdfast.cli.main", "run", option, str(PACED)],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert "--fresh and --auto-steps-by are for --auto: add it" in ended.stderr


def test_a_wrong_name_of_an_optimizer_is_told_with_the_right_ones(stack, tmp_path):
    env = environment(HOLDFAST_AGENT=stack.node(0)["agent"], HOLDFAST_AUTO="1")
    command = ["run", "--auto-steps-by", "Adam", "--job", "wrong", "--no-standby"]
    ended = subprocess.run(
        [sys.executable, "-m", "holdfast.cli.main", *command, str(CORPUS / "cnn.py"), "x.pt"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert ended.returncode == 1
    assert "--auto-steps-by Adam: the optimizers are SGD" in ended.stderr
