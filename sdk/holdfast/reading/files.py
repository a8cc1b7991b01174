"""Bytes of segment files on this machine, mapped privately: writing to a tensor changes no file.

The bytes were verified before (P3); here headers are parsed and nothing is unpickled (P9).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

from holdfast.copying.cuda import CUDA
from holdfast.copying.port import Device, Devices
from holdfast.copying.stream_loader import load
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
from holdfast.reading.registered import registered
from holdfast.reading.transfer import Transfer, as_in_memory

Ranges = Sequence[ByteRange]
ParseHeader = Callable[[memoryview, int], SegmentHeader]


def open_files(
    files: Iterable[tuple[Path, Shard]],
    held: Mapping[ShardId, Ranges] | None = None,
    *,
    parse: ParseHeader = parse_header,
    devices: Devices = CUDA,
) -> Reader:
    """Return a reader of the segments of one checkpoint that lie in ``files``.

    Args:
        files: Where each segment is.
        held: What of a segment is in its file, header included, if not all of it: nothing else of
            it is read.
        parse: How a header is parsed, if some are known already.
        devices: Accelerators that tensors may be on.

    Raises:
        NotFoundError: a file is gone.
        TruncatedShardError: a file is not as long as its shard.
        NotReadyError: a header is not in its file, or not all of it.
        ManifestError: a header breaks a rule, or is of another shard than was asked for.
        InvalidRequestError: the shards are not of one (run, step, generation) and world size.
    """
    source = MappedFiles(files, held or {}, parse, devices)
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
        devices: Devices,
    ) -> None:
        self._parse = parse
        self._devices = devices
        self._held: list[Ranges] = []
        self._maps: list[mmap.mmap] = []
        self._data: list[torch.Tensor] = []
        self._files: list[tuple[Path, tuple[int, int]]] = []
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
        """See ``Bytes.copy``; by as many threads as there are cores, or by an accelerator.

        Raises:
            NotReadyError: bytes of a tensor are not in the file; nothing was written.
            UnavailableError: an accelerator does not go on.
            RuntimeError: it fails, or has no memory left.
        """
        del expected
        transfer = Transfer()
        far: dict[Device, list[Copy]] = {}
        for copy in copies:
            self._check_held(copy.part)
            device = self._devices.of(copy.target)
            if device is None:
                transfer.add(copy.target, self._view(copy.part, self._data[copy.part.number]))
            else:
                far.setdefault(device, []).append(copy)
        for device, group in far.items():
            self._load(device, group)
        transfer.run()

    def _load(self, device: Device, copies: Sequence[Copy]) -> None:
        """Fill targets on ``device`` from memory that its driver knows, where it lets it."""
        ranges: dict[int, list[tuple[int, int]]] = {}
        for _, part in copies:
            ranges.setdefault(part.number, []).append(_bytes_of(part))
        with ExitStack() as lent:
            data = {
                number: lent.enter_context(registered(device, *self._files[number], wanted))
                for number, wanted in ranges.items()
            }
            pairs = []
            for target, part in copies:
                known = data[part.number]
                source = self._view(part, self._data[part.number] if known is None else known)
                pairs.append(as_in_memory(target.detach(), source))
            del data, known, source
            load(device, pairs)

    def close(self) -> None:
        """Unmap everything; idempotent."""
        self._data.clear()
        maps, self._maps = self._maps, []
        for mapping in maps:
            try:
                mapping.close()
            except BufferError:
                continue  # goes with the last tensor that still views it

    @staticmethod
    def _view(part: Part, data: torch.Tensor) -> torch.Tensor:
        entry = part.entry
        spec = entry.spec
        view = data[entry.begin : entry.end].view(TORCH[spec.dtype]).view(spec.box.lengths)
        return view if part.box is spec.box else view[part.box.within(spec.box)]

    def _check_held(self, part: Part) -> None:
        if part.box.elements_count and not _holds(self._held[part.number], *_bytes_of(part)):
            fqn = part.entry.spec.fqn
            raise NotReadyError(f"bytes of tensor {fqn!r} were not fetched to this node", fqn=fqn)

    def _add(self, path: Path, shard: Shard) -> None:
        mapping, inode = _mapped(path, shard)
        self._maps.append(mapping)
        self._files.append((path, inode))
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


def _bytes_of(part: Part) -> tuple[int, int]:
    """Return where the bytes of ``part`` begin and end in its file, with those between them."""
    entry = part.entry
    item_bytes = ITEM_BYTES[entry.spec.dtype]
    begin, end = (n * item_bytes for n in span(entry.spec.box, part.box))
    return entry.begin + begin, entry.begin + end


def _mapped(path: Path, shard: Shard) -> tuple[mmap.mmap, tuple[int, int]]:
    """Return the mapping of a file, and which file it is: device and number."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError as cause:
        raise NotFoundError(f"segment {shard.id.key} is gone from {path}") from cause
    try:
        found = os.fstat(fd)
        length_bytes = found.st_size
        if length_bytes != shard.length_bytes or length_bytes == 0:
            raise TruncatedShardError(
                f"segment {shard.id.key} has {length_bytes} bytes, not {shard.length_bytes}"
            )
        # Not populated: the threads that copy take the faults, side by side.
        mapping = mmap.mmap(fd, length_bytes, access=mmap.ACCESS_COPY)
        return mapping, (found.st_dev, found.st_ino)
    finally:
        os.close(fd)
