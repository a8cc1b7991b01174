"""Which process is which: of ranks, agents, services.

A rank is found by its session: the agent knows its number, the lock of the session who holds it.
So it is found once it has called ``restore``, or is captured under ``--auto``.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from holdfast import locks
from holdfast.embedded import Stack, StackNode
from holdfast.errors import CheckpointError
from holdfast.rpc.channel import call, sync_channel, unix_target
from holdfast.v1 import agent_pb2 as pb
from holdfast.v1.agent_pb2_grpc import AgentStub

_CALL_S_MAX = 5.0
_UCRED = struct.Struct("3i")  # struct ucred of Linux: pid, uid, gid


def ranks(nodes: Iterable[StackNode], launchers: Collection[int], rank: int | None) -> list[int]:
    """Return the processes of ``rank``, or of all ranks, that ``launchers`` have started."""
    return [
        pid
        for node in nodes
        for number, pid in _sessions(node)
        if rank in (None, number) and _parent(pid) in launchers
    ]


def _sessions(node: StackNode) -> Iterator[tuple[int, int]]:
    """Return the rank and the process of each session of a node that somebody holds."""
    try:
        with sync_channel(unix_target(node.agent)) as channel:
            answer = call(AgentStub(channel).Dump, pb.DumpRequest(), timeout_s=_CALL_S_MAX)
    except CheckpointError:
        return  # its agent is down: whoever waits asks again
    for name, session in json.loads(answer.json)["sessions"].items():
        if pid := locks.holder_of(node.arena / "sessions" / name):
            yield int(session["spec"]["rank"]), pid


def agent(node: StackNode) -> int | None:
    """Return the process behind an agent's socket, as the kernel knows it; None while it is down.

    It is also found while it is frozen.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_CALL_S_MAX)
        try:
            connection.connect(str(node.agent))
        except OSError:
            return None
        found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return int(_UCRED.unpack(found)[0])


def service(stack: Stack, name: str) -> int | None:
    """Return the process of a stack's service, such as ``metadata``; None while it is down."""
    module = f"holdfast_services.{name}"
    found = (pid for pid in _all() if _parent(pid) == stack.pid and module in _command(pid))
    return next(found, None)


def _all() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _parent(pid: int) -> int | None:
    stat = _read(pid, "stat")
    return int(stat.rpartition(")")[2].split()[1]) if stat else None


def _command(pid: int) -> list[str]:
    return _read(pid, "cmdline").split("\0")


def _read(pid: int, what: str) -> str:
    try:
        return os.fsdecode(Path(f"/proc/{pid}/{what}").read_bytes())
    except OSError:
        return ""
