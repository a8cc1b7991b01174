"""Where a stack keeps its things: HOME, arenas, sockets, ports, and ``stack.json``.

::

    HOME/  supervisor.lock  stack.json  log  metadata.db  queue.db  <node>.sock
           persistence.ready  store.url  store/
           scheduler.db  <node>.executor.ready  execute/<node>/   if there is a scheduler
    /dev/shm/holdfast-<uid>/<hash of HOME>/<node>/      arenas, 0700 all the way
    /dev/shm/holdfast-<uid>/ports.lock                  ports of all stacks of this user

Without /dev/shm the arenas are in HOME/arena; with a HOME too long for a socket's path the
sockets are beside the arenas. ``store/`` is the object store unless another was chosen.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from holdfast import locks
from holdfast.errors import AccessError, AlreadyExistsError, InvalidRequestError
from holdfast.rpc import tls
from holdfast.rpc.channel import SOCKET_PATH_BYTES_MAX
from holdfast_services.kit.ready import say_ready
from holdfast_services.supervisor.ports import HOST, PORT_MAX, PORT_MIN, Ports

SHM = Path("/dev/shm")  # noqa: S108 - the folders in it are made 0700 and checked


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlaces:
    """One agent's places; ports are chosen once, so that peers find a restarted agent again."""

    name: str
    socket: Path
    arena: Path
    rpc_port: int
    data_port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All places of one stack; ``ports`` keeps those that it has chosen.

    ``scheduler_port`` 0: there is no scheduler.
    """

    home: Path
    arenas: Path
    store: str
    port: int
    rest_port: int
    scheduler_port: int
    nodes: tuple[NodePlaces, ...]
    ports: Ports = field(compare=False, repr=False)

    @property
    def address(self) -> str:
        """Where the metadata service serves gRPC."""
        return f"{HOST}:{self.port}"

    @property
    def rest_url(self) -> str:
        """Where the metadata service serves REST and the dashboard."""
        return f"{tls.scheme()}://{HOST}:{self.rest_port}"

    @property
    def scheduler_url(self) -> str:
        """Where the scheduler serves REST and its page; empty: there is none."""
        port = self.scheduler_port
        return f"{tls.scheme()}://{HOST}:{port}" if port else ""

    def executor_ready_file(self, node: str) -> Path:
        """Return the file that exists while the executor of a node hears its scheduler."""
        return self.home / f"{node}.executor.ready"

    @property
    def queue(self) -> str:
        """URL of the queue of the persistence worker."""
        return queue_url(self.home)

    @property
    def worker_ready_file(self) -> Path:
        """The file that exists while the persistence worker claims items."""
        return worker_ready_file(self.home)

    def publish(self) -> None:
        """Write ``stack.json``: readers see the whole of it or none."""
        record = {
            "pid": os.getpid(),
            "address": self.address,
            "rest_url": self.rest_url,
            "log": str(self.home / "log"),
            "store": self.store,
            "scheduler_url": self.scheduler_url,
            "nodes": [
                {"name": node.name, "agent": str(node.socket), "arena": str(node.arena)}
                for node in self.nodes
            ],
        }
        say_ready(self.home / "stack.json", record)

    def unpublish(self) -> None:
        """Remove ``stack.json``."""
        (self.home / "stack.json").unlink(missing_ok=True)

    def live_sessions(self) -> int:
        """Return how many trainers hold the lock of their session file now."""
        return sum(
            locks.holder_of(file) is not None
            for node in self.nodes
            for file in (node.arena / "sessions").glob("*")
        )


def make_layout(
    home: Path,
    names: tuple[str, ...],
    *,
    store: str,
    port: int,
    rest_port: int,
    scheduler: bool = False,
) -> Layout:
    """Return the places of a stack in ``home``, its folders made and its ports chosen.

    Raises:
        InvalidRequestError: a port that was asked for is in use, or no socket path is short enough.
        AccessError: the arenas' folder belongs to somebody else.
    """
    arenas = arena_root(home)
    private_folder(arenas.parent)
    private_folder(arenas)
    first = PORT_MIN + int(_short_hash(home), 16) % (PORT_MAX - PORT_MIN)
    ports = Ports(arenas.parent, first=first)
    grpc_port = ports.take(port)
    http_port = ports.take(rest_port)
    nodes = tuple(
        NodePlaces(
            name=name,
            socket=_socket_path(home, arenas, name),
            arena=private_folder(arenas / name),
            rpc_port=ports.take(),
            data_port=ports.take(),
        )
        for name in names
    )
    return Layout(
        home=home,
        arenas=arenas,
        store=store,
        port=grpc_port,
        rest_port=http_port,
        scheduler_port=ports.take() if scheduler else 0,
        nodes=nodes,
        ports=ports,
    )


def arena_root(home: Path) -> Path:
    """Return the folder that holds the arenas of the stack in ``home``, and nothing else."""
    if not SHM.is_dir():
        return home / "arena"
    return SHM / f"holdfast-{os.getuid()}" / _short_hash(home)


def queue_url(home: Path) -> str:
    """Return the URL of the queue of the stack in ``home``."""
    return f"sqlite:///{home / 'queue.db'}"


def worker_ready_file(home: Path) -> Path:
    """Return the file that is there while the worker of the stack in ``home`` claims items."""
    return home / "persistence.ready"


def erase(home: Path) -> int:
    """Remove the arenas, and what a running stack leaves behind; return the bytes given back.

    The caller holds the lock, so nothing runs. The queue goes too: it is a hint.
    """
    root = arena_root(home)
    freed_bytes = 0
    if root.is_dir() and not root.is_symlink():
        freed_bytes = sum(file.lstat().st_blocks * 512 for file in root.rglob("*"))
        shutil.rmtree(root)
    leftovers = (home / "stack.json", worker_ready_file(home))
    for leftover in (*home.glob("queue.db*"), *home.glob("*.sock"), *leftovers):
        leftover.unlink(missing_ok=True)
    return freed_bytes


def private_folder(path: Path) -> Path:
    """Make ``path`` a folder that only this user can enter, and return it.

    Raises:
        AccessError: it is there already and is not one (others can write to /dev/shm).
    """
    with suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
    facts = path.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
        raise AccessError(f"{path} is not a folder of user {os.getuid()}; remove it")
    path.chmod(0o700)
    return path


def take_lock(home: Path) -> int:
    """Take the lock of the stack in ``home``, until this process ends; return the descriptor.

    Raises:
        AlreadyExistsError: another supervisor has it.
    """
    descriptor = os.open(home / "supervisor.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if not locks.take(descriptor):
        holder = locks.holder(descriptor)
        os.close(descriptor)
        raise AlreadyExistsError("a stack already runs here", home=home, pid=holder)
    return descriptor


def _short_hash(home: Path) -> str:
    return hashlib.blake2b(os.fsencode(home.resolve()), digest_size=4).hexdigest()


def _socket_path(home: Path, arenas: Path, name: str) -> Path:
    for path in (home / f"{name}.sock", arenas / f"{name}.sock"):
        if len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX:
            return path
    raise InvalidRequestError(f"{home} is too long for a socket; choose a shorter --dir")
