"""Lends parts of sealed segments to peers, one control connection and one queue pair for each."""

from __future__ import annotations

import logging
import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.errors import CheckpointError, InvalidRequestError, UnavailableError
from holdfast_services.transport import ByteCount, SegmentSource, reused, wire
from holdfast_services.transport.connection import receive
from holdfast_services.transport.listener import Listener
from holdfast_services.transport.rdma import frames
from holdfast_services.transport.rdma.adapter import Adapter, least_busy
from holdfast_services.transport.rdma.flow import PARTS_COUNT_MAX
from holdfast_services.transport.rdma.registered import Lent
from holdfast_services.transport.rdma.verbs import Queue
from holdfast_services.transport.wire import PartRequest, Status

log = logging.getLogger(__name__)


class RdmaServer:
    """Listens from construction on; ``close`` ends all queue pairs.

    ``served``: where it counts the bytes that were lent and given back.
    """

    def __init__(
        self,
        host: str,
        port: int,
        source: SegmentSource,
        adapters: Sequence[Adapter],
        served: ByteCount,
    ) -> None:
        self._source = source
        self._served = served
        self._adapters = adapters
        busy = frames.encode_refusal(Status.BUSY)
        self._listener = Listener(host, port, serve=self._serve, busy=busy, name="lend")

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self._listener.port

    def close(self) -> None:
        """Stop listening, cut every connection, wait a moment for the threads."""
        self._listener.close()

    def _serve(self, connection: socket.socket) -> None:
        data = receive(connection, frames.GREETING.size)
        if not data:
            return
        try:
            theirs = frames.decode_greeting(data)
            adapter = least_busy(self._adapters, theirs.link_layer, theirs.gid)
            queue = adapter.connected(theirs)
        except (InvalidRequestError, UnavailableError) as error:
            log.info("a peer is not served over RDMA: %s", error)
            connection.sendall(frames.encode_refusal(Status.REFUSED))
            return
        session = _Session(connection, self._source, adapter, queue, self._served)
        try:
            connection.sendall(frames.encode_greeting(queue.greeting()))
            while session.answer():
                pass
        except UnavailableError as error:
            log.warning("a peer is served over RDMA no more: %s", error)
        finally:
            session.close()
            adapter.close_queue(queue)


@dataclass(frozen=True, slots=True)
class _Loan:
    """A part lent: what was asked for, where it was found."""

    request: PartRequest
    view: memoryview
    lent: Lent


class _Session:
    """One peer's connection: the parts lent to it, in order."""

    def __init__(
        self,
        connection: socket.socket,
        source: SegmentSource,
        adapter: Adapter,
        queue: Queue,
        served: ByteCount,
    ) -> None:
        self._connection = connection
        self._source = source
        self._served = served
        self._memory = adapter.memory
        self._queue = queue
        self._loans: deque[_Loan] = deque()

    def answer(self) -> bool:
        """Answer one request; False when the connection is to be closed."""
        head = receive(self._connection, len(frames.DONE))
        if not head:
            return False
        if head == frames.DONE:
            return self._take_back()
        rest = receive(self._connection, wire.REQUEST.size - len(head))
        if not rest:
            return False
        head += rest
        try:
            key = receive(self._connection, wire.key_length(head))
            request = wire.decode_request(head, key)
        except CheckpointError as error:
            log.info("data plane refused a request: %s", error)
            return self._say(Status.INVALID)
        return self._lend(request)

    def _lend(self, request: PartRequest) -> bool:
        memory = self._memory
        revocations_count = memory.revocations_count
        view = self._source.lookup(request.key, request.incarnation)
        if view is None:
            return self._say(Status.NOT_FOUND)
        end = request.begin + request.length_bytes
        if end > len(view) or len(self._loans) >= PARTS_COUNT_MAX:
            return self._say(Status.INVALID)
        try:
            lent = memory.lend(view[request.begin : end], self._queue)
        except UnavailableError as error:
            log.warning("%s is not lent over RDMA: %s", request.key, error)
            return self._say(Status.REFUSED)
        self._loans.append(_Loan(request, view, lent))
        if memory.revocations_count != revocations_count and self._gone(self._loans[-1]):
            # Withdrawn after it was looked up, and perhaps before it was lent.
            memory.take_back(self._loans.pop().lent)
            return self._say(Status.NOT_FOUND)
        return self._say(Status.OK, lent)

    def _take_back(self) -> bool:
        if not self._loans:
            return False
        loan = self._loans.popleft()
        self._memory.take_back(loan.lent)
        self._served.add(loan.request.length_bytes)
        status = Status.NOT_FOUND if self._gone(loan) else Status.OK
        self._connection.sendall(wire.TRAILER.pack(status))
        return True

    def _gone(self, loan: _Loan) -> bool:
        again = self._source.lookup(loan.request.key, loan.request.incarnation)
        return reused(loan.view, again)

    def _say(self, status: Status, lent: Lent | None = None) -> bool:
        """Answer a look-up; the connection ends after a request that no client of ours makes."""
        key, address = (lent.key, lent.address) if lent is not None else (0, 0)
        self._connection.sendall(frames.LENT.pack(status, key, address))
        return status != Status.INVALID

    def close(self) -> None:
        """Take back what is lent."""
        while self._loans:
            self._memory.take_back(self._loans.popleft().lent)
