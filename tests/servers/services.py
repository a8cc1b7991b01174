"""Forks services: imports them once, so that tests need not wait two seconds for each.

``python -m tests.servers.services`` is a nursery as that of ranks is, for ``python -m`` of a
service. What it forks is a process of its own, with the environment, folder, standard streams and
exit code of one that was started from nothing; ``/proc`` shows its command line and environment.
A supervisor that it forks has its services forked, too, as children that die with it. The tests of
each service's process, ``test_stack``, ``test_demo`` and ``test_compose`` start them from nothing.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests.servers.nursery import Child, Nursery, attend, redirect

PREFIX = "holdfast_services."
FORKED = ("metadata", "agent", "persistence", "scheduler", "supervisor")
# What they import once they run.
LATE = (
    "alembic.command",
    "holdfast.objectstore.directory",
    "holdfast_services.kit.queue.sqlite",
    "pydantic.v1",
    "uvicorn.lifespan.off",
    "uvicorn.protocols.http.auto",
)
ROOM = "x" * (1 << 15)
"""In the nursery's environment: room for what a service has more in its own."""
ORDER_BYTES_MAX = 1 << 18
BEGIN_S_MAX = 30.0
POLL_S = 0.001
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36

prctl = ctypes.CDLL(None, use_errno=True).prctl


class Services:
    """The nursery's process, as tests hold it."""

    def __init__(self) -> None:
        self._nursery = Nursery("tests.servers.services", "x" * 1024, HOLDFAST_TEST_ROOM=ROOM)

    def start(self, *words: str, env: Mapping[str, str], log: Path, folder: Path) -> Child:
        """Run ``python -m`` with ``words`` in a process of its own, which writes to ``log``."""
        log.touch()
        command = {"words": words, "env": dict(env), "log": str(log), "folder": str(folder)}
        return Child(self._nursery, self._nursery.ask(**command))

    def supervise(
        self,
        command: Sequence[str],
        home: Path,
        *,
        also_ok: int = 0,
        environ: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Do what ``holdfast.embedded`` does with this command."""
        said = home / "supervisor.out"
        env = dict(os.environ if environ is None else environ)
        child = self.start(*command[2:], env=env, log=said, folder=Path.cwd())
        code = child.wait(BEGIN_S_MAX * 4)
        assert code in (0, also_ok), said.read_text()
        return subprocess.CompletedProcess(command, code, "", "")


SERVICES = Services()
"""One for all tests of a process; it begins with the first service and ends with that process."""


def live(words: list[str], env: dict[str, str], log: str, folder: str) -> NoReturn:
    """Be a fresh process that runs ``python -m`` with ``words``."""
    redirect(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    os.chdir(folder)
    if words[0] == f"{PREFIX}supervisor":
        with_forked_services()
    be(words, env)


def be(words: list[str], env: dict[str, str]) -> NoReturn:
    """Run a module of a service, which ends the process."""
    os.environ.clear()  # before the memory that held it is written over
    os.environ.update(env)
    show([sys.executable, "-m", *words], [f"{key}={text}" for key, text in env.items()])
    paths = env.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [str(Path.cwd()), *paths, *(path for path in sys.path[1:] if path not in paths)]
    sys.argv[1:] = words[1:]
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    raise AssertionError("a service ends its process")


def show(words: list[str], variables: list[str]) -> None:
    """Have ``/proc`` tell these, by writing over those that this process was started with."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    places = [int(field) for field in fields[45:49]]
    for begin, end, texts in ((*places[:2], words), (*places[2:], variables)):
        told = b"".join(os.fsencode(text) + b"\0" for text in texts)
        assert len(told) < end - begin, "no room in the nursery's own"
        ctypes.memset(begin, 0, end - begin)
        ctypes.memmove(begin, told, len(told))


def with_forked_services() -> None:
    """Have the supervisor that this process will be fork its services.

    It may not do so itself: it has threads, and gRPC. A copy of it that is made before does.
    """
    from holdfast_services.supervisor import detach

    detached = detach.detached

    def with_copy(run: Callable[[detach.Tell], int], *, output: Path) -> str:
        def within(tell: detach.Tell) -> int:
            asyncio.create_subprocess_exec = functools.partial(  # type: ignore[assignment]
                forked, copied(), asyncio.create_subprocess_exec
            )
            return run(tell)

        return detached(within, output=output)

    detach.detached = with_copy


def copied() -> socket.socket:
    """Return how to tell a copy of this process to fork; it ends when that is closed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if os.fork() == 0:
        orders = os.dup2(theirs.fileno(), 3)
        os.closerange(4, 1024)  # the supervisor's news end when it closes its own
        theirs.detach()
        ours.detach()
        serve(socket.socket(fileno=orders), parent)
    theirs.close()
    ours.settimeout(BEGIN_S_MAX)
    return ours


def serve(orders: socket.socket, supervisor: int) -> NoReturn:
    """Fork a service for each order, in between somebody who ends: the supervisor inherits it."""
    while True:
        order, streams, _, _ = socket.recv_fds(orders, ORDER_BYTES_MAX, 1)
        if not order:
            os._exit(0)
        between = os.fork()
        if between == 0:
            if os.fork() == 0:
                begin(orders, supervisor, streams[0], json.loads(order))
            os._exit(0)
        os.close(streams[0])
        os.waitpid(between, 0)


def begin(orders: socket.socket, supervisor: int, stream: int, order: dict[str, Any]) -> NoReturn:
    """Be a service, once this is a child of the supervisor."""
    deadline_s = time.monotonic() + BEGIN_S_MAX
    while os.getppid() != supervisor:
        if time.monotonic() > deadline_s:
            os._exit(1)
        time.sleep(POLL_S)
    die_with(supervisor)
    os.setsid()
    orders.send(str(os.getpid()).encode())
    orders.close()
    redirect(stream)
    be(order["words"], order["env"])


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


async def forked(
    orders: socket.socket, otherwise: Callable[..., Any], *command: str, **settings: Any
) -> Any:
    """Do what ``asyncio.create_subprocess_exec`` does for the supervisor."""
    words = command[2:]
    if words[0].removeprefix(PREFIX) not in FORKED:
        return await otherwise(*command, **settings)
    reading, writing = os.pipe()
    stdout = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stdout), os.fdopen(reading, "rb")
    )
    order = json.dumps({"words": words, "env": settings["env"]}).encode()
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    socket.send_fds(orders, [order], [writing])
    os.close(writing)
    pid = int(orders.recv(64))
    prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    return Forked(pid, stdout)


class Forked:
    """A child that was forked, as the supervisor's own are."""

    def __init__(self, pid: int, stdout: asyncio.StreamReader) -> None:
        self.pid, self.stdout = pid, stdout
        self.returncode: int | None = None
        self._end = asyncio.Event()
        end = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(end, self._ended, end)

    def _ended(self, end: int) -> None:
        asyncio.get_running_loop().remove_reader(end)
        os.close(end)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._end.set()

    async def wait(self) -> int | None:
        """Return how it ended."""
        await self._end.wait()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self.returncode is None:
            os.kill(self.pid, number)


if __name__ == "__main__":
    for name in (*(f"{PREFIX}{service}.main" for service in FORKED), *LATE):
        importlib.import_module(name)
    attend("words", live)
