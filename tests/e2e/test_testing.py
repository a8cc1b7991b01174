"""``holdfast.testing``, as users have it: docs/howto/testing.md (F116)."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.e2e.stack import ROOT, environment, processes, until

from holdfast.errors import InvalidRequestError
from holdfast.testing import Cluster

SCRIPT = Path(__file__).with_name("testing_train.py")
PAGE = ROOT / "docs" / "howto" / "testing.md"
LEFT_BEHIND = """
import os, signal
from holdfast.testing import Cluster
with Cluster() as cluster:
    launch = cluster.launch({script!r}, "out", job="left", environ={{"STEPS": "100000"}})
    launch.until_printed("after step")
    print(cluster.stack.home, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module", autouse=True)
def imports():
    """Launchers find the packages as this process does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def cluster():
    with Cluster(nodes=2, settings={"HOLDFAST_NODE_LEASE_S": "3"}) as running:
        yield running
        home = running.stack.home
    assert not home.exists()
    until(lambda: not processes(str(home)), "no process is left")


def test_the_test_of_the_page_holds(tmp_path, monkeypatch):
    block = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]
    shutil.copy(SCRIPT, tmp_path / "train.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KILLED", "killed")
    names: dict = {}
    exec(block, names)

    names["test_training_survives_a_killed_rank"](tmp_path)


def test_services_die_ranks_hang_and_others_go_on(cluster, tmp_path):
    slow = {"STEPS": "100000"}
    training = cluster.launch(SCRIPT, tmp_path / "out", job="moved", environ=slow)
    safe = cluster.until_safe("moved", 3)
    cluster.kill_agent(0)
    cluster.kill_metadata()
    safe = cluster.until_safe("moved", safe + 3)
    training.freeze_rank(1)
    training.kill_rank(1)
    safe = cluster.until_safe("moved", safe + 3)

    assert training.end() == [128 + signal.SIGTERM] * 2

    again = {"STEPS": str(cluster.until_safe("moved", safe) + 3)}
    more = cluster.launch(
        SCRIPT, tmp_path / "out", job="moved", nodes=[0], ranks_per_node=3, environ=again,
        options=("--no-standby",),
    )  # fmt: skip
    found = [int(n) for n in re.findall(r"after step (\d+)", more.succeed())]
    assert len(found) == 3
    assert min(found) >= safe
    assert (tmp_path / "out").exists()


def test_a_node_is_lost_with_its_memory_and_another_comes(cluster, tmp_path):
    training = cluster.launch(SCRIPT, tmp_path / "out", job="lost", environ={"KILLED": "lost"})
    safe = cluster.until_safe("lost", 3)
    cluster.lose_node(1)
    with pytest.raises(InvalidRequestError, match="launcher of node 0 runs"):
        training.start_on(0)
    training.start_on(1)

    found = [int(n) for n in re.findall(r"after step (\d+)", training.succeed())]
    assert found.count(0) == 2
    assert all(step >= safe for step in found if step)
    assert len(found) >= 4


def test_what_does_not_come_is_said_with_the_log(cluster, tmp_path):
    script = tmp_path / "says.py"
    script.write_text("print('I am here'); raise SystemExit(3)")
    launch = cluster.launch(script, job="says", nodes=[0], options=("--max-restarts", "0"))

    with pytest.raises(AssertionError, match=r"ended without printing 'gone'[\s\S]*I am here"):
        launch.until_printed("gone")
    with pytest.raises(AssertionError, match=r"exit codes \[3\][\s\S]*I am here"):
        launch.succeed()
    with pytest.raises(AssertionError, match="ended before rank 0 was found"):
        launch.kill_rank(0)
    with pytest.raises(AssertionError, match=r"not within 0 s: step 1 of job says to be safe"):
        cluster.until_safe("says", 1, timeout_s=0)


def test_a_launch_outlives_the_thread_that_has_started_it(cluster, tmp_path):
    """The kernel ends a child with its thread; a fixture may start launches side by side."""
    script = tmp_path / "waits.py"
    script.write_text("print('I am here', flush=True); import sys; open(sys.argv[1]).read()")
    os.mkfifo(tmp_path / "go")
    launched = []

    def start():
        arguments = {"job": "threads", "nodes": [0], "options": ("--max-restarts", "0")}
        launched.append(cluster.launch(script, tmp_path / "go", **arguments))
        launched[0].until_printed("I am here")

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    (tmp_path / "go").write_text("on")

    launched[0].succeed()


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda c: c.launch("missing.py", job="x"), "there is no script missing.py"),
        (lambda c: c.launch(SCRIPT, job="x", nodes=[2]), "there is no node 2"),
        (lambda c: c.launch(SCRIPT, job="x", nodes=[]), "nothing would run"),
        (lambda c: c.launch(SCRIPT, job="x", environ={"A": 1}), "environ has 'A': 1, where"),
        (lambda c: c.launch(SCRIPT, job=7), "job=7 is no text"),
        (lambda c: c.launch(SCRIPT, job="x", options=("--max-restarts", 0)), "options has 0"),
        (lambda _: Cluster(settings={"A": None}), "settings has 'A': None, where"),
        (lambda c: c.lose_node(-1), "there is no node -1"),
        (lambda _: Cluster(nodes=0), "from 1, not 0"),
        (lambda _: Cluster(nodes="2"), "from 1, not '2'"),
        (lambda _: Cluster().launch(SCRIPT, job="x"), "use it in a with block"),
    ],
)
def test_what_cannot_be_is_refused_by_name(cluster, call, match):
    with pytest.raises(InvalidRequestError, match=match):
        call(cluster)


def test_tests_that_are_killed_leave_no_launcher():
    code = LEFT_BEHIND.format(script=str(SCRIPT))
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False
    )
    home = Path(ended.stdout.strip())
    try:
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        until(lambda: not processes("rank_process", str(home)), "no rank is left")
        assert processes("holdfast_services", str(home))  # until it is idle for long
    finally:
        from holdfast.embedded import erase_stack, stop_stack

        stop_stack(home)
        erase_stack(home, everything=True)
        shutil.rmtree(home)
