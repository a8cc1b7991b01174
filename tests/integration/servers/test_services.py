"""A service that the nursery forks is the process that it would be without, only sooner."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.e2e.stack import processes, running_stack, until
from tests.integration.metadata import process
from tests.servers.services import PREFIX, SERVICES


def fact(pid: int, name: str) -> list[bytes]:
    return Path(f"/proc/{pid}/{name}").read_bytes().rstrip(b"\0").split(b"\0")


def status(pid: int) -> list[str]:
    """Return what follows the name in a process's ``stat``: state, parent, group, session."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def test_a_forked_service_has_the_environment_and_the_end_of_one_from_nothing(tmp_path):
    made, folders = {}, {process.start: Path.cwd(), process.fork: tmp_path}
    for make in (process.start, process.fork):
        running = make(tmp_path)
        pid = running.process.pid
        made[make] = fact(pid, "cmdline"), sorted(fact(pid, "environ")), status(pid)[2:4]
        assert folders[make] == Path(f"/proc/{pid}/cwd").resolve()
        made[make] += (running.http.get("/healthz").json(), running.stop())
        (tmp_path / "ready.json").unlink()

    assert made[process.start] == made[process.fork]
    assert 0 == made[process.fork][-1]


def test_what_a_service_refuses_is_in_its_exit_code_and_log(tmp_path):
    env, log = {**process.environment(tmp_path), "HOLDFAST_LISTEN": "nowhere"}, tmp_path / "log"

    refused = SERVICES.start(f"{PREFIX}metadata", env=env, log=log, folder=tmp_path)

    assert 1 == refused.wait(process.START_S_MAX)
    assert "address 'nowhere' is not host:port" in log.read_text()


@pytest.fixture
def stack():
    with running_stack(1) as running:
        yield running


def test_a_supervisor_has_its_forked_services_as_children_and_takes_them_along(stack):
    """Each leads a session; one that is killed is reaped and comes again; none outlives it."""
    supervisor, metadata = stack.pid(f"{PREFIX}supervisor"), stack.metadata_pid()
    for pid in (metadata, stack.agent_pid(0), stack.pid(f"{PREFIX}persistence")):
        assert [str(supervisor), str(pid), str(pid)] == status(pid)[1:4]

    os.kill(metadata, signal.SIGKILL)
    until(lambda: stack.metadata_pid() not in (None, metadata), "another one")
    assert not Path(f"/proc/{metadata}").exists()
    assert f"pid {stack.metadata_pid()}" in stack.log()

    os.kill(supervisor, signal.SIGKILL)
    until(lambda: not processes(str(stack.home)), "all have ended")
