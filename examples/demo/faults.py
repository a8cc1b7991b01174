"""The two faults: a rank that dies, and a node that dies with all its memory.

Each is given the process ids of the ranks on the node, and returns the moment of the kill, in
seconds since the epoch.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import struct
import time
from collections.abc import Sequence

from cluster import Node


def kill_rank(node: Node, ranks: Sequence[int]) -> float:
    """Kill the training processes of ``node``; its memory tier survives."""
    del node
    at = time.time()
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
    return at


def kill_node(node: Node, ranks: Sequence[int]) -> float:
    """Kill everything of ``node``: ranks, launcher, agent, and the memory that the agent held.

    The agent is frozen before its folder goes: as on a machine that loses power, it never sees it.
    """
    agent = _listener(node)
    at = time.time()
    os.kill(agent, signal.SIGSTOP)
    for pid in (*ranks, node.pid):
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(node.spec.arena)
    os.kill(agent, signal.SIGKILL)
    return at


def _listener(node: Node) -> int:
    """Return the process id behind the agent's socket, as the kernel knows it."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(5.0)
        connection.connect(str(node.spec.agent))
        credentials = connection.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
        )
    pid, _, _ = struct.unpack("3i", credentials)
    return int(pid)
