"""The embedded stack as people run it: started, killed in parts and as a whole, stopped."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.e2e.stack import (
    SharedStack,
    Stack,
    environment,
    processes,
    running_stack,
    until,
)
from tests.servers.processes import free_port

from holdfast.embedded import stop_stack
from holdfast.errors import NotFoundError
from holdfast_services.kit.queue import open_queue
from holdfast_services.supervisor.layout import erase

ASK = """
import os
from holdfast.embedded import agent_socket
print(agent_socket(os.environ, world_size=4, local_world_size=4))
"""


STACK = SharedStack(nodes=2, forked=False)


@pytest.fixture
def own_stack():
    """Two nodes that a test may stop."""
    with running_stack(nodes=2, forked=False) as running:
        yield running


@pytest.fixture
def home(tmp_path_factory):
    """A HOME where nothing runs yet; whatever was started there is stopped."""
    folder = tmp_path_factory.mktemp("home")
    yield folder
    with contextlib.suppress(NotFoundError):
        stop_stack(folder)
    erase(folder)


def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "holdfast.cli.main", *arguments]
    return subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=100, check=False
    )


def together(count: int, *command: str, **extra: str) -> list[str]:
    """Run ``count`` processes at once; all must succeed; return what each printed."""
    processes = [
        subprocess.Popen(
            [sys.executable, *command], env=environment(**extra), stdout=-1, stderr=-1, text=True
        )
        for _ in range(count)
    ]
    outcomes = [process.communicate(timeout=100) for process in processes]
    assert {process.returncode for process in processes} == {0}, outcomes
    return [out for out, _ in outcomes]


def supervisors(home: Path) -> list[int]:
    """Return the pids of all supervisors of ``home`` that live now."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"holdfast_services.supervisor" in words and str(home).encode() in words:
            found.append(int(folder.name))
    return found


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return True
    return state == "Z"  # ended; nobody has asked for its exit code yet


def nodes(stack: Stack) -> dict[str, dict]:
    """Return what metadata says of the nodes; nothing while it does not answer."""
    try:
        return {node["node"]: node for node in stack.rest("nodes")}
    except OSError:
        return {}


def test_a_killed_agent_comes_back_at_the_same_addresses(stack):
    before = nodes(stack)["node-0"]
    os.kill(stack.agent_pid(0), signal.SIGKILL)
    until(lambda: nodes(stack)["node-0"]["incarnation"] > before["incarnation"], "a new agent")
    after = nodes(stack)["node-0"]

    assert after["live"]
    assert after["rpc_address"] == before["rpc_address"]
    assert after["endpoints"] == before["endpoints"]


def test_a_killed_metadata_service_comes_back_where_it_was(stack):
    pid = stack.metadata_pid()
    reported = nodes(stack)["node-0"]["reported_at"]
    os.kill(pid, signal.SIGKILL)
    until(lambda: stack.metadata_pid() not in (None, pid), "a new process")
    until(lambda: nodes(stack) and nodes(stack)["node-0"]["reported_at"] > reported, "a report")

    assert {node["live"] for node in nodes(stack).values()} == {True}


def test_an_agent_whose_arena_was_deleted_starts_empty(stack):
    """F41 and the loss of a node's memory: the folder goes while the agent is dead."""
    marker = stack.arena(1) / "marker"
    marker.touch()
    os.kill(stack.agent_pid(1), signal.SIGSTOP)
    pid = stack.agent_pid(1)
    lost = stack.arena(1).with_name("lost")
    stack.arena(1).rename(lost)
    os.kill(pid, signal.SIGKILL)
    until(lambda: stack.agent_pid(1) not in (None, pid), "a new agent")
    sessions = stack.arena(1) / "sessions"
    until(sessions.is_dir, "a new arena")

    assert stack.arena(1).stat().st_mode & 0o777 == 0o700
    assert not marker.exists()


def test_a_killed_supervisor_leaves_no_orphan_and_a_new_one_takes_over(stack):
    children = [stack.metadata_pid(), stack.agent_pid(0), stack.agent_pid(1)]
    os.kill(stack.info["pid"], signal.SIGKILL)
    until(lambda: all(gone(pid) for pid in children), "the children to end")

    assert (stack.home / "stack.json").exists()
    assert stack.holdfast("status", check=False).returncode == 1
    again = json.loads(stack.holdfast("up", "--nodes", "2", "--json").stdout)
    assert again["started"]
    assert again["pid"] != stack.info["pid"]
    assert again["address"] == stack.info["address"]
    stack.reread()


def test_up_again_is_success_and_starts_nothing(stack):
    again = json.loads(stack.holdfast("up", "--nodes", "2", "--json").stdout)

    assert not again.pop("started")
    assert again.pop("home") == str(stack.home)
    assert again.pop("store_error") == ""
    assert again == stack.info
    assert supervisors(stack.home) == [stack.info["pid"]]


def test_status_names_the_nodes_and_ls_says_that_there_is_nothing(stack):
    status = json.loads(stack.holdfast("status", "--json").stdout)

    assert [node["node"] for node in status["nodes"]] == ["node-0", "node-1"]
    assert all(node["live"] for node in status["nodes"])
    assert json.loads(stack.holdfast("ls", "--json").stdout) == []
    assert "no job gpt" in stack.holdfast("show", "gpt", check=False).stderr


def test_doctor_finds_the_services_well(stack):
    report = json.loads(stack.holdfast("doctor", "--json").stdout)
    levels = {check["name"]: check["level"] for check in report}

    assert levels["metadata"] == levels["agent"] == levels["clock"] == "ok"
    assert levels["catalogue"] == "ok"


def test_doctor_says_that_the_database_takes_no_writes(stack):
    """A backup that holds its lock, a full disk: reads go well, and nothing is committed."""
    with contextlib.closing(sqlite3.connect(stack.home / "metadata.db")) as other:
        other.execute("BEGIN IMMEDIATE")

        def said():
            done = stack.holdfast("doctor", "--json", check=False)
            report = {check["name"]: check["level"] for check in json.loads(done.stdout)}
            return done.returncode, report["metadata"], report["catalogue"]

        until(lambda: said() == (1, "ok", "fail"), "doctor says so")


def test_down_ends_all_and_removes_arenas_unless_they_are_kept(own_stack):
    stack = own_stack
    pids = [stack.info["pid"], stack.metadata_pid(), stack.agent_pid(0), stack.agent_pid(1)]
    pids += processes("holdfast_services.persistence", str(stack.home))
    stack.holdfast("down", "--keep")

    log = stack.log()
    assert all(gone(pid) for pid in pids)
    assert "stopping: asked to" in log
    assert "killing it" not in log, "each service ends by itself"
    assert not (stack.home / "stack.json").exists()
    assert stack.arena(0).is_dir()
    stack.holdfast("down")
    assert not stack.arena(0).parent.exists()
    assert stack.holdfast("down").returncode == 0


def test_down_keeps_what_is_durable_and_down_all_does_not(own_stack):
    """F87: memory is thrown away by ``down``, durable checkpoints only by who says so twice."""
    stack = own_stack
    assert stack.info["store"] == f"file://{stack.home}/store"
    kept = stack.home / "store" / "job" / "object"
    kept.parent.mkdir()
    kept.write_bytes(b"x" * 8192)
    (stack.arena(0).parent / "ballast").write_bytes(b"x" * 8192)
    first = json.loads(stack.holdfast("down", "--json").stdout)

    assert not stack.arena(0).parent.exists()
    assert kept.exists()
    assert first["store"] == stack.info["store"]
    assert first["freed_bytes"] >= 8192
    assert not first["catalogue_lost"]
    assert (stack.home / "metadata.db").exists()
    stack.holdfast("up")
    refused = stack.holdfast("down", "--all", check=False)
    assert refused.returncode == 1
    assert "say --yes" in refused.stderr
    assert stack.holdfast("status").returncode == 0
    gone_too = json.loads(stack.holdfast("down", "--all", "--yes", "--json").stdout)
    assert gone_too["store_freed_bytes"] >= 8192
    assert not (stack.home / "store").exists()
    assert not (stack.home / "metadata.db").exists()
    stack.holdfast("up")
    assert (stack.home / "store").is_dir()


@pytest.mark.parametrize(("answer", "code"), [("no", 1), ("yes", 0)])
def test_down_all_asks_on_a_terminal(home, answer, code):
    (home / "store").mkdir()
    ours, theirs = os.openpty()
    os.write(ours, f"{answer}\n".encode())
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.cli.main", "down", "--all", "--dir", str(home)],
        env=environment(), stdin=theirs, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    os.close(ours)
    os.close(theirs)

    assert "the durable checkpoints go too" in done.stderr
    assert done.returncode == code
    assert (home / "store").exists() == (code == 1)


def test_another_store_than_the_running_one_is_not_what_was_asked_for(stack, tmp_path):
    said = stack.holdfast("up", "--store", str(tmp_path)).stdout

    assert f"store      file://{stack.home}/store" in said
    assert f"not store file://{tmp_path} as asked" in said


def test_up_and_status_say_that_the_store_does_not_work(home):
    """P4: the stack starts all the same; people hear what is wrong before a job waits for it."""
    url = f"s3://bucket?endpoint=http://127.0.0.1:{free_port()}"
    up = cli("up", "--dir", str(home), "--store", url)
    status = cli("status", "--dir", str(home))

    assert (up.returncode, status.returncode) == (0, 0)
    assert "fails: " in up.stdout
    assert "fails: " in status.stdout


def test_a_killed_persistence_worker_comes_back_and_status_says_how_it_is(stack):
    """G10: the drain goes on after SIGKILL; nobody but ``status`` notices."""
    until(lambda: drain(stack)["worker_ready"], "a worker that claims")
    pid = stack.pid("holdfast_services.persistence")
    os.kill(pid, signal.SIGKILL)
    until(lambda: stack.pid("holdfast_services.persistence") not in (None, pid), "a new process")
    until(lambda: drain(stack)["worker_ready"], "a worker that claims again")

    assert "worker     ready; queue: " in stack.holdfast("status").stdout
    assert all(node["live"] for node in nodes(stack).values())


def drain(stack: Stack) -> dict:
    """Return what ``status`` says of the drain."""
    return json.loads(stack.holdfast("status", "--json").stdout)["drain"]


def test_a_store_that_is_away_keeps_no_stack_from_starting(home, tmp_path):
    """P4: what was chosen is remembered; its volume is not mounted when the stack starts again."""
    volume = tmp_path / "volume"
    volume.mkdir()
    first = json.loads(cli("up", "--dir", str(home), "--store", str(volume), "--json").stdout)
    cli("down", "--dir", str(home))
    volume.rmdir()
    again = json.loads(cli("up", "--dir", str(home), "--json").stdout)

    assert first["store"] == again["store"] == f"file://{volume}"
    assert not (home / "store").exists()
    assert not volume.exists()
    refused = cli("up", "--dir", str(tmp_path / "x"), "--store", str(volume))
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    assert "make it, or mount its volume" in refused.stderr


def test_two_ups_at_once_make_one_stack(home):
    answers = together(2, "-m", "holdfast.cli.main", "up", "--json", "--dir", str(home))
    stacks = [json.loads(answer) for answer in answers]

    assert sorted(stack["started"] for stack in stacks) == [False, True]
    assert len({stack["pid"] for stack in stacks}) == 1
    assert supervisors(home) == [stacks[0]["pid"]]


def test_four_ranks_at_once_start_one_stack_and_find_the_same_agent(home):
    answers = together(4, "-c", ASK, HOLDFAST_HOME=str(home))

    assert set(answers) == {f"{home / 'node-0.sock'}\n"}
    assert len(supervisors(home)) == 1


def test_a_supervisor_that_runs_refuses_another_one(stack):
    command = [sys.executable, "-m", "holdfast_services.supervisor", "--dir", str(stack.home)]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=60, check=False
    )

    assert done.returncode == 3
    assert f"process {stack.info['pid']}" in done.stderr


def test_a_port_in_use_is_one_line_that_names_it(stack, home):
    port = stack.info["address"].rpartition(":")[2]
    done = cli("up", "--dir", str(home), "--port", port)

    assert done.returncode == 1
    assert done.stderr.startswith(f"holdfast: port {port} is in use")
    assert done.stderr.count("\n") == 1


def test_an_idle_stack_ends_itself_once_all_is_drained(home):
    """What is due and not in the store yet exists in this stack's memory only."""
    queue = open_queue(f"sqlite:///{home / 'queue.db'}", lease_s=100.0)
    queue.offer(["shard/x"])
    (claim,) = queue.claim("a worker that takes its time", count_max=1, wait_s=0)
    command = [sys.executable, "-m", "holdfast_services.supervisor", "--dir", str(home)]
    subprocess.run(
        [*command, "--detach", "--idle-exit", "0.3"], env=environment(), timeout=100, check=True
    )
    idle_until_s = time.monotonic() + 1.5
    while time.monotonic() < idle_until_s:
        assert len(supervisors(home)) == 1
    queue.acknowledge(claim)
    queue.close()
    until(lambda: not supervisors(home), "the supervisor to end")

    assert "stopping: no trainer for 0.3 s" in (home / "log").read_text()
    assert not (home / "stack.json").exists()
