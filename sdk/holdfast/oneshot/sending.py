"""Sends segments of a checkpoint by path, part by part, straight from the tensors.

Memory is bounded by ``THREADS_COUNT`` parts, whatever the size of the state. What was sent can be
made to appear by any process that sees the store. Units: bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from holdfast.bucket.folder import CheckpointFolder
from holdfast.bucket.publish import put_sidecar
from holdfast.bucket.writing import SegmentWriter
from holdfast.core.shard import Shard
from holdfast.errors import ConflictError, CorruptionError, NotFoundError, OutcomeUnknownError
from holdfast.format.digest import root_digest
from holdfast.format.sidecar import Sidecar
from holdfast.objectstore import Upload, UploadedPart

THREADS_COUNT = 4

Fill = Callable[[int, memoryview], None]
"""Called as ``fill(begin, view)``: puts the bytes of the segment from ``begin`` on into view."""


@dataclass(frozen=True, slots=True)
class SentSegment:
    """A segment whose bytes are in the store; ``finish`` makes them appear."""

    sidecar: Sidecar
    upload: Upload
    parts: Sequence[UploadedPart]

    def finish(self, folder: CheckpointFolder) -> None:
        """Make the segment appear, check it, then write its sidecar: only if there is none.

        Raises:
            AlreadyExistsError, ConflictError: another save has finished its own meanwhile.
            CorruptionError: what is there is not what was sent.
        """
        folder.store.finish(self.upload, self.parts)
        try:
            put_sidecar(folder, self.sidecar, if_absent=True)
        except OutcomeUnknownError:
            pass  # ``check_ours`` reads it back
        except CorruptionError:
            self.check_ours(folder, sidecar=False)
            raise

    def check_ours(self, folder: CheckpointFolder, *, sidecar: bool = True) -> None:
        """Do nothing if segment and sidecar there are this save's: the header names the save.

        Raises:
            ConflictError: another save is writing into the folder.
        """
        shard = self.sidecar.shard
        try:
            folder.check_length(shard)
            folder.header(shard)
            if sidecar:
                folder.sidecar(shard)
        except (NotFoundError, CorruptionError) as cause:
            raise ConflictError(
                f"another save is writing into {folder.store.url}: {cause.message}"
            ) from cause


def send(folder: CheckpointFolder, shard: Shard, fill: Fill, undo: ExitStack) -> SentSegment:
    """Send the bytes of a segment; ``undo`` forgets them.

    Args:
        folder: Where it will appear.
        shard: What it is, as far as that is known: its root digest comes of the sending.
        fill: Gives its bytes.
        undo: Gets what forgets the upload.
    """
    writer = SegmentWriter(folder.store, folder.segment_key(shard), shard.length_bytes)
    undo.callback(writer.abort)
    _send_parts(writer, fill)
    digests = writer.digests()
    known = replace(shard, root_digest=root_digest(shard.length_bytes, digests))
    return SentSegment(Sidecar(shard=known, digests=digests), writer.upload, writer.parts())


def filler(texts: Iterable[tuple[int, bytes]], tensors: Iterable[tuple[int, torch.Tensor]]) -> Fill:
    """Return what gives the bytes of a segment, any range, as the tensors are when it is called.

    Parts begin at multiples of every item size, so no element is ever cut.

    Args:
        texts: Header and text, each with where it begins.
        tensors: The rest, on any device and in any layout.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()  # the threads that copy do not share the caller's streams
    pieces = sorted(
        [(begin, len(text), torch.frombuffer(bytearray(text), dtype=torch.uint8))
         for begin, text in texts if text]
        + [(begin, tensor.nbytes, tensor.detach()) for begin, tensor in tensors if tensor.nbytes],
        key=lambda piece: piece[0],
    )  # fmt: skip
    begins = [begin for begin, _, _ in pieces]

    def fill(begin: int, view: memoryview) -> None:
        target, end = torch.frombuffer(view, dtype=torch.uint8), begin + len(view)
        at = max(bisect_right(begins, begin) - 1, 0)
        while at < len(pieces) and pieces[at][0] < end:
            start, length_bytes, source = pieces[at]
            first, last = max(begin, start), min(end, start + length_bytes)
            if first < last:
                _copy(target[first - begin : last - begin], source, first - start, last - start)
            at += 1

    return fill


def _copy(target: torch.Tensor, source: torch.Tensor, begin: int, end: int) -> None:
    """Copy bytes ``[begin, end)`` of ``source``, from whatever device and in row-major order."""
    piece = _elements(source, begin // source.itemsize, end // source.itemsize)
    target.view(piece.dtype).copy_(piece.resolve_conj().resolve_neg())


def _elements(source: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Return elements ``[first, last)`` in row-major order.

    Of a tensor that does not lie so no more is copied than the rows that hold them, at the depth
    where there are several: one of many parts must not cost a whole copy.
    """
    while not source.is_contiguous():
        row = source[0].numel()
        top, bottom = first // row, -(-last // row)
        source, first, last = source[top:bottom], first - top * row, last - top * row
        if bottom - top > 1:
            break
        source = source[0]
    return source.reshape(-1)[first:last]


def _send_parts(writer: SegmentWriter, fill: Fill) -> None:
    """Make and send the segment part by part, several side by side."""

    def send(number: int) -> None:
        begin, end = writer.range(number)
        data = memoryview(bytearray(end - begin))
        fill(begin, data)
        writer.put(number, data)

    with ThreadPoolExecutor(THREADS_COUNT, "holdfast-save") as pool:
        try:
            for _ in pool.map(send, range(writer.count)):
                pass
        finally:
            pool.shutdown(cancel_futures=True)
