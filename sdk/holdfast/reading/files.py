"""Bytes of segment files on this machine, mapped privately: writing to a tensor changes no file.

The bytes were verified before (P3); here headers are parsed and nothing is unpickled (P9).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from holdfast.core.ids import ShardId
from holdfast.core.needs import ByteRange
from holdfast.core.shard import Shard
from holdfast.errors import (
    InvalidRequestError,
    NotFoundError,
    NotReadyError,
    TruncatedShardError,
)
from holdfast.format.boxes import span
from holdfast.format.header import parse_header
from holdfast.format.segment import ITEM_BYTES, SegmentHeader, header_length
from holdfast.reading.dtypes import TORCH
from holdfast.reading.pieces import Part
from holdfast.reading.reader import Copy, Reader
from holdfast.reading.transfer import Transfer

Ranges = Sequence[ByteRange]
ParseHeader = Callable[[memoryview, int], SegmentHeader]


def open_files(
    files: Iterable[tuple[Path, Shard]],
    held: Mapping[ShardId, Ranges] | None = None,
    *,
    parse: ParseHeader = parse_header,
) -> Reader:
    """Return a reader of the segments of one checkpoint that lie in ``files``.

    Args:
        files: Where each segment is.
        held: What of a segment is in its file, header included, if not all of it: nothing else of
            it is read.
        parse: How a header is parsed, if some are known already.

    Raises:
        NotFoundError: a file is gone.
        TruncatedShardError: a file is not as long as its shard.
        NotReadyError: a header is not in its file, or not all of it.
        ManifestError: a header breaks a rule, or is of another shard than was asked for.
        InvalidRequestError: the shards are not of one (run, step, generation) and world size.
    """
    source = MappedFiles(files, held or {}, parse)
    return Reader(source, source.world_size)


class MappedFiles:
    """The ``reader.Bytes`` of mapped segment files.

    Invariants: every shard is of one (run, step, generation).
    """

    def __init__(
        self,
        files: Iterable[tuple[Path, Shard]],
        held: Mapping[ShardId, Ranges],
        parse: ParseHeader,
    ) -> None:
        self._parse = parse
        self._held: list[Ranges] = []
        self._maps: list[mmap.mmap] = []
        self._data: list[torch.Tensor] = []
        self._headers: list[SegmentHeader] = []
        shards: list[Shard] = []
        try:
            for path, shard in files:
                self._held.append(held.get(shard.id, ()))
                self._add(path, shard)
                shards.append(shard)
            _check_one_checkpoint(shards)
        except BaseException:
            self.close()
            raise
        self.world_size = shards[0].world_size

    @property
    def headers(self) -> Sequence[SegmentHeader]:
        """See ``Bytes.headers``."""
        return self._headers

    def expect(self, parts: Iterable[Part]) -> None:
        """See ``Bytes.expect``; of what is mapped nothing needs to be fetched."""

    def copy(self, copies: Sequence[Copy], *, expected: bool = False) -> None:
        """See ``Bytes.copy``; by as many threads as there are cores.

        Raises:
            NotReadyError: bytes of a tensor are not in the file; nothing was written.
        """
        del expected
        transfer = Transfer()
        for target, part in copies:
            transfer.add(target, self._view(part))
        transfer.run()

    def close(self) -> None:
        """Unmap everything; idempotent."""
        self._data.clear()
        maps, self._maps = self._maps, []
        for mapping in maps:
            try:
                mapping.close()
            except BufferError:
                continue  # goes with the last tensor that still views it

    def _view(self, part: Part) -> torch.Tensor:
        entry = part.entry
        spec = entry.spec
        self._check_held(part)
        data = self._data[part.number][entry.begin : entry.end]
        view = data.view(TORCH[spec.dtype]).view(spec.box.lengths)
        return view if part.box is spec.box else view[part.box.within(spec.box)]

    def _check_held(self, part: Part) -> None:
        entry = part.entry
        if not part.box.elements_count:
            return
        item_bytes = ITEM_BYTES[entry.spec.dtype]
        begin, end = (n * item_bytes for n in span(entry.spec.box, part.box))
        begin, end = entry.begin + begin, entry.begin + end
        if not _holds(self._held[part.number], begin, end):
            fqn = entry.spec.fqn
            raise NotReadyError(f"bytes of tensor {fqn!r} were not fetched to this node", fqn=fqn)

    def _add(self, path: Path, shard: Shard) -> None:
        mapping = _mapped(path, shard)
        self._maps.append(mapping)
        with memoryview(mapping) as view:
            if not _holds(self._held[-1], 0, header_length(bytes(view[:8]))):
                raise NotReadyError(f"the header of {shard.id.key} was not fetched to this node")
            header = self._parse(view, shard.length_bytes)
        header.expect(shard)
        self._headers.append(header)
        self._data.append(torch.from_numpy(np.frombuffer(mapping, dtype=np.uint8)))


def _holds(ranges: Ranges, begin: int, end: int) -> bool:
    """Tell whether these bytes are among those that a file has; no ranges: it has all."""
    return not ranges or any(held.begin <= begin and end <= held.end for held in ranges)


def _check_one_checkpoint(shards: Sequence[Shard]) -> None:
    if len({(shard.id.checkpoint, shard.world_size) for shard in shards}) != 1:
        raise InvalidRequestError(f"{len(shards)} segments are not of one checkpoint")


def _mapped(path: Path, shard: Shard) -> mmap.mmap:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError as cause:
        raise NotFoundError(f"segment {shard.id.key} is gone from {path}") from cause
    try:
        length_bytes = os.fstat(fd).st_size
        if length_bytes != shard.length_bytes or length_bytes == 0:
            raise TruncatedShardError(
                f"segment {shard.id.key} has {length_bytes} bytes, not {shard.length_bytes}"
            )
        # Not populated: the threads that copy take the faults, side by side.
        return mmap.mmap(fd, length_bytes, access=mmap.ACCESS_COPY)
    finally:
        os.close(fd)
