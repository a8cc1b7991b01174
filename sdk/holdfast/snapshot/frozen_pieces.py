"""The pieces of a plan that were declared frozen: copied once into each slot, then watched.

Torch tells of most writes by a tensor's version, and of other memory by its address. What it does
not tell of, ``second_look`` finds.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from holdfast.format.digest import PART_BYTES
from holdfast.snapshot.pieces import Piece, Run
from holdfast.state.survey import is_near

_VERSION = operator.attrgetter("_version")


def is_watched(tensor: torch.Tensor, outer: torch.Tensor | None = None) -> bool:
    """Tell whether torch tells of writes: not of inference tensors, nor of all subclasses."""
    plain = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return plain and not (tensor.is_inference() or (outer is not None and outer.is_inference()))


class FrozenPieces:
    """Pieces as they were when this was made, ``runs`` of them by device, and their bytes.

    ``spans`` are the places of these bytes in the segment, each at most a part. Their memory is
    held, so that nothing else can come to lie where they lay; not that of devices, which scripts
    need. ``outers`` are what a model has of each, if that is another tensor: torch counts what is
    written to a DTensor there, and not where it lies.
    """

    def __init__(
        self, pieces: Sequence[Piece], runs: Sequence[Run], outers: Sequence[torch.Tensor | None]
    ) -> None:
        self.pieces = pieces
        self.runs = runs
        self.spans = _spans([(piece.entry.begin, piece.entry.end) for piece in pieces])
        self.length_bytes = sum(end - begin for begin, end in self.spans)
        self._tensors = [piece.tensor for piece in pieces]
        each = zip(self._tensors, outers, strict=True)
        self._outers = [tensor if outer is None else outer for tensor, outer in each]
        near = (
            tensor
            for run in runs
            if run.device is None
            for tensor in self._tensors[run.begin : run.end]
        )
        self._held = [tensor.detach() for tensor in near if is_near(tensor)]
        self._seen = self._look()
        self._digests: Sequence[bytes] = ()
        self._turn = -1

    def take_turn(self) -> int:
        """Return a number that was not returned before, from 0 on."""
        self._turn += 1
        return self._turn

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
        seen = self._look()
        if seen == self._seen:
            return []
        each = zip(self.pieces, zip(*self._seen, strict=True), zip(*seen, strict=True), strict=True)
        return [piece.entry.spec.fqn for piece, old, new in each if old != new]

    def _look(self) -> tuple[list[int], list[int], list[int]]:
        tensors = self._tensors
        versions, outer = list(map(_VERSION, tensors)), list(map(_VERSION, self._outers))
        return versions, outer, list(map(torch.Tensor.data_ptr, tensors))


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
