"""The segments of one checkpoint, mapped and found by tensor name and box.

Whoever holds the bytes and whatever the world size was: a tensor is what its boxes add up to.
The bytes were verified before (P3); here headers are parsed and nothing is unpickled (P9).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch

from holdfast.core.facts import Shard
from holdfast.errors import (
    InvalidRequestError,
    ManifestError,
    NotFoundError,
    NotReadyError,
    TruncatedShardError,
)
from holdfast.format.boxes import Box, covers, intersect, whole
from holdfast.format.segment import SegmentHeader, TensorSpec, parse_header
from holdfast.snapshot.plan import blob_name
from holdfast.state.dtypes import TORCH
from holdfast.state.transfer import Transfer


@dataclass(frozen=True, slots=True)
class _Piece:
    spec: TensorSpec
    data: torch.Tensor


class LoadedSegments:
    """All segments of one checkpoint, mapped privately: writing to a tensor changes no file.

    Invariants: every shard is of one (run, step, generation). Tensors returned are views and
    valid until ``close``; copy what is to live longer.

    Raises:
        NotFoundError: a file is gone.
        TruncatedShardError: a file is not as long as its shard.
        ManifestError: a header breaks a rule, or is of another shard than was asked for.
    """

    def __init__(self, files: Iterable[tuple[Path, Shard]]) -> None:
        self._maps: list[mmap.mmap] = []
        self._pieces: dict[str, list[_Piece]] = {}
        self.world_size = 0
        shards: list[Shard] = []
        try:
            for path, shard in files:
                self._add(path, shard)
                shards.append(shard)
            _check_one_checkpoint(shards)
        except BaseException:
            self.close()
            raise
        self.world_size = shards[0].world_size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def names(self) -> Sequence[str]:
        """Return the name of every tensor of which a part is here."""
        return list(self._pieces)

    def has(self, name: str) -> bool:
        """Tell whether a part of the tensor is here."""
        return name in self._pieces

    def tensor(self, name: str, box: Box | None = None) -> torch.Tensor:
        """Return the tensor, or the region ``box`` of it; no copy if one piece holds it all.

        Raises:
            NotReadyError: pieces are missing; names the tensor and the box.
        """
        pieces = self._pieces.get(name)
        if not pieces:
            raise NotReadyError(f"no segment has the tensor {name!r} {_text(box)}", fqn=name)
        spec = pieces[0].spec
        target = box if box is not None else whole(spec.shape)
        for piece in pieces:
            if piece.spec.box == target:
                return piece.data
            if intersect(piece.spec.box, target) == target:
                return piece.data[target.within(piece.spec.box)]
        if not covers(target, (piece.spec.box for piece in pieces)):
            raise NotReadyError(f"pieces of tensor {name!r} are missing {_text(target)}", fqn=name)
        result = torch.empty(target.lengths, dtype=TORCH[spec.dtype])
        for piece in pieces:
            shared = intersect(piece.spec.box, target)
            if shared is not None:
                result[shared.within(target)] = piece.data[shared.within(piece.spec.box)]
        return result

    def promise(self, name: str) -> torch.Tensor:
        """Return the whole tensor: here the bytes are at hand."""
        return self.tensor(name)

    def transfer(self) -> Transfer:
        """Return copies to be owed: of what is mapped, any will do."""
        return Transfer()

    def blob(self, rank: int) -> bytes:
        """Return the text that ``rank`` saved, without its padding."""
        return self.tensor(blob_name(rank)).numpy().tobytes().rstrip(b" ")

    def close(self) -> None:
        """Unmap everything; idempotent. A mapping with tensors still held goes with the last."""
        self._pieces.clear()
        maps, self._maps = self._maps, []
        for mapping in maps:
            try:
                mapping.close()
            except BufferError:
                continue

    def _add(self, path: Path, shard: Shard) -> None:
        mapping = _mapped(path, shard)
        self._maps.append(mapping)
        data = torch.from_numpy(np.frombuffer(mapping, dtype=np.uint8))
        header = _header(mapping, shard)
        for entry in header.entries:
            spec = entry.spec
            others = self._pieces.setdefault(spec.fqn, [])
            if others and (others[0].spec.shape, others[0].spec.dtype) != (spec.shape, spec.dtype):
                raise ManifestError(f"segments disagree about tensor {spec.fqn!r}", fqn=spec.fqn)
            view = data[entry.begin : entry.end].view(TORCH[spec.dtype]).view(spec.box.lengths)
            others.append(_Piece(spec, view))


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


def _header(mapping: mmap.mmap, shard: Shard) -> SegmentHeader:
    with memoryview(mapping) as data:
        header = parse_header(data, shard.length_bytes)
    found = header.identity
    if (found.id, found.world_size, found.plan_hash) != (
        shard.id,
        shard.world_size,
        shard.plan_hash,
    ):
        raise ManifestError(f"{found.id.key} lies where {shard.id.key} should", shard=shard.id.key)
    return header


def _text(box: Box | None) -> str:
    return "" if box is None else f"at {list(box.offsets)} + {list(box.lengths)}"
