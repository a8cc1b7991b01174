"""Verified parts of stored segments: read ahead by a few threads, kept in a window (P3).

A part is hashed against its sidecar before anybody sees a byte of it. What a tensor needs is
announced, so that the next parts are on their way while the last one is used.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Self

import numpy as np

from holdfast.bucket.folder import CheckpointFolder
from holdfast.core.shard import Shard
from holdfast.format.digest import PART_BYTES
from holdfast.format.sidecar import Sidecar

WINDOW_PARTS_COUNT_MIN = 8
WINDOW_PARTS_COUNT_MAX = 64
AHEAD_PARTS_COUNT = 4
THREADS_COUNT = 8

PartKey = tuple[int, int]


def window_for(segments_count: int) -> int:
    """Return how many parts to hold if a tensor may have a box in each of so many segments.

    Fewer, and parts would be read again for the next tensor; 128 MiB to 1 GiB.
    """
    count = segments_count + AHEAD_PARTS_COUNT
    return min(max(count, WINDOW_PARTS_COUNT_MIN), WINDOW_PARTS_COUNT_MAX)


class VerifiedParts:
    """Parts of the segments of ``shards``, by (index of the shard, number).

    ``window`` parts are held, those used last and ``ahead`` to come, in buffers that are used
    again: new pages cost more than the copy. ``check`` is called before each part and stops the
    reading by raising.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        shards: Sequence[Shard],
        check: Callable[[], None],
        window: int,
        ahead: int = AHEAD_PARTS_COUNT,
    ) -> None:
        assert window > ahead, "what is fetched ahead must be held"
        self._folder = folder
        self._shards = shards
        self._sidecars: dict[int, Sidecar] = {}
        self._check = check
        self._window = window
        self._ahead = ahead
        self._pool = ThreadPoolExecutor(THREADS_COUNT, thread_name_prefix="holdfast-read")
        self._held: OrderedDict[PartKey, Future[memoryview]] = OrderedDict()
        self._next: deque[PartKey] = deque()
        self._spare: deque[memoryview] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads and forget the parts; what is under way is waited for."""
        self._pool.shutdown(cancel_futures=True)
        self._held.clear()
        self._spare.clear()

    def announce(self, parts: Iterable[PartKey]) -> None:
        """Say what will be asked for next, in order; replaces what was said before."""
        self._next = deque(parts)

    def get(self, file: int, number: int) -> memoryview:
        """Return the bytes of one part; valid until the next call.

        Raises:
            DigestMismatchError: they are not what was sealed; names the object and the part.
        """
        self._check()
        if self._next and self._next[0] == (file, number):
            self._next.popleft()
        found = self._fetch((file, number))
        for key in self._soon():
            self._fetch(key)
        return found.result()

    def _drop(self, part: Future[memoryview]) -> None:
        """Keep the buffer of a whole part; whoever got it last has asked for another since."""
        if not part.cancel() and part.done() and part.exception() is None:
            buffer = part.result()
            if len(buffer) == PART_BYTES:
                self._spare.append(buffer)

    def _soon(self) -> list[PartKey]:
        return [self._next[at] for at in range(min(self._ahead, len(self._next)))]

    def _fetch(self, key: PartKey) -> Future[memoryview]:
        if key not in self._held:
            # Before the part is asked for, so that a thread finds the buffer that is given back.
            while len(self._held) >= self._window:
                self._drop(self._held.popitem(last=False)[1])
            self._held[key] = self._pool.submit(self._read, *key)
        self._held.move_to_end(key)
        return self._held[key]

    def _read(self, file: int, number: int) -> memoryview:
        sidecar = self._sidecars.get(file)
        if sidecar is None:
            # Two threads may both fetch it, and get the same.
            sidecar = self._sidecars[file] = self._folder.sidecar(self._shards[file])
        left_bytes = sidecar.shard.length_bytes - number * PART_BYTES
        data = self._buffer(min(PART_BYTES, left_bytes))
        self._folder.fetch_part(sidecar, number, data)
        return data

    def _buffer(self, length_bytes: int) -> memoryview:
        if length_bytes == PART_BYTES:
            with suppress(IndexError):
                return self._spare.pop()
        return np.empty(length_bytes, dtype=np.uint8).data
