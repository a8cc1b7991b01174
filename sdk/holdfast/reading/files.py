"""Bytes of segment files on this machine: read into tensors, mapped where they lie otherwise.

The bytes were verified before (P3); here headers are parsed and nothing is unpickled (P9).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from holdfast.copying.cuda import CUDA
from holdfast.copying.port import Device, Devices
from holdfast.copying.stream_loader import load
from holdfast.core.ids import ShardId
from holdfast.core.needs import ByteRange
from holdfast.core.shard import Shard
from holdfast.errors import (
    InvalidRequestError,
    NotReadyError,
)
from holdfast.format.header import parse_header
from holdfast.format.segment import ITEM_BYTES, SegmentHeader, header_length
from holdfast.reading.dtypes import TORCH
from holdfast.reading.pieces import Part
from holdfast.reading.reader import Copy, Reader
from holdfast.reading.registered import registered
from holdfast.reading.segment_file import SegmentFile
from holdfast.reading.transfer import Transfer, as_in_memory

Ranges = Sequence[ByteRange]
ParseHeader = Callable[[bytes, int], SegmentHeader]


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
    source = SegmentFiles(files, held or {}, parse, devices)
    return Reader(source, source.world_size)


class SegmentFiles:
    """The ``reader.Bytes`` of segment files.

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
        self._files: list[SegmentFile] = []
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
        """See ``Bytes.expect``; of what is in files here nothing needs to be fetched."""

    def copy(self, copies: Sequence[Copy], *, expected: bool = False) -> None:
        """See ``Bytes.copy``; by as many threads as there are cores, or by an accelerator.

        Raises:
            NotReadyError: bytes of a tensor are not in the file; nothing was written.
            TruncatedShardError: a file has become shorter.
            UnavailableError: an accelerator does not go on, or a file cannot be read.
            RuntimeError: an accelerator fails, or has no memory left.
        """
        del expected
        transfer = Transfer()
        far: dict[Device, list[Copy]] = {}
        for copy in copies:
            target, part = copy
            if not part.box.elements_count:
                continue
            begin, end = _bytes_of(part)
            self._check_held(part, begin, end)
            device, file = self._devices.of(target), self._files[part.number]
            if device is not None:
                far.setdefault(device, []).append(copy)
            elif not (_is_as_stored(copy, end - begin) and transfer.read(target, file.read, begin)):
                transfer.add(target, _view(part, file.data()))
        for device, group in far.items():
            self._load(device, group)
        transfer.run()

    def _load(self, device: Device, copies: Sequence[Copy]) -> None:
        """Fill targets on ``device`` from memory that its driver knows, where it lets it."""
        ranges: dict[int, list[tuple[int, int]]] = {}
        for _, part in copies:
            ranges.setdefault(part.number, []).append(_bytes_of(part))
        with ExitStack() as lent:
            files = self._files
            data = {
                number: lent.enter_context(
                    registered(device, files[number].path, files[number].inode, wanted)
                )
                for number, wanted in ranges.items()
            }
            pairs = []
            for target, part in copies:
                known = data[part.number]
                source = _view(part, files[part.number].data() if known is None else known)
                pairs.append(as_in_memory(target.detach(), source))
            del data, known, source
            load(device, pairs)

    def close(self) -> None:
        """Close everything; idempotent."""
        for file in self._files:
            file.close()

    def _check_held(self, part: Part, begin: int, end: int) -> None:
        if not _holds(self._held[part.number], begin, end):
            fqn = part.entry.spec.fqn
            raise NotReadyError(f"bytes of tensor {fqn!r} were not fetched to this node", fqn=fqn)

    def _add(self, path: Path, shard: Shard) -> None:
        file = SegmentFile(path, shard)
        self._files.append(file)
        head_bytes = header_length(file.head(8))
        if not _holds(self._held[-1], 0, head_bytes):
            raise NotReadyError(f"the header of {shard.id.key} was not fetched to this node")
        header = self._parse(file.head(head_bytes), shard.length_bytes)
        header.expect(shard)
        self._headers.append(header)


def _view(part: Part, data: torch.Tensor) -> torch.Tensor:
    entry = part.entry
    spec = entry.spec
    view = data[entry.begin : entry.end].view(TORCH[spec.dtype]).view(spec.box.lengths)
    return view if part.box is spec.box else view[part.box.within(spec.box)]


def _is_as_stored(copy: Copy, length_bytes: int) -> bool:
    """Tell whether the target gets the very bytes that lie, ``length_bytes`` long, in the file."""
    target, part = copy
    # Between the rows of a box that is cut along another dim than the first, there is more.
    return target.nbytes == length_bytes and target.dtype == TORCH[part.entry.spec.dtype]


def _holds(ranges: Ranges, begin: int, end: int) -> bool:
    """Tell whether these bytes are among those that a file has; no ranges: it has all."""
    return not ranges or any(held.begin <= begin and end <= held.end for held in ranges)


def _check_one_checkpoint(shards: Sequence[Shard]) -> None:
    if len({(shard.id.checkpoint, shard.world_size) for shard in shards}) != 1:
        raise InvalidRequestError(f"{len(shards)} segments are not of one checkpoint")


def _bytes_of(part: Part) -> tuple[int, int]:
    """Return where the bytes of ``part`` begin and end in its file, with those between them."""
    _, entry, _, _, (first, last) = part
    item_bytes = ITEM_BYTES[entry.spec.dtype]
    return entry.begin + first * item_bytes, entry.begin + last * item_bytes
