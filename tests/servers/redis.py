"""A Redis server of our own: a process in a folder, on a free port, keeping nothing on disk."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.servers.packages import install
from tests.servers.processes import free_port

START_S_MAX = 30.0
CLOCK = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile long *ahead;

__attribute__((constructor)) static void begin(void) {
    int fd = open(getenv("CLOCK_FILE"), O_RDONLY);
    ahead = mmap(0, sizeof *ahead, PROT_READ, MAP_SHARED, fd, 0);
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec real;
    (void)zone;
    syscall(SYS_clock_gettime, CLOCK_REALTIME, &real);
    now->tv_sec = real.tv_sec + *ahead;
    now->tv_usec = real.tv_nsec / 1000;
    return 0;
}
"""


class RedisServer:
    """``start`` and ``kill`` may be repeated: the port stays, the contents do not.

    ``clock``: its wall clock can be set, by ``set_clock``.
    """

    def __init__(self, folder: Path, *, clock: bool = False) -> None:
        self._folder = folder
        self._clock = folder / "clock"
        self._environ = {**os.environ, **(self._shim() if clock else {})}
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()

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
                stdout=log, stderr=subprocess.STDOUT, env=self._environ,
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

    def set_clock(self, ahead_s: int) -> None:
        """Have its clock be ``ahead_s`` ahead of ours from now on."""
        with self._clock.open("r+b" if self._clock.exists() else "wb") as file:  # never shorter
            file.write(ahead_s.to_bytes(8, sys.byteorder, signed=True))

    def _shim(self) -> dict[str, str]:
        """Return the environment under which the wall clock is off by what a file says."""
        if shutil.which("gcc") is None:
            install("gcc", "libc6-dev")
        library = self._folder / "clock.so"
        command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
        subprocess.run(command, input=CLOCK, text=True, check=True)
        self.set_clock(0)
        return {"LD_PRELOAD": str(library), "CLOCK_FILE": str(self._clock)}

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
def running_redis(*, clock: bool = False) -> Iterator[RedisServer]:
    """Run a server; it and its folder are gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="hfredis"))
    server = RedisServer(folder, clock=clock)
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
