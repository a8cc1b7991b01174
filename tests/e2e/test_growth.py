"""``holdfast run --nnodes 1:2`` over a real stack: nodes come and go, and things are killed then.

The script ends with the same bits whatever the number of nodes, so they show every step that was
lost, or done twice.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time

import pytest
from tests.e2e.in_peace import SCRIPT, bits_in_peace
from tests.e2e.stack import running_stack, until
from tests.e2e.test_run import END_S_MAX, Launch

STEPS, STEP_S = 150, "0.2"
"""Half a minute, if nobody hurries them: nodes come and go sooner, and each step is saved."""
SEEDS = [int(seed) for seed in os.environ.get("HOLDFAST_TEST_SEEDS", "3").split(",")]
TURNS = 1
STRIKE_S_MAX = 3.0


@pytest.fixture(scope="module")
def calm():
    """The bits at the end without Holdfast."""
    return bits_in_peace(STEPS)


class Elastic(Launch):
    """One node at least, two at most."""

    def __init__(self, stack, folder, save, replicas=1):
        super().__init__(stack, folder)
        self.go = folder / "go"
        self.save = save
        self.replicas = str(replicas)

    def command(self, *options):
        return [
            sys.executable, "-m", "holdfast.cli.main", "run", "--nnodes", "1:2", "--job", self.job,
            "--shrink-after", "0", *options, str(SCRIPT), "--job", self.job, "--steps", str(STEPS),
            "--save", self.save, "--go", str(self.go), "--step-s", STEP_S,
            "--replicas", self.replicas,
        ]  # fmt: skip

    def until_done(self, node, count):
        """Wait until a node has done so many steps more."""
        before = len(self.said(node, r"^did "))
        until(lambda: len(self.said(node, r"^did ")) >= before + count, "steps", END_S_MAX)

    def ranks(self, node):
        return self._ranks("HOLDFAST_ATTEMPT=", str(self._stack.node(node)["agent"]))

    def runs(self, node):
        return node in self.launchers and self.launchers[node].poll() is None

    def keep_up(self, *nodes):
        """Start launchers again that were killed."""
        for node in nodes:
            if not self.runs(node):
                self.start(node, "--no-standby")

    def rounds(self, node):
        """Return world size and step at the beginning of each round that restored."""
        found = self.said(node, r"^restored (\d+) of (\d+)$")
        return [(int(world), int(step)) for step, world in found]

    def until_world(self, node, world, after=0):
        """Wait until the last round of a node, after so many, is one of so many ranks."""
        try:
            until(
                lambda: [w for w, _ in self.rounds(node)[after:]][-1:] == [world],
                "a round",
                END_S_MAX,
            )
        except AssertionError as late:
            raise AssertionError(self.texts()) from late


@pytest.fixture(scope="module")
def stack():
    with running_stack(nodes=2, HOLDFAST_NODE_LEASE_S="20") as running:
        yield running


@pytest.mark.parametrize("save", ["never", "1"])
def test_a_node_that_comes_later_is_taken_in_and_no_step_is_done_twice(stack, tmp_path, calm, save):
    """Whether the script saves by itself at each step, or never."""
    launch = Elastic(stack, tmp_path, save)
    try:
        launch.start(0, "--no-standby")
        launch.until_done(0, 5)
        launch.start(1, "--no-standby")
        launch.until_world(1, 2)
        launch.until_done(1, 5)
        launch.go.touch()
        launch.succeed()

        did = [int(step) for step in launch.said(0, r"^did (\d+)$")]
        assert did == list(range(1, STEPS + 1)), "each step once"
        assert launch.said(0, r"^final (\w+)$") == launch.said(1, r"^final (\w+)$") == calm
    finally:
        launch.close()


def test_a_node_that_is_taken_away_leaves_what_it_holds_behind(stack, tmp_path, calm):
    """Nothing asks for copies, and the node's memory is gone as soon as its launcher is."""
    launch = Elastic(stack, tmp_path, "never", replicas=0)
    notice = tmp_path / "notice"
    try:
        both = ("--no-standby", "--shrink-after", "10m")
        launch.start(0, *both)
        launch.start(1, *both, "--notice", f"file:{notice}")
        launch.until_world(1, 2)
        launch.until_done(1, 3)
        notice.write_text("maintenance\n")
        assert launch.launchers.pop(1).wait(END_S_MAX) == 128 + signal.SIGTERM
        lose_agent(stack, 1)
        launch.until_world(0, 1)
        launch.go.touch()
        launch.succeed()

        did = [int(step) for step in launch.said(0, r"^did (\d+)$")]
        assert did == list(range(1, STEPS + 1)), "each step once"
        assert launch.said(0, r"^final (\w+)$") == calm
    finally:
        launch.close()


def lose_agent(stack, node):
    """End the agent of a node, and all that its memory holds."""
    os.kill(stack.agent_pid(node), signal.SIGKILL)
    for path in stack.arena(node).glob("*.*"):
        path.unlink(missing_ok=True)


def strike(stack, launch, rng):
    """Kill something that is there, at some moment of the next seconds."""
    time.sleep(rng.random() * STRIKE_S_MAX)
    node = rng.randrange(2)
    ranks = launch.ranks(node)
    victims = {
        "metadata": stack.metadata_pid(),
        "agent": stack.agent_pid(node),
        "launcher": launch.launchers[node].pid if launch.runs(node) else None,
        "rank": ranks[-1] if ranks else None,
    }
    what = rng.choice(sorted(victims))
    print(f"kill {what} of node {node}", flush=True)
    if victims[what] is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victims[what], signal.SIGKILL)
    if what == "launcher" and victims[what]:
        launch.launchers[node].wait(END_S_MAX)


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_is_killed_while_nodes_come_and_go_no_bit_is_lost(stack, tmp_path, calm, seed):
    """And no process is left behind: ``succeed`` looks for them."""
    rng = random.Random(seed)
    launch = Elastic(stack, tmp_path, "1")
    try:
        launch.start(0, "--no-standby")
        launch.until_done(0, 3)
        for _ in range(TURNS):
            before = len(launch.rounds(1)) if 1 in launch.launchers else 0
            launch.start(1, "--no-standby")
            strike(stack, launch, rng)
            launch.keep_up(0, 1)
            launch.until_world(1, 2, after=before)
            number = rng.choice([signal.SIGTERM, signal.SIGKILL])
            launch.launchers[1].send_signal(number)
            strike(stack, launch, rng)
            launch.launchers[1].wait(END_S_MAX)
            launch.keep_up(0)
            launch.until_world(0, 1)
        launch.go.touch()
        launch.launchers.pop(1)
        launch.succeed()

        assert launch.said(0, r"^final (\w+)$") == calm
    finally:
        launch.close()
