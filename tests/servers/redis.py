"""A Redis server of our own: a process in a folder, on a free port, keeping nothing on disk."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.servers.packages import install

START_S_MAX = 30.0


class RedisServer:
    """``start`` and ``kill`` may be repeated: the port stays, the contents do not."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])

    @property
    def url(self) -> str:
        """Where it is, as ``open_queue`` takes it."""
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start it, empty; return once it answers."""
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [_program(), "--port", str(self.port), "--bind", "127.0.0.1",
                 "--save", "", "--appendonly", "no", "--dir", str(self._folder)],
                stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        deadline_s = time.monotonic() + START_S_MAX
        while not self._answers():
            assert self._process.poll() is None, (self._folder / "log").read_text()
            assert time.monotonic() < deadline_s, "redis-server does not answer"
            time.sleep(0.01)

    def ask(self, command: str) -> bytes:
        """Return the beginning of its answer to an inline ``command``."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
            connection.sendall(command.encode() + b"\r\n")
            return connection.recv(4096)

    def kill(self) -> None:
        """End it without asking."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(START_S_MAX)
            self._process = None

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            return self.ask("PING") == b"+PONG\r\n"
        return False


@contextlib.contextmanager
def running_redis() -> Iterator[RedisServer]:
    """Run a server; it and its folder are gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="hfredis"))
    server = RedisServer(folder)
    try:
        server.start()
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


def _program() -> str:
    if shutil.which("redis-server") is None:
        install("redis-server")
    found = shutil.which("redis-server")
    if found is None:
        raise AssertionError("no Redis: apt-get install redis-server")
    return found
