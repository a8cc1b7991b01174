"""What runs on each node of a Ray cluster, without Ray: the actor and its executor (ADR 0068)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.integration.launcher.harness import PACKAGES, ROOT, until

ACTOR = """
import json, sys
from holdfast.executor import ray_node
ray_node.ENDING_S = 3.0
words = ("--gpus", "1", "--scheduler", "http://127.0.0.1:9", "--agent", "unix:/nowhere")
node = ray_node.RayNode(words, {}, sys.argv[1], 60.0)
print("{}", flush=True)
for line in sys.stdin:
    print(json.dumps(node.say(ending="end" in line)), flush=True)
"""


class Actor:
    """An actor in a process of its own, which answers at once."""

    def __init__(self, folder):
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", ACTOR, str(folder)], text=True, bufsize=1,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'sdk'}:{PACKAGES}"},
        )  # fmt: skip
        self.process.stdout.readline()

    def say(self, word=""):
        self.process.stdin.write(f"{word}\n")
        return json.loads(self.process.stdout.readline())

    def executors(self):
        """Return the processes that name the folder, but this one."""
        word = os.fsencode(self.folder)
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
            except OSError:
                continue
            if word in words and int(path.parent.name) != self.process.pid:
                found.append(int(path.parent.name))
        return found

    def close(self):
        self.process.kill()
        self.process.communicate()
        for pid in self.executors():
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(prefix="hf-") as made:
        yield Path(made)


@pytest.fixture
def actor(folder):
    made = Actor(folder / "x" / "y")
    yield made
    made.close()


def test_it_is_over_when_no_executor_is_on_its_way_and_stays_so(actor):
    """Else the node is given back to Ray, and an executor comes up on it."""
    until(lambda: actor.say("end")["over"], "it ends")
    assert not actor.executors()
    for _ in range(5):
        assert actor.say()["over"], "another command that goes on does not take it back"
    assert not actor.executors()
    until(lambda: actor.say()["executor"], "nobody ends it any more: it goes on")


def test_a_folder_that_is_of_no_use_is_told_and_tried_again(folder):
    (folder / "x").touch()
    actor = Actor(folder / "x" / "y")
    try:
        until(lambda: "Not a directory" in actor.say()["said"], "it is told")
        (folder / "x").unlink()
        until(lambda: actor.say()["executor"], "it is tried again")
    finally:
        actor.close()
