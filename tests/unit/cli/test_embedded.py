"""Which agent a rank talks to, and when a stack may be started for it."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.embedded import agent_socket, home_folder, running_stack, supervisor_pid
from holdfast.errors import InvalidRequestError

HOLD = """
import fcntl, sys
lock = open(sys.argv[1], "w")
fcntl.lockf(lock, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def supervisor_of(home: Path, nodes: int) -> Iterator[int]:
    """A process that holds the lock, and the stack.json it would have written."""
    command = [sys.executable, "-c", HOLD, str(home / "supervisor.lock")]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout.readline() == "held\n"
        write_stack(home, process.pid, nodes)
        yield process.pid
        process.stdin.close()


def write_stack(home: Path, pid: int, nodes: int) -> None:
    record = {
        "pid": pid,
        "address": "127.0.0.1:7300",
        "rest_url": "http://127.0.0.1:7380",
        "log": str(home / "log"),
        "nodes": [
            {"name": f"node-{i}", "agent": str(home / f"node-{i}.sock"), "arena": "/x"}
            for i in range(nodes)
        ],
    }
    (home / "stack.json").write_text(json.dumps(record))


def ask(home: Path, *, world_size: int = 1, local_world_size: int = 1, **extra: str) -> Path:
    environ = {"HOLDFAST_HOME": str(home), **extra}
    return agent_socket(environ, world_size=world_size, local_world_size=local_world_size)


def test_a_named_agent_is_taken_as_it_is(tmp_path):
    assert ask(tmp_path, world_size=8, HOLDFAST_AGENT="/run/a.sock") == Path("/run/a.sock")


def test_the_only_node_of_a_running_stack_is_taken(tmp_path):
    with supervisor_of(tmp_path, nodes=1):
        assert ask(tmp_path) == tmp_path / "node-0.sock"


def test_of_several_nodes_one_must_be_picked_and_all_are_listed(tmp_path):
    with supervisor_of(tmp_path, nodes=2), pytest.raises(InvalidRequestError) as caught:
        ask(tmp_path)

    assert "set HOLDFAST_AGENT" in str(caught.value)
    assert str(tmp_path / "node-0.sock") in str(caught.value)
    assert str(tmp_path / "node-1.sock") in str(caught.value)


def test_a_job_of_several_machines_never_starts_a_stack(tmp_path):
    with pytest.raises(InvalidRequestError, match="set HOLDFAST_AGENT"):
        ask(tmp_path, world_size=8, local_world_size=4)

    assert list(tmp_path.iterdir()) == []


def test_a_stack_file_of_a_dead_supervisor_is_not_believed(tmp_path):
    """Its pid may live again as something else: the lock decides."""
    with supervisor_of(tmp_path, nodes=1):
        assert running_stack(tmp_path) is not None
    write_stack(tmp_path, os.getpid(), nodes=1)

    assert running_stack(tmp_path) is None
    assert supervisor_pid(tmp_path) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"pid": 1, "nodes": 5}'])
def test_a_malformed_stack_file_is_no_stack(tmp_path, text):
    with supervisor_of(tmp_path, nodes=1):
        (tmp_path / "stack.json").write_text(text)

        assert running_stack(tmp_path) is None


def test_asking_who_holds_the_lock_never_takes_it(tmp_path):
    lock = (tmp_path / "supervisor.lock").open("w")
    with lock:
        assert supervisor_pid(tmp_path) is None
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize(
    ("environ", "home"),
    [
        ({"HOLDFAST_HOME": "/h"}, Path("/h")),
        ({"HOLDFAST_HOME": "rel"}, Path.cwd() / "rel"),
        ({"XDG_STATE_HOME": "/state"}, Path("/state/holdfast")),
        ({}, Path.home() / ".local/state/holdfast"),
    ],
)
def test_home_is_named_or_in_the_users_state_folder(environ, home):
    assert home_folder(environ) == home
