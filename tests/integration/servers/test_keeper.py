"""The servers of a session are shared by its workers, and go with it however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.integration.agent.harness import until
from tests.servers import keeper
from tests.servers.postgres import PostgresServer

# Stands for pytest: has a keeper, asks for a server, says where that lies, and goes on.
SESSION = """
import sys
from tests.servers import keeper
path = keeper.Keeper().start()
print(keeper.ask(path, "postgres")["folder"], flush=True)
sys.stdin.read()
"""


@pytest.fixture
def kept():
    made = keeper.Keeper()
    yield made
    made.end()


def test_all_who_ask_at_once_get_one_server_and_it_is_gone_at_the_end(kept):
    path = kept.start()
    answers: list[dict] = []
    asking = [
        threading.Thread(target=lambda: answers.append(keeper.ask(path, "postgres")))
        for _ in range(3)
    ]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join(60)
    folder = Path(answers[0]["folder"])
    server = PostgresServer(Path(answers[0]["binaries"]), folder)
    server.drop(server.create())
    kept.end()

    assert answers == [answers[0]] * 3
    assert not folder.exists()
    assert not path.parent.exists()


def test_a_session_that_is_killed_leaves_no_server():
    session = subprocess.Popen(
        [sys.executable, "-c", SESSION], stdin=-1, stdout=-1, text=True, cwd=keeper.ROOT
    )
    folder = Path(session.stdout.readline().strip())
    assert (folder / "data" / "postmaster.pid").exists()
    os.kill(session.pid, signal.SIGKILL)
    session.communicate(timeout=20)

    until(lambda: not folder.exists(), "the server's folder is gone")


def test_a_server_that_does_not_start_says_why(kept):
    with pytest.raises(AssertionError, match="KeyError"):
        keeper.ask(kept.start(), "nonsense")
