"""Verified parts of stored segments: read ahead by a few threads, kept in a window (P3).

A part is hashed against its sidecar before anybody sees a byte of it. What a tensor needs is
announced, so that the next parts are on their way while the last one is used.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import numpy as np

from holdfast.bucket.folder import CheckpointFolder
from holdfast.format.digest import PART_BYTES
from holdfast.format.sidecar import Sidecar

WINDOW_PARTS_COUNT_MIN = 8
WINDOW_PARTS_COUNT_MAX = 64
AHEAD_PARTS_COUNT = 4
THREADS_COUNT = 4

PartKey = tuple[int, int]


class VerifiedParts:
    """Parts of the segments that ``sidecars`` describe, by (index of the sidecar, number).

    As many are held as there are segments, so that a tensor with a box in each does not read parts
    again, within 128 MiB to 1 GiB. ``check`` is called before each part and stops the
    reading by raising.
    """

    def __init__(
        self, folder: CheckpointFolder, sidecars: Sequence[Sidecar], check: Callable[[], None]
    ) -> None:
        self._folder = folder
        self._sidecars = sidecars
        self._check = check
        count = len(sidecars) + AHEAD_PARTS_COUNT
        self._window = min(max(count, WINDOW_PARTS_COUNT_MIN), WINDOW_PARTS_COUNT_MAX)
        self._pool = ThreadPoolExecutor(THREADS_COUNT, thread_name_prefix="holdfast-read")
        self._held: OrderedDict[PartKey, Future[memoryview]] = OrderedDict()
        self._next: deque[PartKey] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads and forget the parts; what is under way is waited for."""
        self._pool.shutdown(cancel_futures=True)
        self._held.clear()

    def announce(self, parts: Iterable[PartKey]) -> None:
        """Say what will be asked for next, in order; replaces what was said before."""
        self._next = deque(parts)

    def get(self, file: int, number: int) -> memoryview:
        """Return the bytes of one part.

        Raises:
            DigestMismatchError: they are not what was sealed; names the object and the part.
        """
        self._check()
        if self._next and self._next[0] == (file, number):
            self._next.popleft()
        found = self._fetch((file, number))
        for key in self._soon():
            self._fetch(key)
        while len(self._held) > self._window:
            self._held.popitem(last=False)[1].cancel()
        return found.result()

    def _soon(self) -> list[PartKey]:
        return [self._next[at] for at in range(min(AHEAD_PARTS_COUNT, len(self._next)))]

    def _fetch(self, key: PartKey) -> Future[memoryview]:
        if key not in self._held:
            self._held[key] = self._pool.submit(self._read, *key)
        self._held.move_to_end(key)
        return self._held[key]

    def _read(self, file: int, number: int) -> memoryview:
        sidecar = self._sidecars[file]
        left_bytes = sidecar.shard.length_bytes - number * PART_BYTES
        data = np.empty(min(PART_BYTES, left_bytes), dtype=np.uint8).data
        self._folder.fetch_part(sidecar, number, data)
        return data


def parts_of(file: int, begin: int, end: int) -> list[PartKey]:
    """Return the parts that hold bytes ``[begin, end)`` of a file."""
    return [(file, number) for number in range(begin // PART_BYTES, -(-end // PART_BYTES))]
