"""Ports of a stack that no other program listens on and no other stack has chosen.

A stack chooses all its ports before the first of its processes listens, which on a busy machine is
seconds later. Until its supervisor has ended each is locked, so that another stack that starts
meanwhile takes others.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from holdfast import locks
from holdfast.errors import InvalidRequestError

HOST = "127.0.0.1"
# Below the range that outgoing connections take (32768 up), so a port stays free for a restart.
PORT_MIN, PORT_MAX = 20_000, 29_999


class Ports:
    """Chooses ports from ``first`` on, so that a stack has the same ones at every start.

    ``folder`` is that of all stacks of this user. The locks are this process's, and last until it
    has ended.
    """

    def __init__(self, folder: Path, *, first: int) -> None:
        self._first = first
        self._taken: set[int] = set()
        self._file = os.open(folder / "ports.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def take(self, asked: int = 0) -> int:
        """Return port ``asked``, or with 0 the next one that is free.

        Raises:
            InvalidRequestError: the port that was asked for is in use, or no port is free.
        """
        span = PORT_MAX - PORT_MIN + 1
        wanted = (PORT_MIN + (self._first - PORT_MIN + offset) % span for offset in range(span))
        for port in [asked] if asked else wanted:
            if port not in self._taken and locks.take(self._file, at=port) and _is_free(port):
                self._taken.add(port)
                return port
        if asked:
            raise InvalidRequestError(f"port {asked} is in use; choose another, or 0 for any")
        raise InvalidRequestError(f"no free port in {PORT_MIN}..{PORT_MAX}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True
