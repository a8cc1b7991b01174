"""Finds this node's agent, and starts the embedded stack when there is none to find.

Knows the stack by its ``HOLDFAST_HOME/stack.json`` and by the lock its supervisor holds, and
starts it by spawning it: no service is imported here, nor grpc, nor torch.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast import locks
from holdfast.errors import (
    InvalidRequestError,
    NotFoundError,
    OutcomeUnknownError,
    UnavailableError,
)

IDLE_EXIT_S = 3600.0
START_S_MAX = 100.0
STOP_S_MAX = 15.0
POLL_S = 0.05

_SUPERVISOR = "holdfast_services.supervisor"
_EXIT_RUNNING = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StackNode:
    """One agent of an embedded stack: its socket and the folder of its arena."""

    name: str
    agent: Path
    arena: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A running embedded stack, as its ``stack.json`` describes it; a scheduler may be none."""

    home: Path
    pid: int
    address: str
    rest_url: str
    log: Path
    store: str
    nodes: tuple[StackNode, ...]
    scheduler_url: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackRequest:
    """What to start when nothing runs. Ports: 0 means any free one; ``idle_exit_s`` 0: never.

    ``store``: URL of the object store; empty means ``HOLDFAST_STORE``, else that of the last time,
    at first a folder in HOME. ``scheduler``: one runs, and an executor on each node, which offers
    ``gpus``; empty: all that there are.
    """

    nodes_count: int = 1
    port: int = 0
    rest_port: int = 0
    idle_exit_s: float = 0.0
    store: str = ""
    scheduler: bool = False
    gpus: str = ""

    def command(self, home: Path, *more: str) -> list[str]:
        """Return the command line of the supervisor."""
        return [
            *(sys.executable, "-m", _SUPERVISOR, "--dir", str(home)),
            *("--nodes", str(self.nodes_count), "--port", str(self.port)),
            *("--rest-port", str(self.rest_port), "--idle-exit", str(self.idle_exit_s)),
            *(("--store", self.store) if self.store else ()),
            *(("--scheduler",) if self.scheduler else ()),
            *(("--gpus", self.gpus) if self.gpus else ()),
            *more,
        ]


def agent_socket(environ: Mapping[str, str], *, world_size: int, local_world_size: int) -> Path:
    """Return the unix socket of this node's agent, after starting one if that is ours to do.

    In order: ``HOLDFAST_AGENT``; the only node of a stack that runs in ``HOLDFAST_HOME``; a stack
    started for the purpose, when no service is named and all ranks are on this machine. Such a
    stack ends itself after ``IDLE_EXIT_S`` without a trainer and with nothing to drain.

    Raises:
        InvalidRequestError: it must be said which agent, or the ``services`` extra is missing.
        UnavailableError: the stack did not start; the message says where its log is.
    """
    if named := environ.get("HOLDFAST_AGENT"):
        return Path(named)
    home = home_folder(environ)
    stack = running_stack(home)
    address = environ.get("HOLDFAST_ADDRESS")
    if address and (stack is None or stack.address != address):
        raise InvalidRequestError(
            f"HOLDFAST_ADDRESS names the metadata service {address}, but HOLDFAST_AGENT is not "
            f"set: "
            f"run an agent on this node and set HOLDFAST_AGENT to its socket"
        )
    if stack is None:
        if world_size != local_world_size:
            raise InvalidRequestError(
                f"the {world_size} ranks run on several machines and HOLDFAST_AGENT is not "
                f"set: run an "
                f"agent on every node and set HOLDFAST_AGENT to its socket"
            )
        stack, _ = ensure_stack(home, StackRequest(idle_exit_s=IDLE_EXIT_S))
    if len(stack.nodes) == 1:
        return stack.nodes[0].agent
    choices = ", ".join(f"{node.name} {node.agent}" for node in stack.nodes)
    raise InvalidRequestError(
        f"the stack has {len(stack.nodes)} nodes: set HOLDFAST_AGENT to one of them: {choices}",
        home=home,
    )


def home_folder(environ: Mapping[str, str]) -> Path:
    """Return ``HOLDFAST_HOME``, by default ``holdfast`` in the user's state folder; absolute."""
    if named := environ.get("HOLDFAST_HOME"):
        return Path(named).expanduser().absolute()
    state = environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "holdfast"


def running_stack(home: Path) -> Stack | None:
    """Return the stack that runs in ``home`` and is ready, or None.

    Believes the supervisor's lock, not its pid: a killed one leaves ``stack.json`` behind, and
    pids are used again.
    """
    pid = supervisor_pid(home)
    try:
        record = json.loads((home / "stack.json").read_text())
        nodes = tuple(
            StackNode(name=node["name"], agent=Path(node["agent"]), arena=Path(node["arena"]))
            for node in record["nodes"]
        )
        stack = Stack(
            home=home,
            pid=int(record["pid"]),
            address=str(record["address"]),
            rest_url=str(record["rest_url"]),
            log=Path(record["log"]),
            store=str(record["store"]),
            nodes=nodes,
            scheduler_url=str(record.get("scheduler_url") or ""),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return stack if pid is not None and stack.pid == pid else None


def supervisor_pid(home: Path) -> int | None:
    """Return the pid of the supervisor that holds ``home``, ready or not; None without one."""
    return locks.holder_of(home / "supervisor.lock")


def live_trainers(stack: Stack) -> int:
    """Return how many ranks hold the lock of their session file now."""
    files = (file for node in stack.nodes for file in (node.arena / "sessions").glob("*"))
    return sum(locks.holder_of(file) is not None for file in files)


def ensure_stack(
    home: Path, request: StackRequest, *, environ: Mapping[str, str] | None = None
) -> tuple[Stack, bool]:
    """Return the stack of ``home``, started as ``request`` says if none runs, and whether it was.

    Safe to call from many processes at once: one starts it, the others wait for it. Its services
    have ``environ``, by default that of this process.

    Raises:
        InvalidRequestError: the services are not installed.
        UnavailableError: it did not start.
    """
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    deadline_s = time.monotonic() + START_S_MAX
    started = False
    with _start_lock(home, deadline_s):
        while time.monotonic() < deadline_s:
            stack = running_stack(home)
            if stack is not None:
                return stack, started
            started = supervisor_pid(home) is None and _start(home, request, environ)
            if not started:
                time.sleep(POLL_S)  # one is just starting or just ending
    raise UnavailableError(
        f"the services on this machine did not start; their log is {home / 'log'}", home=home
    )


def require_services() -> None:
    """Raise InvalidRequestError unless the services are installed."""
    if importlib.util.find_spec("holdfast_services") is None:
        raise InvalidRequestError(
            "the services are not installed on this machine: pip install holdfast[services]"
        )


def stop_stack(home: Path) -> int:
    """Stop what runs in ``home`` and return its pid, once all of it has ended.

    Raises:
        NotFoundError: nothing runs there.
        OutcomeUnknownError: it was killed and still holds its lock.
    """
    pid = supervisor_pid(home)
    if pid is None:
        raise NotFoundError("no stack runs here", home=home)
    for number, wait_s in ((15, STOP_S_MAX), (9, POLL_S * 40)):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return pid
        deadline_s = time.monotonic() + wait_s
        while time.monotonic() < deadline_s:
            if supervisor_pid(home) != pid:
                return pid
            time.sleep(POLL_S)
    raise OutcomeUnknownError(
        "the supervisor of the stack does not end: end its process by hand, then repeat",
        home=home,
        pid=pid,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Erased:
    """What was erased. ``store`` is where durable checkpoints stay, empty if it was erased too.

    ``undrained_count``: shards and manifests that had not reached the store. ``catalogue_lost``:
    why the catalogue is gone as well, though it was to keep what is durable; empty if it did.
    """

    freed_bytes: int
    store: str
    store_freed_bytes: int
    undrained_count: int
    catalogue_lost: str


def erase_stack(home: Path, *, everything: bool = False) -> Erased:
    """Remove what a stopped stack keeps in memory; its catalogue keeps what is durable.

    Args:
        home: HOME of the stack.
        everything: Remove the catalogue and the store in HOME as well.
    """
    return Erased(**_asked(home, "--erase-all" if everything else "--erase"))


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainProgress:
    """How far the drain to the store is.

    ``items_count`` counts all that is in the queue, ``waiting_count`` what nobody does yet, and
    ``undrained_count`` shards and manifests, without scrubs and sweeps.
    """

    worker_ready: bool
    waiting_count: int
    items_count: int
    undrained_count: int


def drain(home: Path) -> DrainProgress:
    """Return how far the drain of the stack that runs in ``home`` is.

    Raises:
        UnavailableError: the queue does not answer.
    """
    return DrainProgress(**_asked(home, "--drain"))


def _asked(home: Path, what: str) -> dict[str, Any]:
    """Return what a supervisor that runs nothing answers."""
    require_services()
    answer: dict[str, Any] = json.loads(
        _run_supervisor(StackRequest().command(home, what), home).stdout
    )
    return answer


def _start(home: Path, request: StackRequest, environ: Mapping[str, str] | None) -> bool:
    """Start it and wait until it is ready; False if another supervisor was faster."""
    require_services()
    command = request.command(home, "--detach")
    done = _run_supervisor(command, home, also_ok=_EXIT_RUNNING, environ=environ)
    return done.returncode == 0


def _run_supervisor(
    command: list[str],
    home: Path,
    *,
    also_ok: int = 0,
    environ: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    try:
        done = subprocess.run(  # noqa: S603 - our own interpreter and module
            command,
            env=environ,
            capture_output=True,
            text=True,
            timeout=START_S_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired as cause:
        raise UnavailableError(
            f"the supervisor of the stack does not answer; its log is {home / 'log'}"
        ) from cause
    if done.returncode not in (0, also_ok):
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise UnavailableError(f"{lines[-1].removeprefix('holdfast: ')}; see {home / 'log'}")
    return done


@contextmanager
def _start_lock(home: Path, deadline_s: float) -> Iterator[None]:
    """Hold the right to start a stack in ``home``; freed if this process dies."""
    with (home / "start.lock").open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as cause:
                if time.monotonic() >= deadline_s:
                    raise UnavailableError(
                        "another process is starting the stack: wait, then try again", home=home
                    ) from cause
                time.sleep(POLL_S)
        yield
