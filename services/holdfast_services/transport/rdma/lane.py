"""The way to a peer: a control connection, and the queue pair that lives as long as it."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack

from holdfast.errors import InvalidRequestError, UnavailableError
from holdfast.format.digest import PART_BYTES
from holdfast_services.transport.connection import NOT_YET
from holdfast_services.transport.rdma import frames
from holdfast_services.transport.rdma.adapter import Adapter
from holdfast_services.transport.rdma.flow import PARTS_COUNT_MAX, messages
from holdfast_services.transport.wire import Status

SILENCE_S_MAX = 10.0
"""Longer than a peer may look for the way to here (``neighbours.LOOK_S_MAX``)."""
POLL_S = 0.2
KEPT_S_MAX = 15.0


class Lane:
    """A control connection to a peer, which it owns, and the queue pair that belongs to it.

    Args:
        check: Raises when nobody wants the lane any more; asked while it is made.
    """

    def __init__(
        self, address: str, connection: socket.socket, adapter: Adapter, check: Callable[[], None]
    ) -> None:
        """Connect the queue pair.

        Raises:
            UnavailableError: it cannot be.
        """
        self.address = address
        self.adapter = adapter
        self.kept_s = 0.0
        self.connection = connection
        self._received = b""
        with ExitStack() as made:
            made.enter_context(connection)
            connection.setblocking(False)
            per_part = sum(1 for _ in messages(PART_BYTES, adapter.place.port.message_bytes_max))
            self.queue = adapter.open_queue(PARTS_COUNT_MAX * per_part)
            made.callback(adapter.close_queue, self.queue)
            self._greet(check)
            self._made = made.pop_all()

    def _greet(self, check: Callable[[], None]) -> None:
        self.send(frames.encode_greeting(self.queue.greeting()))
        data = self.receive(frames.GREETING.size, check)
        try:
            if frames.greeting_status(data) != Status.OK:
                raise UnavailableError(f"{self.address} does not serve this node over RDMA now")
            theirs = frames.decode_greeting(data)
        except InvalidRequestError as cause:  # of a later version: it has other ways, too
            raise UnavailableError(f"{self.address}: {cause.message}") from cause
        self.adapter.connect(self.queue, theirs)

    @property
    def idle(self) -> bool:
        """Whether it may be used again: not kept for too long, and the peer has said nothing."""
        if time.monotonic() - self.kept_s > KEPT_S_MAX:
            return False
        try:
            self.connection.recv(1)
        except NOT_YET:
            return True
        except OSError:
            return False
        return False

    def send(self, data: bytes) -> None:
        """Send a request: far fewer bytes are under way than the kernel takes at once."""
        try:
            self.connection.sendall(data)
        except OSError as cause:
            raise UnavailableError(f"{self.address} broke off: {cause}") from cause

    def received(self, count: int) -> bytes | None:
        """Return the next ``count`` bytes of answers, None when they are not here yet."""
        if len(self._received) < count:
            try:
                data = self.connection.recv(1 << 12)
            except NOT_YET:
                return None
            except OSError as cause:
                raise UnavailableError(f"{self.address} broke off: {cause}") from cause
            if not data:
                raise UnavailableError(f"{self.address} broke off")
            self._received += data
            if len(self._received) < count:
                return None
        found, self._received = self._received[:count], self._received[count:]
        return found

    def receive(self, count: int, check: Callable[[], None]) -> bytes:
        """Return the next ``count`` bytes; ``check`` is asked while they are waited for.

        Raises:
            UnavailableError: they are not here after ``SILENCE_S_MAX``.
        """
        until_s = time.monotonic() + SILENCE_S_MAX
        while (data := self.received(count)) is None:
            check()
            if time.monotonic() > until_s:
                raise UnavailableError(f"{self.address} is silent")
            self.wait()
        return data

    def wait(self) -> None:
        """Wait until there is an answer or a completion, at most ``POLL_S``."""
        poll = select.poll()
        for fd in (self.connection.fileno(), self.queue.fd):
            poll.register(fd, select.POLLIN)
        ready = dict(poll.poll(int(POLL_S * 1e3)))
        if self.queue.fd in ready:
            self.queue.acknowledge()

    def close(self) -> None:
        """End both; the card writes nothing more for this lane."""
        self._made.close()
