"""Serves sealed segments over TCP, straight from the mapping.

``sendall`` from the mapping is faster than ``os.sendfile`` from a tmpfs (measured: 4.5 against
2.4 GB/s on one stream). Lookups by key only; a malformed request gets a status, never a crash.
"""

from __future__ import annotations

import logging
import socket

from holdfast.errors import CheckpointError
from holdfast_services.transport import ByteCount, SegmentSource, reused, wire
from holdfast_services.transport.connection import receive
from holdfast_services.transport.listener import Listener
from holdfast_services.transport.wire import Status

REJECT_S_MAX = 1.0
REJECT_READS_MAX = 16
REJECT_BYTES = 1 << 12

log = logging.getLogger(__name__)


class TcpServer:
    """Listens from construction on; ``close`` breaks off everything and waits for the threads.

    ``served``: where it counts the bytes it has sent.
    """

    def __init__(
        self, host: str, port: int, source: SegmentSource, served: ByteCount | None = None
    ) -> None:
        self._source = source
        self._served = served or ByteCount()
        busy = wire.RESPONSE.pack(Status.BUSY, 0)
        self._listener = Listener(host, port, serve=self._serve, busy=busy, name="fetch")

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self._listener.port

    def close(self) -> None:
        """Stop listening, cut every connection, wait a moment for the threads."""
        self._listener.close()

    def _serve(self, connection: socket.socket) -> None:
        while self._answer(connection):
            pass

    def _answer(self, connection: socket.socket) -> bool:
        """Answer one request; False when the connection is to be closed."""
        head = receive(connection, wire.REQUEST.size)
        if not head:
            return False
        try:
            key = receive(connection, wire.key_length(head))
            request = wire.decode_request(head, key)
        except CheckpointError as error:
            log.info("data plane refused a request: %s", error)
            return _reject(connection)
        view = self._source.lookup(request.key, request.incarnation)
        if view is None:
            connection.sendall(wire.RESPONSE.pack(Status.NOT_FOUND, 0))
            return True
        end = request.begin + request.length_bytes
        if end > len(view):
            return _reject(connection)
        connection.sendall(wire.RESPONSE.pack(Status.OK, request.length_bytes))
        connection.sendall(view[request.begin : end])
        self._served.add(request.length_bytes)
        again = self._source.lookup(request.key, request.incarnation)
        after = Status.NOT_FOUND if reused(view, again) else Status.OK
        connection.sendall(wire.TRAILER.pack(after))
        return True


def _reject(connection: socket.socket) -> bool:
    """Answer INVALID and end; what is still unread is read, or the answer would be reset."""
    connection.sendall(wire.RESPONSE.pack(Status.INVALID, 0))
    connection.shutdown(socket.SHUT_WR)
    connection.settimeout(REJECT_S_MAX)
    for _ in range(REJECT_READS_MAX):
        if not connection.recv(REJECT_BYTES):
            break
    return False
