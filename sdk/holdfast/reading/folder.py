"""Bytes of a checkpoint folder in a store: fetched part by part, verified, in bounded memory.

Each part is hashed before one byte of it is used (P3), and copied to where it belongs while the
next ones come; no segment is ever held whole. Headers come first, unverified, and are compared
with the verified bytes before anything else of their segment is used. Units: bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain, groupby, islice

import torch

from holdfast.bucket.folder import CheckpointFolder
from holdfast.errors import ManifestError
from holdfast.format.digest import PART_BYTES, part_digest
from holdfast.format.header import parse_header
from holdfast.format.manifest import Manifest
from holdfast.format.segment import SegmentHeader
from holdfast.reading.dtypes import TORCH
from holdfast.reading.pieces import Part
from holdfast.reading.reader import Copy, Reader
from holdfast.reading.verified_parts import (
    AHEAD_PARTS_COUNT,
    THREADS_COUNT,
    WINDOW_PARTS_COUNT_MIN,
    PartKey,
    VerifiedParts,
)
from holdfast.threads import limit_this_thread


def open_folder(folder: CheckpointFolder, manifest: Manifest) -> Reader:
    """Return a reader of the checkpoint in ``folder``; folder and store stay the caller's.

    Memory beside the targets: ``WINDOW_PARTS_COUNT_MIN`` parts, and a region whose target does
    not lie in one row, while its parts come.

    Raises:
        NotFoundError: a segment is missing.
        ManifestError: a header breaks a rule, or is of another shard than the manifest says.
    """
    # Each part is used once: the whole window can be on its way.
    source = FolderBytes(folder, manifest, ahead=WINDOW_PARTS_COUNT_MIN - 1)
    return Reader(source, manifest.world_size)


class FolderBytes:
    """The ``reader.Bytes`` of a checkpoint folder in a store.

    Args:
        folder: Where the segments are.
        manifest: Of the folder.
        check: Called before each part and ends the reading by raising.
        window: How many parts are held.
        ahead: How many of them are fetched while one is used.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        manifest: Manifest,
        *,
        check: Callable[[], None] = lambda: None,
        window: int = WINDOW_PARTS_COUNT_MIN,
        ahead: int = AHEAD_PARTS_COUNT,
    ) -> None:
        self._folder = folder
        self._shards = manifest.shards
        self._checked: set[int] = set()
        self._parts = VerifiedParts(folder, manifest.shards, check, window, ahead)
        self._copier = ThreadPoolExecutor(1, "holdfast-load", initializer=limit_this_thread)
        with ExitStack() as undo:
            undo.callback(self.close)
            with ThreadPoolExecutor(THREADS_COUNT, "holdfast-read") as pool:
                read = list(pool.map(self._read_header, range(len(self._shards))))
            undo.pop_all()
        self._headers = [header for header, _ in read]
        self._digests = [digest for _, digest in read]

    @property
    def headers(self) -> Sequence[SegmentHeader]:
        """See ``Bytes.headers``."""
        return self._headers

    def close(self) -> None:
        """See ``Bytes.close``."""
        self._copier.shutdown(cancel_futures=True)
        self._parts.close()

    def expect(self, parts: Iterable[Part]) -> None:
        """See ``Bytes.expect``."""
        self._parts.announce(self._order(_Sink.span(part) for part in parts))

    def copy(self, copies: Sequence[Copy], *, expected: bool = False) -> None:
        """See ``Bytes.copy``; in the order in which the bytes lie.

        Raises:
            DigestMismatchError: a part does not match; names shard and part.
            ManifestError: a header has changed since it was read first.
            NotFoundError, TruncatedShardError, UnavailableError: as the store says.
        """
        sinks = [_Sink(copy) for copy in copies if copy.target.numel()]
        sinks.sort(key=lambda sink: (sink.number, sink.begin))
        if not expected:
            self._parts.announce(self._order(_apart(sinks)))
        # On a thread of one core: torch's others would spin where parts are hashed meanwhile.
        self._copier.submit(self._feed_all, sinks).result()

    def verify(self, number: int) -> None:
        """Compare the header with its verified bytes; nothing of the segment was used before.

        Raises:
            ManifestError: it is another one.
        """
        if number not in self._checked:
            if part_digest(self.head(number)) != self._digests[number]:
                key = self._folder.segment_key(self._shards[number])
                raise ManifestError(f"the header of {key} changed while it was read")
            self._checked.add(number)

    def head(self, number: int) -> bytes:
        """Return prefix and header of one segment, verified."""
        end = self._headers[number].data_begin
        keys = parts_of(number, 0, end)
        return b"".join(bytes(self._parts.get(*key)) for key in keys)[:end]

    def stream(self, number: int, begin: int) -> Iterator[memoryview]:
        """Yield the bytes of one segment from ``begin`` to its end, verified.

        Each is valid until the next one is taken.
        """
        keys = parts_of(number, begin, self._shards[number].length_bytes)
        self._parts.announce(keys)
        for key in keys:
            yield self._parts.get(*key)[max(begin - key[1] * PART_BYTES, 0) :]

    def _read_header(self, number: int) -> tuple[SegmentHeader, bytes]:
        shard = self._shards[number]
        head = self._folder.head(shard)
        header = parse_header(head, shard.length_bytes)
        header.expect(shard)
        return header, part_digest(head)

    def _feed_all(self, sinks: Sequence[_Sink]) -> None:
        with torch.no_grad():
            for number, group in groupby(sinks, key=lambda sink: sink.number):
                self.verify(number)
                self._feed(number, list(group))

    def _feed(self, number: int, sinks: Sequence[_Sink]) -> None:
        """Give each part to the sinks that want bytes of it; both are in order."""
        at = 0
        spans = (parts_of(number, sink.begin, sink.end) for sink in sinks)
        for key in sorted(set(chain.from_iterable(spans))):
            begin = key[1] * PART_BYTES
            data = self._parts.get(*key)
            end = begin + len(data)
            while at < len(sinks) and sinks[at].end <= begin:
                at += 1
            for sink in islice(sinks, at, None):
                if sink.begin >= end:
                    break
                sink.write(begin, data)

    def _order(self, spans: Iterable[tuple[int, int, int]]) -> Iterator[PartKey]:
        """Yield each part that ``spans`` (number, begin, end) touch, and of unchecked headers."""
        checked = set(self._checked)
        last: PartKey | None = None
        for number, begin, end in spans:
            if begin == end:
                continue  # an empty tensor asks for no part, not even the one it would lie in
            keys = parts_of(number, begin, end)
            if number not in checked:
                checked.add(number)
                keys = [*parts_of(number, 0, self._headers[number].data_begin), *keys]
            for key in keys:
                if key != last:
                    yield key
                last = key


class _Sink:
    """Takes the bytes ``[begin, end)`` of a segment in any cuts and puts a copy's in its place.

    Those are the rows, along the first dim, that hold the part; a target that does not lie in one
    row, or wants a piece of each row, gets them from a buffer once all have come.
    """

    def __init__(self, copy: Copy) -> None:
        part = copy.part
        self.number, self.begin, self.end = self.span(part)
        self._target = copy.target
        self._dtype = TORCH[part.entry.spec.dtype]
        self._left_bytes = self.end - self.begin
        outer = part.entry.spec.box.lengths
        inner = part.box.lengths
        self._rows = (*inner[:1], *outer[1:])
        self._cut = part.box.within(part.entry.spec.box)[1:]
        self._direct = self._rows == inner and self._target.is_contiguous()
        self._flat = self._target.view(-1) if self._direct else None

    @staticmethod
    def span(part: Part) -> tuple[int, int, int]:
        """Return (number of the segment, begin, end) of the rows that hold ``part``."""
        entry, box = part.entry, part.entry.spec.box
        if part.box == box:
            return part.number, entry.begin, entry.end
        row_bytes = (entry.end - entry.begin) // box.lengths[0]
        begin = entry.begin + (part.box.offsets[0] - box.offsets[0]) * row_bytes
        return part.number, begin, begin + part.box.lengths[0] * row_bytes

    def write(self, at: int, data: memoryview) -> None:
        """Take what is ours of ``data``, which begins at byte ``at`` of the segment."""
        first, last = max(at, self.begin), min(at + len(data), self.end)
        if first >= last:
            return
        if self._flat is None:
            self._flat = torch.empty(self._rows, dtype=self._dtype).view(-1)
        raw = torch.frombuffer(data, dtype=torch.uint8, offset=first - at, count=last - first)
        typed = raw.view(self._dtype)
        begin = (first - self.begin) // self._dtype.itemsize
        self._flat[begin : begin + len(typed)].copy_(typed)
        self._left_bytes -= last - first
        if not self._left_bytes:
            self._finish()

    def _finish(self) -> None:
        flat, self._flat = self._flat, None
        if flat is not None and not self._direct:
            self._target.copy_(flat.view(self._rows)[(slice(None), *self._cut)])


def _apart(sinks: Iterable[_Sink]) -> Iterator[tuple[int, int, int]]:
    """Yield the spans of sorted ``sinks`` without what those before want too: it is read once."""
    at = (0, 0)
    for sink in sinks:
        begin = max(at, (sink.number, sink.begin))[1]
        if begin < sink.end:
            yield sink.number, begin, sink.end
            at = (sink.number, sink.end)


def parts_of(number: int, begin: int, end: int) -> list[PartKey]:
    """Return the parts that hold bytes ``[begin, end)`` of a segment."""
    return [(number, index) for index in range(begin // PART_BYTES, -(-end // PART_BYTES))]
