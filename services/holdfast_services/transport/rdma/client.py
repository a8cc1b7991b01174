"""Reads parts of a peer's segment over RDMA, verified one by one.

One thread per fetch, which waits for the control connection and for completions at once. The lane
of a fetch that ended well is kept for the next; any other is closed before the fetch returns: after
that the card writes no more into the caller's memory.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from holdfast.errors import (
    DigestMismatchError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from holdfast.format.digest import part_digest
from holdfast_services.transport import Job, wire
from holdfast_services.transport.connection import connect
from holdfast_services.transport.rdma import frames
from holdfast_services.transport.rdma.adapter import Adapter
from holdfast_services.transport.rdma.flow import Awaited, Flow, messages
from holdfast_services.transport.rdma.lane import SILENCE_S_MAX, Lane
from holdfast_services.transport.rdma.registered import Held
from holdfast_services.transport.wire import Status

KEPT_COUNT_MAX = 16
ADDRESSES_COUNT = 1 << 64
_LAYOUTS = {Awaited.LENT: frames.LENT, Awaited.DONE: wire.TRAILER}


class _Pull:
    """The parts of one fetch on their way over one lane."""

    def __init__(self, job: Job, lane: Lane) -> None:
        self._job = job
        self._lane = lane
        self._flow = Flow(job.fetch.missing)
        self._held: dict[int, Held] = {}
        self._heard_s = time.monotonic()

    def run(self) -> None:
        """Return when all parts are verified."""
        flow, lane = self._flow, self._lane
        while not flow.ended:
            self._job.check()
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
        request = self._job.fetch.request
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
        for about in (*self._flow.all_awaited, Awaited.DONE):
            layout = _LAYOUTS[about]
            status, *_ = layout.unpack(self._lane.receive(layout.size, self._job.check))
            self._check(status)

    def _answered(self) -> Iterator[int]:
        while (about := self._flow.awaited) is not None:
            layout = _LAYOUTS[about]
            data = self._lane.received(layout.size)
            if data is None:
                return
            status, *where = layout.unpack(data)
            index = self._flow.answered()
            self._check(status)
            if about is Awaited.LENT:
                self._read(index, *where)
            else:
                self._verify(index)
            yield index
        if not self._flow.ended and self._lane.received(1) is not None:
            raise UnavailableError(f"{self._lane.address} answers what nobody asked for")

    def _read(self, index: int, key: int, source: int) -> None:
        """Ask the card for the bytes of a part."""
        begin, end = self._job.fetch.request.part(index)
        lane = self._lane
        if source + end - begin > ADDRESSES_COUNT:
            raise UnavailableError(f"{lane.address} lends memory that no machine has")
        held = lane.adapter.memory.hold(self._job.fetch.destination[begin:end])
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
        fetch, address = self._job.fetch, self._job.address
        begin, end = fetch.request.part(index)
        if part_digest(fetch.destination[begin:end]) == fetch.request.digests[index]:
            fetch.done.add(index)
        elif not self._flow.mismatched(index):
            raise DigestMismatchError(
                f"part {index} of {fetch.request.key} from {address} does not match its digest"
            )

    def _check(self, status: int) -> None:
        address, key = self._lane.address, self._job.fetch.request.key
        if status == Status.NOT_FOUND:
            raise NotFoundError(f"{address} no longer has {key}")
        if status == Status.REFUSED:
            raise UnavailableError(f"{address} cannot lend {key} over RDMA")
        if status != Status.OK:
            raise InvalidRequestError(f"{address} refused the request for {key}")


class Lanes:
    """Fetches over lanes that are kept for the next fetch from the same peer.

    Args:
        adapters: The ports to choose from, those with the fewest queue pairs first.
    """

    def __init__(self, adapters: Sequence[Adapter]) -> None:
        self._adapters = adapters
        self._kept: deque[Lane] = deque()
        self._guard = threading.Lock()

    def fetch(self, job: Job) -> None:
        """Fill the destination; the promise is ``Transport.fetch``'s.

        A lane that was kept may have gone bad meanwhile: then a new one is tried.
        """
        lane = self._take(job.address)
        if lane is not None:
            with suppress(UnavailableError):
                self._pull(job, lane)
                return
            job.check()
        if job.fetch.missing:
            self._pull(job, self._new(job.address, job.check))

    def _pull(self, job: Job, lane: Lane) -> None:
        pull = _Pull(job, lane)
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

    def _new(self, address: str, check: Callable[[], None]) -> Lane:
        """Return a lane from the least busy port, or else from the next: a cable may be out."""
        reasons: list[str] = []
        for adapter in sorted(self._adapters, key=lambda one: one.queues_count):
            connection = connect(address)  # if nobody is there no other port helps
            try:
                return Lane(address, connection, adapter, check)
            except UnavailableError as error:
                reasons.append(error.message)
        raise UnavailableError("; ".join(dict.fromkeys(reasons)))

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
