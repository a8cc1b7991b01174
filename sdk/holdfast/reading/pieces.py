"""Which bytes of which segment hold a region of a tensor: found by name and box.

Whoever saved it and whatever the world size was: a tensor is what its boxes add up to. Knows
headers only, no bytes and no torch. Boxes count elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from holdfast.errors import ManifestError, NotReadyError
from holdfast.format.boxes import Box, covers, intersect, whole
from holdfast.format.segment import SegmentHeader, TensorEntry, TensorSpec


@dataclass(frozen=True, slots=True)
class Part:
    """The region ``box`` (of the tensor) out of one entry of the segment ``number``.

    Invariants: ``box`` lies inside the box of ``entry``.
    """

    number: int
    entry: TensorEntry
    box: Box


class Pieces:
    """All boxes of the tensors of one checkpoint.

    Raises:
        ManifestError: segments disagree about the shape or dtype of a tensor.
    """

    def __init__(self, headers: Iterable[SegmentHeader]) -> None:
        self._parts: dict[str, list[Part]] = {}
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
                    self._parts[spec.fqn] = []
                elif (known.shape, known.dtype) != (spec.shape, spec.dtype):
                    raise ManifestError(
                        f"segments disagree about tensor {spec.fqn!r}", fqn=spec.fqn
                    )
                self._parts[spec.fqn].append(Part(number, entry, spec.box))
        self.specs = specs

    def choose(self, name: str, box: Box) -> list[Part]:
        """Return what makes up the region ``box`` of a tensor; one part if one holds it all.

        Raises:
            NotReadyError: parts are missing; names the tensor and the box.
        """
        parts = self._parts.get(name)
        if not parts:
            raise NotReadyError(f"no segment has the tensor {name!r}", fqn=name)
        for part in parts:
            if part.box == box:
                return [part]
        shared: list[Part] = []
        for part in parts:
            region = intersect(part.box, box)
            if region == box:
                return [Part(part.number, part.entry, box)]
            if region is not None:
                shared.append(Part(part.number, part.entry, region))
        if not covers(box, (part.box for part in shared)):
            place = f"{list(box.offsets)} + {list(box.lengths)}"
            raise NotReadyError(f"pieces of tensor {name!r} are missing at {place}", fqn=name)
        return shared
