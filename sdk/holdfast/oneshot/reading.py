"""Reads tensors of one checkpoint folder: streamed, verified, in bounded memory.

Headers say where tensors lie. Their bytes are read window by window, each part hashed before one
byte of it is used (P3), and copied to where they belong; no segment is ever held whole. Headers
come first, unverified, and are compared with the verified bytes before anything else of their
segment is used. Units: bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby, islice

import torch

from holdfast.bucket.folder import CheckpointFolder
from holdfast.errors import ManifestError, NotReadyError
from holdfast.format.boxes import Box, covers, whole
from holdfast.format.digest import PART_BYTES
from holdfast.format.manifest import Manifest
from holdfast.format.segment import SegmentHeader, TensorEntry, parse_header
from holdfast.format.sidecar import Sidecar
from holdfast.snapshot.plan import blob_name
from holdfast.state.dtypes import TORCH
from holdfast.state.transfer import Transfer

WINDOW_PARTS = 8
WINDOW_BYTES = WINDOW_PARTS * PART_BYTES
THREADS_COUNT = 8


@dataclass(frozen=True, slots=True)
class _Piece:
    """One box of one tensor, in the segment ``number``."""

    number: int
    entry: TensorEntry


class _Sink:
    """Takes the bytes of one piece in any cuts; ``finish`` once all are there."""

    def __init__(self, target: torch.Tensor, piece: _Piece) -> None:
        self.piece = piece
        spec = piece.entry.spec
        self._region = target[spec.box.within(whole(spec.shape))] if spec.shape else target
        # Bytes go straight to where they belong if those lie in one row.
        self._staged = not self._region.is_contiguous()
        held = torch.empty(spec.box.lengths, dtype=target.dtype) if self._staged else self._region
        self._flat = held.view(-1)

    def write(self, begin: int, data: torch.Tensor) -> None:
        """Take ``data``, the bytes of the piece from ``begin`` on."""
        item = self._flat.itemsize
        typed = data.view(self._flat.dtype)
        self._flat[begin // item : begin // item + len(typed)].copy_(typed)

    def finish(self) -> None:
        """Put what was staged in its place."""
        if self._staged:
            self._region.copy_(self._flat.view(self._region.shape))


class FolderSegments:
    """The segments of one checkpoint folder, as ``state.capture`` reads them.

    Tensors returned by ``tensor`` are the caller's own. Folder and store stay the caller's.

    Raises:
        NotFoundError: a segment or sidecar is missing.
        ManifestError: a header breaks a rule, or segments disagree about a tensor.
    """

    def __init__(self, folder: CheckpointFolder, manifest: Manifest) -> None:
        self.world_size = manifest.world_size
        self._folder = folder
        self._shards = manifest.shards
        self._pool = ThreadPoolExecutor(THREADS_COUNT, "holdfast-load")
        self._pieces: dict[str, list[_Piece]] = {}
        self._sidecars: dict[int, Sidecar] = {}
        self._checked: set[int] = set()
        self._promised: dict[int, tuple[torch.Tensor, str]] = {}
        self._window = memoryview(bytearray(0))
        self._held: tuple[int, int, set[int]] = (-1, 0, set())
        with ExitStack() as undo:
            undo.callback(self.close)
            self._headers = list(self._pool.map(folder.header, manifest.shards))
            for number, header in enumerate(self._headers):
                self._add(number, header)
            undo.pop_all()

    def close(self) -> None:
        """End the threads; what was returned stays."""
        self._pool.shutdown(cancel_futures=True)

    def names(self) -> Sequence[str]:
        """Return the name of every tensor of the checkpoint."""
        return list(self._pieces)

    def has(self, name: str) -> bool:
        """Tell whether any part of the tensor is there."""
        return name in self._pieces

    def tensor(self, name: str) -> torch.Tensor:
        """Return the whole tensor, read now."""
        promise = self._shape(name)
        result = torch.empty(promise.shape, dtype=promise.dtype)
        self.read([(result, name)])
        return result

    def promise(self, name: str) -> torch.Tensor:
        """Return a tensor without bytes that ``transfer()`` takes for the real one."""
        promise = self._shape(name)
        self._promised[id(promise)] = (promise, name)
        return promise

    def transfer(self) -> Transfer:
        """Return copies to be owed; its ``run`` streams what was promised."""
        return _Streamed(self)

    def blob(self, rank: int) -> bytes:
        """Return the text that ``rank`` saved, without its padding."""
        return self.tensor(blob_name(rank)).numpy().tobytes().rstrip(b" ")

    def promised(self, source: torch.Tensor) -> str | None:
        """Return the name of the tensor that ``source`` stands for, or None."""
        found = self._promised.get(id(source))
        return found[1] if found is not None else None

    def read(self, wanted: Iterable[tuple[torch.Tensor, str]]) -> None:
        """Fill each target with the tensor of its name, in the order in which they lie there.

        Raises:
            DigestMismatchError: a part does not match; names shard and part.
            NotFoundError, TruncatedShardError, UnavailableError: as the store says.
        """
        sinks = [_Sink(target, piece) for target, name in wanted for piece in self._chosen(name)]
        sinks.sort(key=lambda sink: (sink.piece.number, sink.piece.entry.begin))
        for number, group in groupby(sinks, key=lambda sink: sink.piece.number):
            self._read_segment(number, list(group))

    def _read_segment(self, number: int, sinks: Sequence[_Sink]) -> None:
        if number not in self._checked:
            self._check_header(number)
        at = 0
        for begin, parts in _windows([sink.piece.entry for sink in sinks]):
            self._fetch(number, begin, parts)
            end = begin + WINDOW_BYTES
            while at < len(sinks) and sinks[at].piece.entry.end <= begin:
                at += 1
            for sink in islice(sinks, at, None):
                entry = sink.piece.entry
                first, last = max(begin, entry.begin), min(end, entry.end)
                if first >= end:
                    break
                if first < last:
                    data = torch.frombuffer(
                        self._window, dtype=torch.uint8, offset=first - begin, count=last - first
                    )
                    sink.write(first - entry.begin, data)
        for sink in sinks:
            sink.finish()

    def _check_header(self, number: int) -> None:
        """Read the header again, verified; nothing of the segment was used before (P3)."""
        shard, header = self._shards[number], self._headers[number]
        self._sidecars[number] = self._folder.sidecar(shard)
        # It fits a window: see HEADER_BYTES_MAX.
        self._fetch(number, 0, set(range(-(-header.data_begin // PART_BYTES))))
        if parse_header(self._window[: header.data_begin], shard.length_bytes) != header:
            raise ManifestError(
                f"the header of {self._folder.segment_key(shard)} changed while it was read"
            )
        self._checked.add(number)

    def _fetch(self, number: int, begin: int, parts: set[int]) -> None:
        """Have ``parts``, which lie in the window at ``begin``, in memory, verified."""
        if self._held[:2] != (number, begin):
            self._held = (number, begin, set())
        shard, sidecar = self._shards[number], self._sidecars[number]
        if len(self._window) < min(WINDOW_BYTES, shard.length_bytes - begin):
            self._window = memoryview(bytearray(min(WINDOW_BYTES, shard.length_bytes)))
        held = self._held[2]

        def fetch(index: int) -> int:
            at = index * PART_BYTES
            end = min(at + PART_BYTES, shard.length_bytes)
            self._folder.fetch_part(sidecar, index, self._window[at - begin : end - begin])
            return index

        for index in self._pool.map(fetch, sorted(parts - held)):
            held.add(index)

    def _add(self, number: int, header: SegmentHeader) -> None:
        for entry in header.entries:
            spec = entry.spec
            others = self._pieces.setdefault(spec.fqn, [])
            if others:
                first = others[0].entry.spec
                if (first.shape, first.dtype) != (spec.shape, spec.dtype):
                    raise ManifestError(f"segments disagree about tensor {spec.fqn!r}")
            others.append(_Piece(number, entry))

    def _chosen(self, name: str) -> Iterator[_Piece]:
        """Yield the pieces that make up the tensor; one alone if it is whole."""
        pieces = self._pieces[name]
        target = whole(pieces[0].entry.spec.shape)
        alone = next((piece for piece in pieces if piece.entry.spec.box == target), None)
        yield from [alone] if alone is not None else pieces

    def _shape(self, name: str) -> torch.Tensor:
        pieces = self._pieces.get(name)
        if not pieces:
            raise NotReadyError(f"the checkpoint has no tensor {name!r}", fqn=name)
        spec = pieces[0].entry.spec
        boxes: list[Box] = [piece.entry.spec.box for piece in self._chosen(name)]
        if not covers(whole(spec.shape), boxes):
            raise NotReadyError(f"pieces of tensor {name!r} are missing", fqn=name)
        return torch.empty(spec.shape, dtype=TORCH[spec.dtype], device="meta")


class _Streamed(Transfer):
    """Copies whose sources are promises of a folder."""

    def __init__(self, segments: FolderSegments) -> None:
        super().__init__()
        self._segments = segments
        self._owed: list[tuple[torch.Tensor, str]] = []

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See ``Transfer.add``."""
        name = self._segments.promised(source)
        if name is None:
            super().add(target, source)
        else:
            self._owed.append((target.detach(), name))

    def run(self) -> None:
        """See ``Transfer.run``."""
        owed, self._owed = self._owed, []
        with torch.no_grad():
            self._segments.read(owed)
        super().run()


def _windows(entries: Sequence[TensorEntry]) -> Iterator[tuple[int, set[int]]]:
    """Yield (begin of a window, parts in it that hold bytes of ``entries``), in order."""
    parts = {
        index
        for entry in entries
        if entry.begin < entry.end
        for index in range(entry.begin // PART_BYTES, (entry.end - 1) // PART_BYTES + 1)
    }
    for window, group in groupby(sorted(parts), key=lambda index: index // WINDOW_PARTS):
        yield window * WINDOW_BYTES, set(group)
