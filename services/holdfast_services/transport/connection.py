"""TCP connections of the data plane: to reach a peer, and to receive what it says."""

from __future__ import annotations

import socket

from holdfast.errors import UnavailableError

CONNECT_S_MAX = 5.0


def connect(address: str) -> socket.socket:
    """Return a connection to ``host:port``; it waits ``CONNECT_S_MAX`` each time until told else.

    Raises:
        UnavailableError: nobody is there, or the address is none.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise UnavailableError(f"endpoint {address[:80]!r} is not host:port")
    try:
        connection = socket.create_connection((host, int(port)), timeout=CONNECT_S_MAX)
    except (OSError, ValueError, OverflowError) as cause:
        raise UnavailableError(f"cannot reach {address[:80]}: {cause}") from cause
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def receive(connection: socket.socket, count: int) -> bytes:
    """Return exactly ``count`` bytes, or none when the other side is done.

    Raises:
        ConnectionError: it broke off in the middle.
    """
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            if data:
                raise ConnectionError(f"broke off after {len(data)} of {count} bytes")
            return b""
        data += piece
    return data
