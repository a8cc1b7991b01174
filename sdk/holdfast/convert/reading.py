"""A stored checkpoint as a ``TensorSource``: tensors put together from the boxes of all ranks.

Every part is verified while it is read (P3), headers too before anything of them is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch

from holdfast.bucket.folder import CheckpointFolder
from holdfast.convert.source import spec_of
from holdfast.format import blob
from holdfast.format.names import blob_rank
from holdfast.format.segment import SegmentHeader, TensorSpec
from holdfast.reading.folder import FolderBytes
from holdfast.reading.reader import Reader
from holdfast.reading.verified_parts import window_for


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
        count = len(self.manifest.shards)
        self._bytes = FolderBytes(folder, self.manifest, check=check, window=window_for(count))
        with ExitStack() as on_failure:
            on_failure.callback(self._bytes.close)
            self._reader = Reader(self._bytes, self.manifest.world_size)
            for number in range(count):
                self._bytes.verify(number)
            self._reader.check_whole()
            on_failure.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading."""
        self._reader.close()

    @property
    def headers(self) -> Sequence[SegmentHeader]:
        """The header of every segment, in the order of the manifest."""
        return self._bytes.headers

    def specs(self) -> Sequence[TensorSpec]:
        """Return all tensors but the ranks' state, in the order of the files."""
        found = self._reader.specs().values()
        return [spec_of(s.fqn, s.dtype, s.shape) for s in found if blob_rank(s.fqn) is None]

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield these tensors, whole; each is new memory."""
        return self._reader.tensors(names)

    def state(self) -> Mapping[int, Any]:
        """Return what each rank saved besides tensors, as the JSON of format-v1 section 4."""
        ranks = map(blob_rank, self._reader.specs())
        known = sorted(rank for rank in ranks if rank is not None)
        return {rank: blob.parse(self._reader.blob(rank)) for rank in known}

    def values(self) -> Mapping[str, Any]:
        """Return nothing: all a checkpoint says is in tensors and state."""
        return {}

    def stream(self, file: int, begin: int) -> Iterator[memoryview]:
        """Yield the bytes of one segment from ``begin`` to its end, verified."""
        return self._bytes.stream(file, begin)

    def head(self, file: int) -> bytes:
        """Return prefix and header of one segment."""
        return self._bytes.head(file)
