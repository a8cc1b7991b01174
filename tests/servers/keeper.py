"""Keeps the servers of a test session, each from when it is first asked for until the session ends.

A process of its own, so that all workers of a session share what it keeps. Its input is a pipe
from pytest: the kernel closes it however pytest ends, Ctrl-C and SIGKILL included, and then the
servers and their folders go. ``python -m tests.servers.keeper SOCKET``; a client writes a name and
reads one line of JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.servers.ceph import running_ceph
from tests.servers.moto import running_moto
from tests.servers.postgres import running_postgres

ROOT = Path(__file__).parents[2]
ANSWER_S_MAX = 700.0  # a package may have to be installed first
END_S_MAX = 60.0

Running = Callable[[], AbstractContextManager[Any]]
SERVERS: dict[str, Running] = {
    "ceph": running_ceph,
    "moto": running_moto,
    "postgres": running_postgres,
}


class Keeper:
    """The keeper's process, as pytest holds it; started when somebody needs it."""

    def __init__(self) -> None:
        self._path = Path()
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> Path:
        """Return the socket of the keeper; start it, if it does not run."""
        if self._process is None:
            self._path = Path(tempfile.mkdtemp(prefix="hfkeeper")) / "socket"
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.servers.keeper", str(self._path)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                start_new_session=True,  # Ctrl-C is for pytest
            )  # fmt: skip
            assert self._process.stdout is not None
            assert self._process.stdout.readline(), "the keeper of servers did not start"
        return self._path

    def end(self) -> None:
        """End all servers; ending twice is once."""
        if self._process is not None and self._process.poll() is None:
            self._process.communicate(timeout=END_S_MAX)


def ask(path: Path, name: str) -> dict[str, Any]:
    """Return what one needs to use server ``name``; it is started, if nobody asked before."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_S_MAX)
        connection.connect(str(path))
        with connection.makefile("rw", encoding="utf-8") as stream:
            stream.write(f"{name}\n")
            stream.flush()
            answer: dict[str, Any] = json.loads(stream.readline())
    assert "error" not in answer, answer["error"]
    return answer


class _Kept(threading.Thread):
    """One server. The thread lives as long: the kernel ends children with who started them."""

    def __init__(self, name: str, end: threading.Event) -> None:
        super().__init__(name=name)
        self._end = end
        self._ready = threading.Event()
        self._answer: dict[str, Any] = {}

    def run(self) -> None:
        """Start the server, keep it until the end."""
        try:
            with SERVERS[self.name]() as server:
                self._answer = asdict(server)
                self._ready.set()
                self._end.wait()
        except Exception:
            self._answer = {"error": traceback.format_exc()}
            self._ready.set()

    def answer(self) -> dict[str, Any]:
        """Return what to tell clients, once the server answers."""
        self._ready.wait(ANSWER_S_MAX)
        return self._answer


class _Listener(socketserver.ThreadingUnixStreamServer):
    """Answers clients; starts what they name."""

    daemon_threads = True

    def __init__(self, path: str) -> None:
        super().__init__(path, _Handler)
        self.end = threading.Event()
        self._kept: dict[str, _Kept] = {}
        self._lock = threading.Lock()

    def keep(self, name: str) -> dict[str, Any]:
        """Return what to tell about server ``name``."""
        with self._lock:
            if name not in self._kept:
                self._kept[name] = _Kept(name, self.end)
                self._kept[name].start()
        return self._kept[name].answer()

    def end_all(self) -> None:
        """Return when all servers are gone."""
        self.end.set()
        for kept in self._kept.values():
            kept.join(END_S_MAX)


class _Handler(socketserver.StreamRequestHandler):
    server: _Listener

    def handle(self) -> None:
        """Answer one question."""
        answer = self.server.keep(self.rfile.readline().decode().strip())
        self.wfile.write(json.dumps(answer, default=str).encode() + b"\n")


def main() -> None:
    """Serve until standard input ends."""
    listener = _Listener(sys.argv[1])
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    print("ready", flush=True)
    sys.stdin.read()
    listener.end_all()
    shutil.rmtree(Path(sys.argv[1]).parent)


if __name__ == "__main__":
    main()
