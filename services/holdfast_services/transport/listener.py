"""Listens on a TCP port: one thread per connection, so many of them, all cut when it closes."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress

from holdfast.errors import CheckpointError
from holdfast_services.transport.connection import greet, guarded

CONNECTIONS_COUNT_MAX = 64
IDLE_S_MAX = 30.0
GREET_S_MAX = 5.0
BACKLOG = 128
END_S_MAX = 2.0

log = logging.getLogger(__name__)


class Listener:
    """Listens from construction on; ``close`` breaks off everything and waits for the threads.

    Args:
        host: Address to listen on.
        port: 0: any.
        serve: Serves one connection until it is to be closed; an OSError ends it too.
        busy: What one connection too many is told.
        name: Of its threads, ``<name>-accept`` and ``<name>-serve``.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        serve: Callable[[socket.socket], None],
        busy: bytes,
        name: str,
    ) -> None:
        self._serve = serve
        self._busy = busy
        self._name = name
        self._listener = socket.create_server((host, port), backlog=BACKLOG)
        self._open: dict[socket.socket, threading.Thread] = {}
        self._ungreeted: dict[socket.socket, None] = {}
        self._guard = threading.Lock()
        self._closed = False
        self._acceptor = threading.Thread(target=self._accept, name=f"{name}-accept", daemon=True)
        self._acceptor.start()

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Stop listening, cut every connection, wait a moment for the threads."""
        with self._guard:
            self._closed = True
            threads = [*self._open.values(), self._acceptor]
            for connection in self._open:
                with suppress(OSError):
                    # Not SSLSocket's, by which a thread that reads would go on without TLS.
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in threads:
            thread.join(timeout=END_S_MAX)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                continue
            try:
                connection = guarded(connection)
            except (OSError, CheckpointError) as error:  # it has gone again
                log.debug("data plane does not take a connection: %s", error)
                connection.close()
                continue
            with self._guard:
                if self._closed:
                    connection.close()
                    return
                if len(self._open) >= CONNECTIONS_COUNT_MAX and not self._cut_ungreeted():
                    self._refuse(connection)
                    continue
                self._begin(connection)

    def _cut_ungreeted(self) -> bool:
        """Cut whoever has connected first and not said who it is; False: there is none.

        Else strangers who say nothing would keep members out.
        """
        oldest = next(iter(self._ungreeted), None)
        if oldest is None:
            return False
        with suppress(OSError):
            socket.socket.shutdown(oldest, socket.SHUT_RDWR)
        del self._ungreeted[oldest], self._open[oldest]
        return True

    def _begin(self, connection: socket.socket) -> None:
        thread = threading.Thread(
            target=self._run, args=(connection,), name=f"{self._name}-serve", daemon=True
        )
        if isinstance(connection, ssl.SSLSocket):
            self._ungreeted[connection] = None
        try:
            thread.start()
        except RuntimeError as cause:  # else nobody is let in any more, whenever there is room
            log.warning("data plane has no thread for a connection: %s", cause)
            self._ungreeted.pop(connection, None)
            self._refuse(connection)
        else:
            self._open[connection] = thread

    def _run(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(GREET_S_MAX)
            greet(connection)
            with self._guard:
                self._ungreeted.pop(connection, None)
            connection.settimeout(IDLE_S_MAX)
            self._serve(connection)
        except ssl.SSLError as error:
            log.info("data plane refused a peer: %s", error)
        except OSError as error:
            log.debug("data plane connection ended: %s", error)
        finally:
            with self._guard:
                self._ungreeted.pop(connection, None)
                self._open.pop(connection, None)
            connection.close()

    def _refuse(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.setblocking(False)
            connection.send(self._busy)  # with TLS it does not get so far, and is cut off
