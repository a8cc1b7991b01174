"""Which bytes of which segment hold a region of a tensor: found by name and box.

Whoever saved it and whatever the world size was: a tensor is what its boxes add up to. Knows
headers only, no bytes and no torch. Boxes count elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from holdfast.errors import ManifestError, NotReadyError
from holdfast.format.box_index import Overlaps, SharedOverlaps
from holdfast.format.boxes import Box, whole
from holdfast.format.flat_ranges import boxes_of, is_range
from holdfast.format.segment import ITEM_BYTES, SegmentHeader, TensorEntry, TensorSpec
from holdfast.garbage import no_collection


class Part(NamedTuple):
    """The region ``box`` (of the tensor) out of one entry of the segment ``number``.

    Invariants: ``box`` lies inside the box of ``entry``; both have the tensor's dims: an entry
    that is a range in the file is one of the boxes it is made of. ``place`` and ``span`` are those
    of ``box_index.Shared``: in the region that was asked for, and among the elements of ``entry``.
    """

    number: int
    entry: TensorEntry
    box: Box
    place: tuple[slice, ...]
    span: tuple[int, int]


class _Held(NamedTuple):
    """What there is of one tensor, in the order of files: each box, and where it lies."""

    places: list[tuple[int, TensorEntry]]
    boxes: list[Box]


class Pieces:
    """All boxes of the tensors of one checkpoint.

    Raises:
        ManifestError: segments disagree about the shape or dtype of a tensor.
    """

    @no_collection()
    def __init__(self, headers: Iterable[SegmentHeader]) -> None:
        self._held: dict[str, _Held] = {}
        self._shared = SharedOverlaps()
        self._overlaps: dict[str, Overlaps] = {}
        self.specs: Mapping[str, TensorSpec] = {}
        """Every tensor of which a part is here, as if one box held it; in the order of files."""
        specs: dict[str, TensorSpec] = {}
        for number, header in enumerate(headers):
            for entry in header.entries:
                spec = entry.spec
                known = specs.get(spec.fqn)
                if known is None:
                    full = whole(spec.shape)
                    specs[spec.fqn] = (
                        spec
                        if spec.box == full
                        else TensorSpec(fqn=spec.fqn, dtype=spec.dtype, shape=spec.shape, box=full)
                    )
                    self._held[spec.fqn] = _Held([], [])
                elif known.shape != spec.shape or known.dtype != spec.dtype:
                    raise ManifestError(
                        f"segments disagree about tensor {spec.fqn!r}", fqn=spec.fqn
                    )
                held = self._held[spec.fqn]
                for piece in _boxes(entry) if is_range(spec.shape, spec.box) else (entry,):
                    held.places.append((number, piece))
                    held.boxes.append(piece.spec.box)
        self.specs = specs

    def choose(self, name: str, box: Box) -> list[Part]:
        """Return what makes up the region ``box`` of a tensor; one part if one holds it all.

        Raises:
            NotReadyError: parts are missing; names the tensor and the box.
        """
        held = self._held.get(name)
        if held is None:
            raise NotReadyError(f"no segment has the tensor {name!r}", fqn=name)
        places, boxes = held
        if boxes and boxes[0] == box:
            number, entry = places[0]
            return [Part(number, entry, boxes[0], _all_of(box), (0, box.elements_count))]
        overlaps = self._overlaps.get(name)
        if overlaps is None:
            overlaps = self._overlaps[name] = self._shared.of(boxes)
        chosen, hole = overlaps.fill(box)
        if hole is not None:
            place = f"{list(box.offsets)} + {list(box.lengths)}"
            raise NotReadyError(f"pieces of tensor {name!r} are missing at {place}", fqn=name)
        return [
            Part(*places[at], region, place, elements) for at, region, place, elements in chosen
        ]


def _all_of(box: Box) -> tuple[slice, ...]:
    return tuple(map(slice, box.lengths))


def _boxes(entry: TensorEntry) -> Iterator[TensorEntry]:
    """Yield the boxes that the range of an entry is made of, as if each were an entry."""
    spec, begin = entry.spec, entry.begin
    for box in boxes_of(spec.shape, spec.box):
        end = begin + ITEM_BYTES[spec.dtype] * box.elements_count
        yield TensorEntry(spec=spec._replace(box=box), begin=begin, end=end)
        begin = end
