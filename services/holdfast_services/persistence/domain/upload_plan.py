"""Which parts of an upload are there, which the store copies, which are sent; which are read back.

An upload part is one part of the segment, or several in a row where the segment has more parts
than an upload may have. Units: bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.core.shard import Shard
from holdfast.format.digest import PART_BYTES, parts_count
from holdfast.format.sidecar import Sidecar

SAMPLE_COUNT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Bytes ``[begin, end)`` of the segment, one part of the upload; its pieces' ``digests``."""

    number: int
    begin: int
    end: int
    digests: tuple[bytes, ...]

    @property
    def length_bytes(self) -> int:
        """How many bytes it has."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A part that the object ``source`` has at the same place."""

    part: Part
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadPlan:
    """Every part of the upload, once: ``kept`` are there from an upload that was broken off."""

    kept: tuple[Part, ...]
    copies: tuple[Copy, ...]
    sends: tuple[Part, ...]


def upload_part_bytes(length_bytes: int, parts_count_max: int) -> int:
    """Return the part size: the smallest multiple of ``PART_BYTES`` that needs no more parts."""
    return PART_BYTES * max(1, -(-parts_count(length_bytes) // parts_count_max))


def cut(length_bytes: int, digests: Sequence[bytes], part_bytes: int) -> tuple[Part, ...]:
    """Return all parts of the upload of a segment whose parts have ``digests``."""
    pieces = part_bytes // PART_BYTES
    return tuple(
        Part(
            number=number,
            begin=begin,
            end=min(begin + part_bytes, length_bytes),
            digests=tuple(digests[number * pieces : (number + 1) * pieces]),
        )
        for number, begin in enumerate(range(0, length_bytes, part_bytes))
    )


def plan_upload(
    parts: Sequence[Part],
    present: Mapping[int, int],
    earlier: Sequence[tuple[str, Sidecar]],
) -> UploadPlan:
    """Return what is to be done for each part.

    Args:
        parts: All of them, as ``cut`` returns them.
        present: Length of each part that the store has already, by number.
        earlier: Objects that parts may be copied from, the one to prefer first, with sidecars
            of the same length; see ``comparable``.
    """
    kept, copies, sends = [], [], []
    for part in parts:
        if present.get(part.number) == part.length_bytes:
            kept.append(part)
            continue
        source = next((key for key, sidecar in earlier if _unchanged(part, sidecar)), None)
        if source is None:
            sends.append(part)
        else:
            copies.append(Copy(part=part, source=source))
    return UploadPlan(kept=tuple(kept), copies=tuple(copies), sends=tuple(sends))


def comparable(shard: Shard, earlier: Shard) -> bool:
    """Tell whether the same place in both segments holds the same tensors (G16)."""
    return (
        earlier.length_bytes == shard.length_bytes
        and earlier.plan_hash == shard.plan_hash
        and earlier.world_size == shard.world_size
    )


def _unchanged(part: Part, earlier: Sidecar) -> bool:
    first = part.begin // PART_BYTES
    return earlier.digests[first : first + len(part.digests)] == part.digests


def sample(parts: Sequence[Part], seed: bytes) -> tuple[Part, ...]:
    """Return at most ``SAMPLE_COUNT`` of ``parts``, spread evenly; ``seed`` shifts which."""
    count = min(len(parts), SAMPLE_COUNT)
    shift = int.from_bytes(seed[:4], "little")
    spread = sorted({(shift + at * len(parts) // count) % len(parts) for at in range(count)})
    return tuple(parts[index] for index in spread)


def to_read_back(plan: UploadPlan, seed: bytes, *, checked: bool) -> tuple[Part, ...]:
    """Return which parts of the finished object are read and hashed.

    All that we did not send ourselves: whoever sent what was kept is gone, and what the store
    copied may have rotted since it was written. Of those sent a sample, unless the store has
    ``checked`` what it took.
    """
    copied = tuple(copy.part for copy in plan.copies)
    return plan.kept + copied + (() if checked else sample(plan.sends, seed))
