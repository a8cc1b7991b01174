"""TCP connections of the data plane: to reach a peer, and to receive what it says.

With ``HOLDFAST_TLS`` both ends show certificates of its CA before the first byte, each time anew.
"""

from __future__ import annotations

import socket
import ssl

from holdfast.errors import UnavailableError
from holdfast.rpc import tls

CONNECT_S_MAX = 5.0
NOT_YET = (BlockingIOError, ssl.SSLWantReadError, TimeoutError)
"""What receiving raises where nothing has come in time, or nothing is here of what must not wait.

Of a plain socket, of one with TLS, and of either with a timeout of Python's.
"""


def connect(address: str) -> socket.socket:
    """Return a connection to ``host:port``; it waits ``CONNECT_S_MAX`` each time until told else.

    Raises:
        UnavailableError: nobody is there, or the address is none, or a stranger is.
        InvalidRequestError: the folder ``HOLDFAST_TLS`` is not as it has to be.
    """
    identity = tls.identity()
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise UnavailableError(f"endpoint {address[:80]!r} is not host:port")
    try:
        connection = socket.create_connection((host, int(port)), timeout=CONNECT_S_MAX)
    except (OSError, ValueError, OverflowError) as cause:
        raise UnavailableError(f"cannot reach {address[:80]}: {cause}") from cause
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if identity is None:
        return connection
    try:
        return identity.client.wrap_socket(connection, server_hostname=tls.NAME)
    except OSError as cause:
        connection.close()
        what = f"{cause}: {tls.why(cause)}" if isinstance(cause, ssl.SSLError) else str(cause)
        raise UnavailableError(f"cannot greet {address[:80]}: {what}") from cause


def guarded(connection: socket.socket) -> socket.socket:
    """Return a connection that was made to us, which it replaces, before any greeting.

    Raises:
        InvalidRequestError: the folder ``HOLDFAST_TLS`` is not as it has to be.
    """
    identity = tls.identity()
    if identity is None:
        return connection
    return identity.server.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)


def greet(connection: socket.socket) -> None:
    """Have whoever made a connection to us show a certificate, if that is asked for.

    Raises:
        OSError: there is none that is good.
    """
    if isinstance(connection, ssl.SSLSocket):
        connection.do_handshake()


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
