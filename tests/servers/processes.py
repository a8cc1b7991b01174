"""Server processes that end with the tests, however these end."""

from __future__ import annotations

import contextlib
import secrets
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

END_S_MAX = 30.0
POLL_S = 0.02


PORTS = range(10_000, 24_000)
"""Below those that the kernel gives to whoever connects: one of these would be taken by the time
that its server, whose imports take seconds, listens on it."""


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        while True:
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", secrets.choice(PORTS)))
                return int(probe.getsockname()[1])


class Children:
    """Processes that were started, in order; the kernel kills them when this process ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, *command: str | Path) -> None:
        """Start one; what it says goes to ``<name>.out``."""
        with (self._folder / f"{name}.out").open("ab") as log:
            self._started.append(
                subprocess.Popen(
                    ["setpriv", "--pdeathsig", "KILL", *map(str, command)],
                    stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                )
            )  # fmt: skip

    def wait(self, what: str, answers: Callable[[], bool], *, start_s_max: float) -> None:
        """Return once ``answers``; fail with the logs if a process ends or it takes too long."""
        deadline_s = time.monotonic() + start_s_max
        while not answers():
            ended = any(child.poll() is not None for child in self._started)
            if ended or time.monotonic() > deadline_s:
                logs = "\n".join(p.read_text(errors="replace") for p in self._folder.glob("*.out"))
                raise AssertionError(f"{what} does not answer:\n{logs[-4000:]}")
            time.sleep(POLL_S)

    def end(self) -> None:
        """Kill them, the last first."""
        for child in reversed(self._started):
            child.kill()
            child.wait(END_S_MAX)
        self._started.clear()
