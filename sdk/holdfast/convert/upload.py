"""A segment written to a store as a stream: hashed part by part, sent a few parts at a time."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from holdfast.core.facts import Shard
from holdfast.errors import CorruptionError, NotFoundError
from holdfast.format.digest import PART_BYTES, part_digests
from holdfast.format.sidecar import SIDECAR_BYTES_MAX, Sidecar, decode
from holdfast.objectstore import UPLOAD_PARTS_COUNT_MAX, ObjectStore, UploadedPart

IN_FLIGHT_COUNT_MAX = 3


class SegmentUpload:
    """An object that appears whole with ``finish``, or not at all; a context manager.

    Invariants: parts of the upload are whole parts of the format, so digests need no second read.
    Memory: ``IN_FLIGHT_COUNT_MAX`` + 1 parts of the upload.
    """

    def __init__(self, store: ObjectStore, key: str, length_bytes: int) -> None:
        parts = -(-length_bytes // PART_BYTES)
        self._part_bytes = PART_BYTES * max(-(-parts // UPLOAD_PARTS_COUNT_MAX), 1)
        self._store = store
        self._left_bytes = length_bytes
        self._upload = store.begin(key, length_bytes, self._part_bytes)
        self._pool = ThreadPoolExecutor(IN_FLIGHT_COUNT_MAX, thread_name_prefix="holdfast-write")
        self._flight: deque[Future[UploadedPart]] = deque()
        self._sent: list[UploadedPart] = []
        self._digests: list[bytes] = []
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
        if kind is not None:
            self._store.abort(self._upload)

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
        assert self._left_bytes == 0, "fewer bytes than were announced"
        while self._flight:
            self._sent.append(self._flight.popleft().result())
        self._store.finish(self._upload, self._sent)
        return tuple(self._digests)

    def _send(self) -> None:
        part = memoryview(self._buffer)
        self._digests += part_digests(part)
        if len(self._flight) == IN_FLIGHT_COUNT_MAX:
            self._sent.append(self._flight.popleft().result())
        self._flight.append(
            self._pool.submit(self._store.put_part, self._upload, self._number, part)
        )
        self._number += 1
        self._left_bytes -= len(part)
        self._new_buffer()

    def _new_buffer(self) -> None:
        self._buffer = bytearray(min(self._part_bytes, self._left_bytes))
        self._filled = 0


def is_there(store: ObjectStore, key: str, sidecar_key: str, shard: Shard) -> Sidecar | None:
    """Return the sidecar of a shard that an earlier try has finished, None if it must be sent."""
    try:
        if store.head(key).length_bytes != shard.length_bytes:
            return None
        found = decode(store.get(sidecar_key, length_bytes_max=SIDECAR_BYTES_MAX))
    except (NotFoundError, CorruptionError):
        return None
    return found if found.shard == shard else None
