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

SDK = Path(__file__).parents[3] / "sdk"

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
        "store": f"file://{home}/store",
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


@pytest.mark.parametrize("nodes", [0, 1])
def test_a_metadata_service_elsewhere_needs_an_agent_that_is_named(tmp_path, nodes):
    """A stack of our own beside it would save where nobody looks."""
    with supervisor_of(tmp_path, nodes=nodes):
        if not nodes:
            (tmp_path / "stack.json").unlink()
        with pytest.raises(InvalidRequestError, match="set HOLDFAST_AGENT"):
            ask(tmp_path, HOLDFAST_ADDRESS="far:7300")


def test_without_the_services_the_error_says_what_to_install(tmp_path):
    """``-S`` leaves site-packages out: only the SDK can be found."""
    script = f"""
import sys
sys.path = [{str(SDK)!r}, *(p for p in sys.path if p.startswith(sys.base_prefix))]
from holdfast.embedded import agent_socket
try:
    agent_socket({{"HOLDFAST_HOME": {str(tmp_path)!r}}}, world_size=1, local_world_size=1)
except ValueError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-S", "-c", script], capture_output=True, text=True, check=True
    )

    assert done.stdout == (
        "the services are not installed on this machine: pip install holdfast[services]\n"
    )


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
