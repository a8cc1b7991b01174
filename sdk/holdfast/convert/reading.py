"""A stored checkpoint as a ``TensorSource``: tensors put together from the boxes of all ranks.

Reads headers first, then ranges, in the order of the files; a tensor may lie in one box or in
many, on several ranks and volumes. Every part is verified while it is read (P3).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

import torch

from holdfast.bucket.folder import CheckpointFolder
from holdfast.convert.parts import PartKey, VerifiedParts, parts_of
from holdfast.convert.source import spec_of, state_rank
from holdfast.core.facts import Shard
from holdfast.errors import ManifestError, NotReadyError
from holdfast.format.boxes import Box, covers, whole
from holdfast.format.digest import PART_BYTES
from holdfast.format.segment import (
    SegmentHeader,
    TensorEntry,
    TensorSpec,
    header_length,
    parse_header,
)
from holdfast.state.dtypes import TORCH

STATE_BYTES_MAX = 256 << 20


@dataclass(frozen=True, slots=True)
class _Piece:
    file: int
    entry: TensorEntry


class CheckpointReader:
    """The tensors of one checkpoint in a store; a context manager.

    ``check`` is called before each part of 16 MiB and ends the reading by raising.

    Raises:
        NotFoundError: no manifest, or a shard is missing.
        CorruptionError: a header, sidecar or part is not what was sealed.
        NotReadyError: boxes of a tensor are missing.
    """

    def __init__(self, folder: CheckpointFolder, check: Callable[[], None] = lambda: None) -> None:
        self.manifest = folder.manifest()
        shards = self.manifest.shards
        self.sidecars = [folder.sidecar(shard) for shard in shards]
        self._parts = VerifiedParts(folder, self.sidecars, check)
        self._pieces: dict[str, list[_Piece]] = {}
        self._state: dict[int, TensorEntry] = {}
        with ExitStack() as on_failure:
            on_failure.callback(self.close)
            self.headers = [self._header(at, shard) for at, shard in enumerate(shards)]
            for file, header in enumerate(self.headers):
                for entry in header.entries:
                    self._add(_Piece(file, entry))
            self._check_whole()
            on_failure.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading."""
        self._parts.close()

    def specs(self) -> Sequence[TensorSpec]:
        """Return all tensors but the ranks' state, in the order of the files."""
        first = (pieces[0].entry.spec for name, pieces in self._pieces.items() if not _hidden(name))
        return [spec_of(spec.fqn, spec.dtype, spec.shape) for spec in first]

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield these tensors, whole; each is new memory."""
        self._parts.announce(self._order(names))
        for name in names:
            yield name, self._tensor(name)

    def state(self) -> Mapping[int, Any]:
        """Return what each rank saved besides tensors, as the JSON of format-v1 section 4."""
        found: dict[int, Any] = {}
        for name in self._pieces:
            rank = state_rank(name)
            if rank is not None:
                found[rank] = self._read_state(name)
        return dict(sorted(found.items()))

    def values(self) -> Mapping[str, Any]:
        """Return nothing: all a checkpoint says is in tensors and state."""
        return {}

    def stream(self, file: int, begin: int) -> Iterator[memoryview]:
        """Yield the bytes of one segment from ``begin`` to its end, verified."""
        end = self.sidecars[file].shard.length_bytes
        keys = parts_of(file, begin, end)
        self._parts.announce(keys)
        for key in keys:
            yield self._parts.get(*key)[max(begin - key[1] * PART_BYTES, 0) :]

    def head(self, file: int) -> bytes:
        """Return prefix and header of one segment."""
        data_begin = self.headers[file].data_begin
        keys = parts_of(file, 0, data_begin)
        return b"".join(self._parts.get(*key) for key in keys)[:data_begin]

    def _header(self, file: int, shard: Shard) -> SegmentHeader:
        data = bytearray(self._parts.get(file, 0))
        length = min(header_length(bytes(data[:8])), shard.length_bytes)
        for number in range(1, -(-length // PART_BYTES)):
            data += self._parts.get(file, number)
        header = parse_header(bytes(data), shard.length_bytes)
        identity = header.identity
        named = (identity.id, identity.job, identity.world_size, identity.plan_hash)
        if named != (shard.id, shard.job, shard.world_size, shard.plan_hash):
            raise ManifestError(f"segment {identity.id.key} lies where {shard.id.key} should")
        return header

    def _add(self, piece: _Piece) -> None:
        spec = piece.entry.spec
        others = self._pieces.setdefault(spec.fqn, [])
        if others:
            first = others[0].entry.spec
            if (first.shape, first.dtype) != (spec.shape, spec.dtype):
                raise ManifestError(f"segments disagree about tensor {spec.fqn!r}", fqn=spec.fqn)
            if any(other.entry.spec.box == spec.box for other in others):
                return  # saved twice; either will do
        others.append(piece)

    def _check_whole(self) -> None:
        for name, pieces in self._pieces.items():
            boxes = [piece.entry.spec.box for piece in pieces]
            if not covers(whole(pieces[0].entry.spec.shape), boxes):
                raise NotReadyError(f"pieces of tensor {name!r} are missing", fqn=name)

    def _order(self, names: Sequence[str]) -> Iterator[PartKey]:
        last: PartKey | None = None
        for name in names:
            for piece in self._pieces[name]:
                for key in parts_of(piece.file, piece.entry.begin, piece.entry.end):
                    if key != last:
                        yield key
                    last = key

    def _tensor(self, name: str) -> torch.Tensor:
        pieces = self._pieces[name]
        spec = pieces[0].entry.spec
        result = _empty(spec.dtype, whole(spec.shape))
        for piece in pieces:
            box = piece.entry.spec.box
            target = result[box.within(whole(spec.shape))] if spec.shape else result
            if target.is_contiguous():
                self._fill(target, piece)
            else:
                part = _empty(spec.dtype, box)
                self._fill(part, piece)
                target.copy_(part)
        return result

    def _fill(self, target: torch.Tensor, piece: _Piece) -> None:
        if not target.numel():
            return
        view = target.reshape(-1).view(torch.uint8).numpy().data
        begin, end = piece.entry.begin, piece.entry.end
        for file, number in parts_of(piece.file, begin, end):
            base = number * PART_BYTES
            low, high = max(begin, base), min(end, base + PART_BYTES)
            view[low - begin : high - begin] = self._parts.get(file, number)[
                low - base : high - base
            ]

    def _read_state(self, name: str) -> Any:
        spec = self._pieces[name][0].entry.spec
        if spec.dtype != "U8" or spec.length_bytes > STATE_BYTES_MAX:
            raise ManifestError(f"{name} is no text of at most {STATE_BYTES_MAX} bytes")
        text = self._tensor(name).numpy().tobytes().rstrip(b" ")
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as cause:
            raise ManifestError(f"{name} is not JSON: {cause}") from cause


def _hidden(name: str) -> bool:
    return state_rank(name) is not None


def _empty(dtype: str, box: Box) -> torch.Tensor:
    return torch.empty(box.lengths, dtype=TORCH[dtype])
