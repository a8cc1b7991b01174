"""The pieces of a plan that were declared frozen: copied once into each slot, then watched.

Torch tells of most writes by a tensor's version, and of other memory by its address.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from holdfast.format.digest import PART_BYTES
from holdfast.snapshot.pieces import Piece, Run

_VERSION = operator.attrgetter("_version")


def is_watched(tensor: torch.Tensor) -> bool:
    """Tell whether torch tells of writes: not of inference tensors, nor of all subclasses."""
    plain = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return plain and not tensor.is_inference()


class FrozenPieces:
    """Pieces as they were when this was made, ``runs`` of them by device, and their bytes.

    ``spans`` are the places of these bytes in the segment, each at most a part. Their memory is
    held, so that nothing else can come to lie where they lay.
    """

    def __init__(self, pieces: Sequence[Piece], runs: Sequence[Run]) -> None:
        self.pieces = pieces
        self.runs = runs
        self.spans = _spans([(piece.entry.begin, piece.entry.end) for piece in pieces])
        self.length_bytes = sum(end - begin for begin, end in self.spans)
        self._tensors = [piece.tensor for piece in pieces]
        self._held = [tensor.detach() for tensor in self._tensors]
        self._versions, self._places = self._look()
        self._digests: Sequence[bytes] = ()

    def unlike(self, digests: Sequence[bytes]) -> list[str]:
        """Return what lies in spans whose digests differ from those that this heard first."""
        self._digests = self._digests or digests
        each = zip(self.spans, self._digests, digests, strict=True)
        unlike = [span for span, first, now in each if first != now]
        entries = [piece.entry for piece in self.pieces]
        return [
            entry.spec.fqn
            for entry in entries
            if any(entry.begin < end and begin < entry.end for begin, end in unlike)
        ]

    def changed(self) -> list[str]:
        """Return what was written, or lies elsewhere, since this was made: names in the segment."""
        versions, places = self._look()
        if versions == self._versions and places == self._places:
            return []
        before = zip(self._versions, self._places, strict=True)
        now = zip(versions, places, strict=True)
        each = zip(self.pieces, before, now, strict=True)
        return [piece.entry.spec.fqn for piece, old, new in each if old != new]

    def _look(self) -> tuple[list[int], list[int]]:
        tensors = self._tensors
        return list(map(_VERSION, tensors)), list(map(torch.Tensor.data_ptr, tensors))


def _spans(places: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return what ``places`` cover, in as few pieces as can be that are no longer than a part."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(places):
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        elif begin < end:
            joined.append((begin, end))
    return [
        (at, min(at + PART_BYTES, end))
        for begin, end in joined
        for at in range(begin, end, PART_BYTES)
    ]
