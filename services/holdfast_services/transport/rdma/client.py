"""Reads parts of a peer's segment over RDMA, verified one by one.

One thread per fetch, which waits for the control connection and for completions at once. The
connection of a fetch that ended well is kept for the next; any other is closed, with its queue
pair, before the fetch returns: after that the card writes no more into the caller's memory.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from holdfast.errors import (
    CheckpointError,
    DigestMismatchError,
    InvalidRequestError,
    NotFoundError,
    StoppedError,
    UnavailableError,
)
from holdfast.format.digest import PART_BYTES, part_digest
from holdfast_services.transport import FetchRequest, deadline_s, wire
from holdfast_services.transport.rdma import frames
from holdfast_services.transport.rdma.adapter import Adapter
from holdfast_services.transport.rdma.flow import PARTS_COUNT_MAX, Awaited, Flow, messages
from holdfast_services.transport.rdma.registered import Held
from holdfast_services.transport.rdma.verbs import Queue
from holdfast_services.transport.wire import Status

CONNECT_S_MAX = 5.0
SILENCE_S_MAX = 10.0
POLL_S = 0.2
KEPT_S_MAX = 15.0
KEPT_COUNT_MAX = 16
ADDRESSES_COUNT = 1 << 64


class Lane:
    """A control connection to a peer, and the queue pair that belongs to it."""

    def __init__(self, address: str, adapter: Adapter) -> None:
        """Connect both.

        Raises:
            UnavailableError: one of them cannot be.
        """
        self.address = address
        self.adapter = adapter
        self.kept_s = 0.0
        port = adapter.place.port
        per_part = sum(1 for _ in messages(PART_BYTES, port.message_bytes_max))
        self.queue: Queue = adapter.open_queue(PARTS_COUNT_MAX * per_part)
        try:
            self.connection = _connect(address)
        except UnavailableError:
            adapter.close_queue(self.queue)
            raise
        try:
            self._greet()
            self.connection.setblocking(False)
        except CheckpointError:
            self.close()
            raise
        except OSError as cause:
            self.close()
            raise UnavailableError(f"{address} broke off: {cause}") from cause
        self._received = b""

    def _greet(self) -> None:
        self.connection.sendall(frames.encode_greeting(self.queue.greeting()))
        data = self.connection.recv(frames.GREETING.size, socket.MSG_WAITALL)
        if len(data) < frames.GREETING.size:
            raise UnavailableError(f"{self.address} broke off")
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
            self.connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
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

    def frames(self, count: int) -> bytes | None:
        """Return the next ``count`` bytes of answers, None when they are not here yet."""
        if len(self._received) < count:
            try:
                data = self.connection.recv(1 << 12)
            except BlockingIOError:
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
        self.adapter.close_queue(self.queue)
        with suppress(OSError):
            self.connection.close()


def _connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host, int(port)), timeout=CONNECT_S_MAX)
    except (OSError, ValueError, OverflowError) as cause:
        raise UnavailableError(f"cannot reach {address}: {cause}") from cause
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


@dataclass(slots=True)
class Fetch:
    """One fetch: what is wanted, where it goes, how long it may take."""

    address: str
    request: FetchRequest
    destination: memoryview
    done: set[int]
    stop: threading.Event
    until_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.until_s = time.monotonic() + deadline_s(self.request.length_bytes)

    def check(self) -> None:
        """Raise when this fetch is to end."""
        if self.stop.is_set():
            raise StoppedError(f"fetch of {self.request.key} was interrupted")
        if time.monotonic() > self.until_s:
            raise UnavailableError(f"{self.address} is too slow with {self.request.key}")

    @property
    def missing(self) -> list[int]:
        """The parts that are still to come."""
        return [index for index in range(len(self.request.digests)) if index not in self.done]


class _Pull:
    """The parts of one fetch on their way over one lane."""

    def __init__(self, fetch: Fetch, lane: Lane) -> None:
        self._fetch = fetch
        self._lane = lane
        self._flow = Flow(fetch.missing)
        self._held: dict[int, Held] = {}
        self._heard_s = time.monotonic()

    def run(self) -> None:
        """Return when all parts are verified."""
        flow, lane = self._flow, self._lane
        while not flow.ended:
            self._fetch.check()
            while (index := flow.ask()) is not None:
                lane.send(self._look_up(index))
            lane.wait()
            happened = [*self._completed(), *self._answered()]
            if happened:
                self._heard_s = time.monotonic()
            elif time.monotonic() - self._heard_s > SILENCE_S_MAX:
                raise UnavailableError(f"{lane.address} is silent")

    def let_go(self) -> None:
        """Forget the memory of parts that did not come to their end; the lane is closed."""
        for held in self._held.values():
            self._lane.adapter.memory.let_go(held)

    def _look_up(self, index: int) -> bytes:
        request = self._fetch.request
        begin, end = request.part(index)
        return wire.encode_request(
            wire.PartRequest(
                key=request.key,
                incarnation=request.incarnation,
                begin=request.offset_bytes + begin,
                length_bytes=end - begin,
            )
        )

    def _completed(self) -> Iterator[int]:
        for completion in self._lane.queue.completions():
            if completion.refused:
                self._ask_why()
            if completion.error:
                raise UnavailableError(f"{self._lane.address}: {completion.error}")
            if self._flow.arrived(completion.tag):
                self._lane.send(frames.DONE)
            yield completion.tag

    def _ask_why(self) -> None:
        """Give a part back that could not be read: it may be that its slot was freed meanwhile.

        Raises:
            NotFoundError: so it is; nobody is to blame.
        """
        self._lane.send(frames.DONE)
        until_s = time.monotonic() + SILENCE_S_MAX
        for about in (*self._flow.all_awaited, Awaited.DONE):
            while (answer := self._next(about)) is None:
                self._fetch.check()
                if time.monotonic() > until_s:
                    return
                self._lane.wait()
            self._check(answer[0])

    def _next(self, about: Awaited) -> tuple[int, ...] | None:
        layout = frames.LENT if about is Awaited.LENT else wire.TRAILER
        data = self._lane.frames(layout.size)
        return None if data is None else layout.unpack(data)

    def _answered(self) -> Iterator[int]:
        while (about := self._flow.awaited) is not None:
            answer = self._next(about)
            if answer is None:
                return
            status, *where = answer
            index = self._flow.answered()
            self._check(status)
            if about is Awaited.LENT:
                self._read(index, *where)
            else:
                self._verify(index)
            yield index
        if not self._flow.ended and self._lane.frames(1) is not None:
            raise UnavailableError(f"{self._lane.address} answers what nobody asked for")

    def _read(self, index: int, key: int, source: int) -> None:
        """Ask the card for the bytes of a part."""
        begin, end = self._fetch.request.part(index)
        lane = self._lane
        if source + end - begin > ADDRESSES_COUNT:
            raise UnavailableError(f"{lane.address} lends memory that no machine has")
        held = lane.adapter.memory.hold(self._fetch.destination[begin:end])
        self._held[index] = held
        pieces = list(messages(end - begin, lane.adapter.place.port.message_bytes_max))
        self._flow.read(index, len(pieces))
        for first, last in pieces:
            lane.queue.read(
                index, held.region, held.address + first, last - first,
                key=key, source=source + first,
            )  # fmt: skip

    def _verify(self, index: int) -> None:
        """Note a part that is what was sealed; have it come once more if it is not."""
        self._lane.adapter.memory.let_go(self._held.pop(index))
        fetch = self._fetch
        begin, end = fetch.request.part(index)
        if part_digest(fetch.destination[begin:end]) == fetch.request.digests[index]:
            fetch.done.add(index)
        elif not self._flow.mismatched(index):
            raise DigestMismatchError(
                f"part {index} of {fetch.request.key} from {fetch.address} does not match its "
                f"digest"
            )

    def _check(self, status: int) -> None:
        address, key = self._lane.address, self._fetch.request.key
        if status == Status.NOT_FOUND:
            raise NotFoundError(f"{address} no longer has {key}")
        if status == Status.REFUSED:
            raise UnavailableError(f"{address} cannot lend {key} over RDMA")
        if status != Status.OK:
            raise InvalidRequestError(f"{address} refused the request for {key}")


class Lanes:
    """Fetches over lanes that are kept for the next fetch from the same peer.

    Args:
        adapters: The ports to choose from: for a new lane the one with the fewest queue pairs.
    """

    def __init__(self, adapters: Sequence[Adapter]) -> None:
        self._adapters = adapters
        self._kept: deque[Lane] = deque()
        self._guard = threading.Lock()

    def fetch(self, fetch: Fetch) -> None:
        """Fill the destination; the promise is ``Transport.fetch``'s.

        A lane that was kept may have gone bad meanwhile: then a new one is tried.
        """
        lane = self._take(fetch.address)
        if lane is not None:
            with suppress(UnavailableError):
                self._pull(fetch, lane)
                return
            fetch.check()
        if fetch.missing:
            self._pull(fetch, self._new(fetch.address))

    def _pull(self, fetch: Fetch, lane: Lane) -> None:
        pull = _Pull(fetch, lane)
        ended = False
        try:
            pull.run()
            ended = True
        finally:
            if ended:
                self._keep(lane)
            else:
                lane.close()
                pull.let_go()

    def _new(self, address: str) -> Lane:
        adapter = min(self._adapters, key=lambda one: one.queues_count)
        return Lane(address, adapter)

    def _take(self, address: str) -> Lane | None:
        with self._guard:
            lane = next((one for one in reversed(self._kept) if one.address == address), None)
            if lane is not None:
                self._kept.remove(lane)
        if lane is not None and not lane.idle:
            lane.close()
            return None
        return lane

    def _keep(self, lane: Lane) -> None:
        """Keep a lane; those kept for too long go, and the oldest of too many."""
        lane.kept_s = time.monotonic()
        with self._guard:
            self._kept.append(lane)
            gone: list[Lane] = []
            while len(self._kept) > KEPT_COUNT_MAX or not self._kept[0].idle:
                gone.append(self._kept.popleft())
                if not self._kept:
                    break
        for each in gone:
            each.close()

    def close(self) -> None:
        """Close the lanes that nobody uses."""
        with self._guard:
            kept, self._kept = self._kept, deque()
        for lane in kept:
            lane.close()
