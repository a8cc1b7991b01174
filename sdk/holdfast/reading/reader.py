"""The one reader of a checkpoint: fills targets with regions of its tensors.

What is asked for is checked as a whole before the first byte is read; how bytes come is the
affair of ``Bytes``: files that are mapped, or verified parts of a folder in a store. Nothing is
unpickled (P9).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import NamedTuple, Protocol, Self

import torch

from holdfast.errors import InvalidRequestError, ManifestError
from holdfast.format.blob import BLOB_BYTES_MAX
from holdfast.format.boxes import Box, whole
from holdfast.format.flat_ranges import boxes_of, is_range
from holdfast.format.names import blob_name
from holdfast.format.segment import SegmentHeader, TensorSpec
from holdfast.garbage import no_collection
from holdfast.reading.dtypes import TORCH
from holdfast.reading.pieces import Part, Pieces


class Want(NamedTuple):
    """``target`` is to hold the region ``box`` of the tensor ``name``; shape and dtype fit.

    A box of it or, if that has one dim, a range of its elements; see ``format.flat_ranges``.
    ``converted``: the dtype may be another, to which values are converted as ``copy_`` does.
    """

    target: torch.Tensor
    name: str
    box: Box
    converted: bool = False


class Copy(NamedTuple):
    """``target`` is to hold the values of ``part``; both have its lengths."""

    target: torch.Tensor
    part: Part


class Segments(Protocol):
    """What a restore loads from: the tensors of one checkpoint, whoever has its bytes."""

    world_size: int
    is_whole: bool
    """Whether a segment of every rank is here: what no rank's header names, nobody has saved."""

    def specs(self) -> Mapping[str, TensorSpec]:
        """Return dtype and shape of every tensor of which a part is here, by name."""
        ...

    def read(self, wants: Sequence[Want]) -> None:
        """Fill every target; nothing is written unless all of it can be read.

        Raises:
            NotReadyError: pieces of a tensor are missing; names it and the box.
            InvalidRequestError: a target has another shape or dtype, or has no memory.
            CheckpointError: bytes are not what was saved, or the store; targets hold anything.
        """
        ...

    def blob(self, rank: int) -> bytes:
        """Return the text that ``rank`` saved, without its padding."""
        ...


class Bytes(Protocol):
    """Where the bytes of segments come from."""

    @property
    def headers(self) -> Sequence[SegmentHeader]:
        """The header of every segment; a part names its segment by the number in here."""
        ...

    def expect(self, parts: Iterable[Part]) -> None:
        """Say in which order parts will be asked for, so that they can be fetched ahead."""
        ...

    def copy(self, copies: Sequence[Copy], *, expected: bool = False) -> None:
        """Do all copies, in whatever order is good; ``expected``: ``expect`` named them."""
        ...

    def close(self) -> None:
        """Give back what is held; idempotent."""
        ...


class Reader:
    """The tensors of one checkpoint, read through ``source``; a context manager.

    Owns ``source`` and closes it. Not safe to use from several threads.

    Raises:
        ManifestError: segments disagree about a tensor.
    """

    def __init__(self, source: Bytes, world_size: int) -> None:
        self.world_size = world_size
        self._source = source
        with ExitStack() as undo:
            undo.callback(source.close)
            self._pieces = Pieces(source.headers)
            ranks = {header.identity.id.rank for header in source.headers}
            self.is_whole = len(ranks) == world_size
            undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give back what is held; what was read stays. Idempotent."""
        self._source.close()

    def specs(self) -> Mapping[str, TensorSpec]:
        """See ``Segments.specs``."""
        return self._pieces.specs

    def read(self, wants: Sequence[Want]) -> None:
        """See ``Segments.read``."""
        with no_collection():
            copies = [copy for want in wants for copy in self._planned(want)]
        with torch.no_grad():
            self._source.copy(copies)

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield these tensors, whole and in new memory; the next ones are fetched meanwhile.

        Raises:
            See ``Segments.read``.
        """
        chosen = {name: self._pieces.choose(name, self._whole(name)) for name in names}
        self._source.expect(part for name in names for part in chosen[name])
        for name in names:
            target = self._empty(name, self._whole(name))
            with torch.no_grad():
                self._source.copy(_copies(target, chosen[name]), expected=True)
            yield name, target

    def tensor(self, name: str, box: Box | None = None) -> torch.Tensor:
        """Return the tensor, or the region ``box`` of it, read now into new memory."""
        region = self._whole(name) if box is None else box
        target = self._empty(name, region)
        self.read([Want(target, name, region)])
        return target

    def check_whole(self) -> None:
        """Raise NotReadyError unless every tensor is there whole."""
        for name, spec in self.specs().items():
            self._pieces.choose(name, spec.box)

    def blob(self, rank: int) -> bytes:
        """See ``Segments.blob``.

        Raises:
            NotReadyError: the checkpoint has none of this rank.
            ManifestError: it is no text of at most ``BLOB_BYTES_MAX``.
        """
        name = blob_name(rank)
        spec = self._pieces.specs.get(name)
        if spec is not None and (spec.dtype != "U8" or spec.length_bytes > BLOB_BYTES_MAX):
            raise ManifestError(f"{name} is no text of at most {BLOB_BYTES_MAX} bytes")
        return self.tensor(name).numpy().tobytes().rstrip(b" ")

    def _planned(self, want: Want) -> Iterator[Copy]:
        """Yield what fills the target of ``want``, which is checked before."""
        spec = self._pieces.specs.get(want.name)
        _check(want, spec)
        for target, box in _boxes(want, spec):
            yield from _copies(target, self._pieces.choose(want.name, box))

    def _whole(self, name: str) -> Box:
        spec = self._pieces.specs.get(name)
        return spec.box if spec is not None else whole(())

    def _empty(self, name: str, box: Box) -> torch.Tensor:
        self._pieces.choose(name, box)  # raises before memory is taken for what is not there
        return torch.empty(box.lengths, dtype=TORCH[self._pieces.specs[name].dtype])


def _check(want: Want, spec: TensorSpec | None) -> None:
    target, name, box, converted = want
    if target.is_meta:
        raise InvalidRequestError(
            f"tensor {name!r} is on the meta device here and has no memory to be loaded into: "
            f"call to_empty(device=...) on its module before the restore",
            key=name,
        )
    if spec is None:
        return
    fits = converted or target.dtype == TORCH[spec.dtype]
    if tuple(target.shape) != box.lengths or not fits:
        raise InvalidRequestError(
            f"tensor {name!r} is {box.lengths} {TORCH[spec.dtype]} in the checkpoint and cannot "
            f"fill {tuple(target.shape)} {target.dtype}",
            key=name,
        )


def _boxes(want: Want, spec: TensorSpec | None) -> Iterator[tuple[torch.Tensor, Box]]:
    """Yield the boxes that are wanted, each with the part of the target that is to hold it."""
    target, region = want.target, want.box
    if spec is None or not is_range(spec.shape, region):
        yield target.detach(), region
        return
    begin = 0
    for box in boxes_of(spec.shape, region):
        end = begin + box.elements_count
        yield target.detach()[begin:end].view(box.lengths), box
        begin = end


def _copies(target: torch.Tensor, parts: Sequence[Part]) -> list[Copy]:
    if len(parts) == 1:
        return [Copy(target, parts[0])]
    return [Copy(target[part.place], part) for part in parts]
