"""Writes segments into a store, part by part; ``publish`` makes a checkpoint of them.

Knows nothing of catalogues, agents or torch. Units: bytes.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from holdfast.format.digest import PART_BYTES, part_digests, parts_count
from holdfast.objectstore import UPLOAD_PARTS_COUNT_MAX, ObjectStore, Upload, UploadedPart

IN_FLIGHT_COUNT_MAX = 3

log = logging.getLogger(__name__)


def upload_part_bytes(length_bytes: int) -> int:
    """Return how long the parts are in which a segment of this length is sent."""
    most = -(-parts_count(length_bytes) // UPLOAD_PARTS_COUNT_MAX)
    return PART_BYTES * max(most, 1)


class SegmentWriter:
    """One segment on its way into a store: parts in, digests out.

    As a context manager it forgets the upload if the body raises. ``put`` is safe to call from
    several threads; the store stays the caller's.

    Invariants: the object appears whole with ``finish`` or not at all. Parts of the upload are
    whole parts of the format, so that no byte is read twice to be hashed.
    """

    def __init__(self, store: ObjectStore, key: str, length_bytes: int) -> None:
        self.length_bytes = length_bytes
        self.part_bytes = upload_part_bytes(length_bytes)
        self.count = -(-length_bytes // self.part_bytes)
        self._store = store
        self._upload = store.begin(key, length_bytes, self.part_bytes)
        self._guard = threading.Lock()
        self._sent: dict[int, tuple[UploadedPart, list[bytes]]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abort()

    @property
    def upload(self) -> Upload:
        """The upload, which any process may finish or abort."""
        return self._upload

    def range(self, number: int) -> tuple[int, int]:
        """Return ``(begin, end)`` of part ``number``."""
        begin = number * self.part_bytes
        return begin, min(begin + self.part_bytes, self.length_bytes)

    def put(self, number: int, data: memoryview) -> None:
        """Hash and send part ``number``, all of it; a repeat replaces it."""
        sent = self._store.put_part(self._upload, number, data)
        digests = part_digests(data)
        with self._guard:
            self._sent[number] = sent, digests

    def digests(self) -> tuple[bytes, ...]:
        """Return the digests of all parts of the format; every part has been put."""
        assert len(self._sent) == self.count, "fewer parts than were announced"
        return tuple(digest for number in sorted(self._sent) for digest in self._sent[number][1])

    def parts(self) -> list[UploadedPart]:
        """Return what the store has, in order."""
        return [self._sent[at][0] for at in sorted(self._sent)]

    def finish(self) -> None:
        """Make the object appear.

        Raises:
            NotFoundError: the upload was aborted by somebody else.
            PreconditionError: somebody else sent a part of it again.
        """
        assert len(self._sent) == self.count, "fewer parts than were announced"
        self._store.finish(self._upload, self.parts())

    def abort(self) -> None:
        """Forget the upload; one that has ended is no error."""
        self._store.abort(self._upload)


class SegmentStream:
    """A segment that is written from its first byte to its last; a context manager.

    Memory: ``IN_FLIGHT_COUNT_MAX`` + 1 parts of the upload.
    """

    def __init__(self, store: ObjectStore, key: str, length_bytes: int) -> None:
        self._writer = SegmentWriter(store, key, length_bytes)
        self._pool = ThreadPoolExecutor(IN_FLIGHT_COUNT_MAX, thread_name_prefix="holdfast-write")
        self._flight: deque[Future[None]] = deque()
        self._number = 0
        self._new_buffer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._writer.__exit__(kind, error, trace)

    def write(self, data: memoryview | bytes) -> None:
        """Take the next bytes; waits while too many parts are on their way."""
        view = memoryview(data).cast("B")
        while len(view):
            count = min(len(view), len(self._buffer) - self._filled)
            self._buffer[self._filled : self._filled + count] = view[:count]
            self._filled += count
            view = view[count:]
            if self._filled == len(self._buffer):
                self._send()

    def finish(self) -> tuple[bytes, ...]:
        """Make the object appear and return the digests of its parts."""
        while self._flight:
            self._flight.popleft().result()
        self._writer.finish()
        return self._writer.digests()

    def _send(self) -> None:
        if len(self._flight) == IN_FLIGHT_COUNT_MAX:
            self._flight.popleft().result()
        part = memoryview(self._buffer)
        self._flight.append(self._pool.submit(self._writer.put, self._number, part))
        self._number += 1
        self._new_buffer()

    def _new_buffer(self) -> None:
        begin, end = self._writer.range(self._number)
        self._buffer = bytearray(max(end - begin, 0))
        self._filled = 0
