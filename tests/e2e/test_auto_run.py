"""``holdfast run --auto``: a rank is killed, then the launch is told to end and started again."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.e2e.stack import environment
from tests.e2e.test_corpus import CORPUS

from holdfast.testing import Cluster

PACED = Path(__file__).with_name("paced.py")
ENDED_BY_SIGTERM = 143
STEP_S = "0.5"


@pytest.fixture(scope="module")
def cluster():
    with Cluster(settings=environment()) as running:
        yield running


class Training:
    """Launches of the corpus's ``ddp.py`` on two ranks, as one job."""

    def __init__(self, cluster, folder, job):
        self._cluster = cluster
        self.job = job
        self.out = folder / f"{job}.pt"
        self.hurry = folder / f"{job}.hurry"

    def launch(self, *options):
        words = (STEP_S, self.hurry, CORPUS / "ddp.py", self.out)
        return self._cluster.launch(
            PACED, *words, job=self.job, ranks_per_node=2, auto=True, options=options
        )


def begun(launch):
    """Return after which step each round of a launch went on."""
    return [int(n) for n in re.findall(r"goes on after step (\d+),", launch.output)]


def test_it_goes_on_after_a_kill_and_after_an_end_and_no_bit_is_lost(cluster, tmp_path):
    calm, killed = (Training(cluster, tmp_path, job) for job in ("calm", "killed"))
    calm.hurry.touch()
    calm.launch("--no-standby").succeed()

    launch = killed.launch()
    first = cluster.until_safe("killed", 3)
    launch.kill_rank(0)
    launch.until_printed("goes on after step")
    second = cluster.until_safe("killed", begun(launch)[0] + 3)
    assert launch.end() == [ENDED_BY_SIGTERM], launch.output
    assert not killed.out.exists()
    killed.hurry.touch()
    last = killed.launch("--no-standby")
    last.succeed()

    assert begun(launch)[0] >= first
    assert begun(last)[0] >= second
    expected, found = (torch.load(one.out, weights_only=True) for one in (calm, killed))
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


def test_a_wrong_name_of_an_optimizer_is_told_with_the_right_ones(cluster, tmp_path):
    env = environment(HOLDFAST_AGENT=str(cluster.stack.nodes[0].agent), HOLDFAST_AUTO="1")
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
