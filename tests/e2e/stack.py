"""A real embedded stack for tests, and ranks to train on it: processes, sockets, tmpfs.

Nothing here imports torch; a rank is a process that the nursery forks, running ``trainer.py``.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from tests.servers.nursery import NURSERY, QUICK, Child
from tests.servers.processes import free_port
from tests.servers.services import SERVICES

from holdfast import embedded
from holdfast.cli.arguments import parse
from holdfast.embedded import StackRequest, ensure_stack, stop_stack
from holdfast.errors import NotFoundError

ROOT = Path(__file__).resolve().parents[2]
TRAINER = Path(__file__).with_name("trainer.py")
PLAIN = f"{ROOT / 'sdk'}:{ROOT / 'services'}"
"""``PYTHONPATH`` for processes that have torch as users have it."""
READY_S_MAX = 60.0
END_S_MAX = 30.0


def environment(**extra: str) -> dict[str, str]:
    """Return a clean environment that finds both packages, and torch at a third of its price."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HOLDFAST_")}
    return {**clean, "PYTHONPATH": f"{QUICK}:{PLAIN}", "OMP_NUM_THREADS": "1", **extra}


def until(condition: Callable[[], Any], what: str, timeout_s: float = READY_S_MAX) -> Any:
    """Return the first true value of ``condition``; fail with ``what`` after the deadline."""
    deadline = time.monotonic() + timeout_s
    while (began := time.monotonic()) < deadline:
        value = condition()
        if value:
            return value
        time.sleep(max(0.05, 4 * (time.monotonic() - began)))  # who is tested needs the machine
    raise AssertionError(f"not within {timeout_s:.0f} s: {what}")


def processes(*words: str) -> list[int]:
    """Return the pids of all processes with all ``words`` in command line or environment."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                text = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
                if all(word.encode() in text for word in words):
                    found.append(int(folder.name))
    return sorted(found)


class Stack:
    """``holdfast up`` in a folder of its own, its services forked, or started from nothing."""

    def __init__(
        self, home: Path, nodes: int, *options: str, forked: bool = True, **settings: str
    ) -> None:
        self.home = home
        self._settings = settings
        self._logs = itertools.count()
        self._started: list[Trainer] = []
        asked = parse(["up", "--nodes", str(nodes), *options])
        request = StackRequest(nodes_count=nodes, scheduler=asked.scheduler, gpus=asked.gpus)
        # In this process: another one would cost more than what it does; test_stack has one.
        with (
            mock.patch.object(embedded, "_run_supervisor", SERVICES.supervise)
            if forked
            else contextlib.nullcontext()
        ):
            ensure_stack(home, request, environ=self._environment())
        self.reread()

    def reread(self) -> None:
        """Learn where everything is, after the stack was started again."""
        self.info = json.loads((self.home / "stack.json").read_text())

    def _environment(self) -> dict[str, str]:
        return environment(HOLDFAST_HOME=str(self.home), **self._settings)

    def holdfast(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run the command line against this stack."""
        done = subprocess.run(
            [sys.executable, "-m", "holdfast.cli.main", *arguments], env=self._environment(),
            capture_output=True, text=True, timeout=READY_S_MAX, check=False,
        )  # fmt: skip
        assert not check or done.returncode == 0, done.stdout + done.stderr + self.log()
        return done

    def node(self, index: int) -> Mapping[str, Any]:
        """Return name, agent socket and arena of a node."""
        node: Mapping[str, Any] = self.info["nodes"][index]
        return node

    def arena(self, index: int) -> Path:
        """Return a node's arena folder."""
        return Path(self.node(index)["arena"])

    def rest(self, path: str) -> Any:
        """Return the JSON at ``/api/v1/<path>`` of the metadata service."""
        return self._asked(self.info["rest_url"], path)

    def scheduler(self, path: str) -> Any:
        """Return the JSON at ``/api/v1/<path>`` of the scheduler."""
        return self._asked(self.info["scheduler_url"], path)

    def _asked(self, url: str, path: str) -> Any:
        request = urllib.request.Request(
            f"{url.rstrip('/')}/api/v1/{path}", headers={"Accept": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    def pid(self, *words: str) -> int | None:
        """Return the pid of the service of this stack that has all ``words`` about it."""
        found = processes("holdfast_services", str(self.home), *words)
        return found[0] if found else None

    def agent_pid(self, index: int) -> int | None:
        """Return the pid of a node's agent, None while it is down."""
        return self.pid("holdfast_services.agent", f"HOLDFAST_NODE={self.node(index)['name']}")

    def metadata_pid(self) -> int | None:
        """Return the pid of the metadata service, None while it is down."""
        return self.pid("holdfast_services.metadata")

    def log(self) -> str:
        """Return the end of the common log."""
        path = self.home / "log"
        return path.read_text(errors="replace")[-6000:] if path.exists() else ""

    def ranks(
        self,
        *arguments: str,
        world_size: int = 1,
        nodes: Sequence[int] = (0,),
        script: Path = TRAINER,
        **extra: str,
    ) -> Ranks:
        """Start one rank per entry, rank r on node ``nodes[r % len(nodes)]``."""
        port = free_port()
        local = max(1, -(-world_size // len(nodes)))
        started = []
        for rank in range(world_size):
            env = environment(
                HOLDFAST_AGENT=self.node(nodes[rank % len(nodes)])["agent"],
                **{
                    "HOLDFAST_LAUNCH": "test",
                    "RANK": str(rank),
                    "WORLD_SIZE": str(world_size),
                    "LOCAL_WORLD_SIZE": str(local),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    **extra,
                },
            )
            log = self.home / f"rank-{next(self._logs)}.log"
            process = NURSERY.start(script, *arguments, env=env, log=log)
            started.append(Trainer(process, log))
        self._started += started
        return Ranks(started)

    def settle(self) -> None:
        """Kill the ranks that still run, and wait until every service answers."""
        ranks = Ranks(self._started)
        ranks.kill()
        ranks.wait()
        self._started.clear()
        for index in range(len(self.info["nodes"])):  # an agent that was killed left some to nobody
            for session in (self.arena(index) / "sessions").iterdir():
                session.unlink(missing_ok=True)
        until(self._answers, "all services of a stack that tests share")

    def _answers(self) -> bool:
        """Tell whether metadata and all agents are there; one that was killed refuses."""
        try:
            for node in self.info["nodes"]:
                with socket.socket(socket.AF_UNIX) as probe:
                    probe.connect(node["agent"])
            return all(node["live"] for node in self.rest("nodes"))
        except OSError:
            return False

    def close(self) -> None:
        """Stop everything and remove what it held: ``down``, without a word to the catalogue."""
        with contextlib.suppress(NotFoundError):
            stop_stack(self.home)
        shutil.rmtree(self.arena(0).parent, ignore_errors=True)


class Trainer:
    """One rank's process and what it has printed so far."""

    def __init__(self, process: Child, log: Path) -> None:
        self.process = process
        self._log = log

    @property
    def output(self) -> str:
        """Everything printed so far, errors included."""
        return self._log.read_text(errors="replace")

    def has_done(self, step: int) -> bool:
        """Tell whether it has printed the end of this step."""
        return re.search(rf"^step {step} ", self.output, re.MULTILINE) is not None


class Ranks:
    """The processes of one launch."""

    def __init__(self, trainers: Sequence[Trainer]) -> None:
        self.trainers = trainers

    def wait(self, timeout_s: float = 90.0) -> list[int]:
        """Return the exit code of each rank; kill what is left at the deadline."""
        deadline = time.monotonic() + timeout_s
        for trainer in self.trainers:
            try:
                trainer.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                trainer.process.kill()
        return [trainer.process.wait(END_S_MAX) for trainer in self.trainers]

    @property
    def outputs(self) -> list[str]:
        """What each rank has printed so far."""
        return [trainer.output for trainer in self.trainers]

    def succeed(self, timeout_s: float = 90.0) -> list[str]:
        """Wait; every rank must have ended well. Returns what each printed."""
        codes = self.wait(timeout_s)
        assert set(codes) == {0}, f"exit codes {codes}\n" + "\n---\n".join(self.outputs)
        return self.outputs

    def until_step(self, step: int) -> None:
        """Wait until every rank has done ``step``."""

        def done() -> bool:
            ended = [t for t in self.trainers if t.process.poll() is not None]
            assert not ended, "\n---\n".join(self.outputs)
            return all(trainer.has_done(step) for trainer in self.trainers)

        until(done, f"step {step} on every rank")

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send every rank that still runs a signal."""
        for trainer in self.trainers:
            trainer.process.send_signal(number)


@contextlib.contextmanager
def running_stack(
    nodes: int, *options: str, forked: bool = True, **settings: str
) -> Iterator[Stack]:
    """Run a stack in a short temporary folder; stop it and remove the folder after.

    ``options`` are more words for ``holdfast up``; its services are ``forked`` or start from
    nothing.
    """
    home = Path(tempfile.mkdtemp(prefix="hf-"))
    stack: Stack | None = None
    try:
        stack = Stack(home, nodes, *options, forked=forked, **settings)
        yield stack
    finally:
        if stack is not None:
            stack.close()
        shutil.rmtree(home, ignore_errors=True)


class SharedStack:
    """A stack for the tests of a module, one after the other.

    Each finds all services there; one that leaves them otherwise fails, and the next gets another
    stack.
    """

    def __init__(self, nodes: int, *, forked: bool = True, **settings: str) -> None:
        self._make = functools.partial(running_stack, nodes, forked=forked, **settings)
        self._stacks = contextlib.ExitStack()
        self._stack: Stack | None = None

    @contextlib.contextmanager
    def lent(self) -> Iterator[Stack]:
        """Lend the stack to a test; it is started for the first one."""
        stack, self._stack = self._stack or self._stacks.enter_context(self._make()), None
        yield stack
        stack.settle()
        self._stack = stack

    def close(self) -> None:
        """Stop it."""
        self._stacks.close()
