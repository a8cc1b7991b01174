"""Which bytes of which segment hold a region of a tensor: found by name and box.

Whoever saved it and whatever the world size was: a tensor is what its boxes add up to. Knows
headers only, no bytes and no torch. Boxes count elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from holdfast.errors import ManifestError, NotReadyError
from holdfast.format.boxes import Box, covers, whole
from holdfast.format.overlaps import Overlaps
from holdfast.format.segment import SegmentHeader, TensorEntry, TensorSpec


class Part(NamedTuple):
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
                    self._parts[spec.fqn] = []
                elif known.shape != spec.shape or known.dtype != spec.dtype:
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
        if parts[0].box == box:
            return parts[:1]
        overlaps = self._overlaps.get(name)
        if overlaps is None:
            overlaps = self._overlaps[name] = Overlaps([part.box for part in parts])
        shared = [
            Part(parts[at].number, parts[at].entry, region) for at, region in overlaps.of(box)
        ]
        enough = [part for part in shared if part.box == box]
        if enough:
            return [next((part for part in enough if part.entry.spec.box == box), enough[0])]
        if not covers(box, (part.box for part in shared)):
            place = f"{list(box.offsets)} + {list(box.lengths)}"
            raise NotReadyError(f"pieces of tensor {name!r} are missing at {place}", fqn=name)
        return shared
