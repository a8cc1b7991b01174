"""Writes a checkpoint into a store: segments part by part, sidecars, and the one commit.

``docs/reference/bucket-v1.md`` is normative. Whoever writes a checkpoint (a worker, a one-shot
save, an import, a copy) makes it one by ``publish``, which alone knows what a lost answer means.
Knows nothing of catalogues, agents or torch. Units: bytes.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from holdfast.bucket.folder import CheckpointFolder
from holdfast.errors import (
    AlreadyExistsError,
    CheckpointError,
    CorruptionError,
    ExhaustedError,
    NotFoundError,
    OutcomeUnknownError,
    UnavailableError,
)
from holdfast.format import index, keys, manifest, sidecar
from holdfast.format.digest import PART_BYTES, part_digests, parts_count
from holdfast.format.manifest import MANIFEST_BYTES_MAX, Manifest
from holdfast.format.segment import SegmentHeader
from holdfast.format.sidecar import Sidecar
from holdfast.objectstore import UPLOAD_PARTS_COUNT_MAX, ObjectStore, UploadedPart

IN_FLIGHT_COUNT_MAX = 3

log = logging.getLogger(__name__)


class SegmentWriter:
    """One segment on its way into a store: parts in, digests out.

    As a context manager it forgets the upload if the body raises. ``put`` is safe to call from
    several threads; the store stays the caller's.

    Invariants: the object appears whole with ``finish`` or not at all. Parts of the upload are
    whole parts of the format, so that no byte is read twice to be hashed.
    """

    def __init__(self, store: ObjectStore, key: str, length_bytes: int) -> None:
        most = -(-parts_count(length_bytes) // UPLOAD_PARTS_COUNT_MAX)
        self.length_bytes = length_bytes
        self.part_bytes = PART_BYTES * max(most, 1)
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
    def upload_id(self) -> str:
        """How the store calls the upload."""
        return self._upload.id

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

    def finish(self) -> None:
        """Make the object appear.

        Raises:
            NotFoundError: the upload was aborted by somebody else.
            PreconditionError: somebody else sent a part of it again.
        """
        assert len(self._sent) == self.count, "fewer parts than were announced"
        self._store.finish(self._upload, [self._sent[at][0] for at in sorted(self._sent)])

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


def put_sidecar(folder: CheckpointFolder, made: Sidecar, *, if_absent: bool = False) -> None:
    """Check the segment that has just appeared, then write its sidecar.

    Where the store checks no parts, the first and the last are read back.

    Raises:
        CorruptionError: what is there is not what was sent.
        AlreadyExistsError: ``if_absent``, and there is a sidecar.
        OutcomeUnknownError: ``if_absent``, and the answer was lost: read it back.
    """
    folder.check_length(made.shard)
    if not folder.store.checks_parts:
        last = len(made.digests) - 1
        for number in {0, last}:
            length_bytes = min(PART_BYTES, made.shard.length_bytes - number * PART_BYTES)
            folder.fetch_part(made, number, memoryview(bytearray(length_bytes)))
    key = folder.sidecar_key(made.shard)
    folder.store.put(key, sidecar.encode(made), if_absent=if_absent)


def publish(
    folder: CheckpointFolder,
    mine: Manifest,
    *,
    headers: Callable[[], Iterable[SegmentHeader]] | None = None,
    repair: bool = False,
) -> bytes:
    """Make the shards in ``folder`` a checkpoint and return the bytes of its manifest.

    First the index, then the manifest: one conditional create that carries an id drawn for it. A
    lost answer is read back and never repeated. A manifest that is there already is success if
    ``says_the_same``: so is our own after a lost answer, and that of another writer who was
    quicker.

    Args:
        folder: Where all shards lie, proven.
        mine: What is to be said of them.
        headers: Called for the headers of all shards if their plan has no index yet; None:
            readers do with the headers themselves.
        repair: A manifest that cannot be read is written over.

    Raises:
        AlreadyExistsError: another checkpoint's manifest is there; it stays.
        CorruptionError: what is there cannot be read, and is not to be repaired.
        UnavailableError: nobody knows whether it was written; try again.
        CheckpointError: what ``headers`` raises, or the store.
    """
    if headers is not None:
        _put_index(folder.store, mine, headers)
    key = folder.prefix + keys.MANIFEST
    data = manifest.encode(mine)
    try:
        folder.store.put(key, data, if_absent=True)
    except (AlreadyExistsError, OutcomeUnknownError) as cause:
        return _read_back(folder.store, key, mine, data, cause, repair=repair)
    return data


def says_the_same(found: Manifest, mine: Manifest) -> bool:
    """Tell whether a manifest that is there says what ``mine`` would.

    It has our own write id: our answer was lost. Or it lists the same shards: another writer was
    quicker, or an earlier life of this one.
    """
    return found.write_id == mine.write_id or (
        (found.job, found.checkpoint, found.world_size, found.shards)
        == (mine.job, mine.checkpoint, mine.world_size, mine.shards)
    )


def _read_back(
    store: ObjectStore,
    key: str,
    mine: Manifest,
    data: bytes,
    cause: CheckpointError,
    *,
    repair: bool,
) -> bytes:
    try:
        there = store.get(key, length_bytes_max=MANIFEST_BYTES_MAX)
    except NotFoundError:
        raise UnavailableError(f"nobody knows whether {key} was written: try again") from cause
    try:
        found = manifest.decode(there)
    except CorruptionError:
        if not repair:
            raise
        store.put(key, data)
        return data
    if not says_the_same(found, mine):
        raise AlreadyExistsError(f"{key} lists the shards of another checkpoint") from cause
    return there


def _put_index(
    store: ObjectStore, mine: Manifest, headers: Callable[[], Iterable[SegmentHeader]]
) -> None:
    """Write the plan's index unless it is there; it is a convenience, never a condition."""
    key = keys.index_key(mine.job, mine.checkpoint.run, mine.plan)
    try:
        store.head(key)
    except NotFoundError:
        pass
    else:
        return
    found = headers()
    try:
        store.put(key, index.encode(index.build(found)), if_absent=True)
    except (AlreadyExistsError, OutcomeUnknownError):
        log.debug("%s was written meanwhile", key)
    except ExhaustedError as error:
        log.warning("%s: %s", key, error)
