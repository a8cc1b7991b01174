"""The index of a plan: every box of every tensor, and which bytes of which segment hold it.

``docs/reference/bucket-v1.md`` is normative. Positions are constant for a plan, so one object
serves every checkpoint saved under it, and a reader of another world size opens one object
instead of 10^4 headers. Columns, not rows: ten million numbers are read as ten lists. Pure.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from holdfast.core.ids import WORLD_SIZE_MAX
from holdfast.errors import ExhaustedError, InvalidRequestError, ManifestError
from holdfast.format.box_index import Overlaps, SharedOverlaps
from holdfast.format.boxes import Box, addressable
from holdfast.format.canonical import check_digest, number_of, strict_object, text_of, with_digest
from holdfast.format.digest import ALGORITHM
from holdfast.format.flat_ranges import boxes_of, is_inside, is_range
from holdfast.format.manifest import (
    LENGTH_BYTES_MAX,
    SHARDS_COUNT_MAX,
    VOLUME_MAX,
    check_complete,
    check_format,
    segments_plan,
)
from holdfast.format.segment import (
    ALIGNMENT_BYTES,
    DIMS_COUNT_MAX,
    HEADER_BYTES_MAX,
    ITEM_BYTES,
    NAME_LENGTH_MAX,
    SegmentHeader,
    TensorSpec,
    checked_plan_hash,
)
from holdfast.garbage import no_collection

FORMAT = "holdfast-index"
VERSION = 1
INDEX_BYTES_MAX = 1 << 30
BOXES_COUNT_MAX = 8_000_000  # 10^5 tensors, each cut over 64 ranks
ELEMENTS_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedSegment:
    """One segment of the plan; ``data_begin`` is where its tensors begin."""

    rank: int
    volume: int
    plan_hash: str
    length_bytes: int
    data_begin: int


class IndexedBox(NamedTuple):
    """One region of one tensor: bytes ``[begin, end)`` of the segment of (rank, volume)."""

    rank: int
    volume: int
    box: Box
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedTensor:
    """One tensor and all its regions, by offsets; each segment has at most one of them.

    ``pieces`` are the same with ranges taken apart into boxes; ``overlaps`` finds them by place.
    """

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[IndexedBox, ...]
    pieces: tuple[IndexedBox, ...] = field(compare=False, repr=False)
    overlaps: Overlaps = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """All tensors of a plan.

    Invariants: ``segments`` are sorted by (rank, volume), ``tensors`` by fqn; the boxes of each
    segment fill it without holes.
    """

    world_size: int
    segments: tuple[IndexedSegment, ...]
    tensors: tuple[IndexedTensor, ...]

    @property
    def plan(self) -> str:
        """The plan this is the index of; see ``manifest.checkpoint_plan``."""
        return segments_plan((s.rank, s.volume, s.plan_hash) for s in self.segments)

    def tensor(self, fqn: str) -> IndexedTensor | None:
        """Return the tensor of this name, or None."""
        at = bisect_left(self.tensors, fqn, key=lambda tensor: tensor.fqn)
        found = self.tensors[at] if at < len(self.tensors) else None
        return found if found is not None and found.fqn == fqn else None


def build(headers: Iterable[SegmentHeader]) -> Index:
    """Return the index of a plan from the headers of all its segments, in any order.

    Raises:
        ManifestError: they are not one whole checkpoint, or disagree about a tensor.
        ExhaustedError: more than ``BOXES_COUNT_MAX`` boxes: readers use the headers themselves.
    """
    index = of_some(headers)
    _check_segments(index)
    return index


@no_collection()
def of_some(headers: Iterable[SegmentHeader]) -> Index:
    """Return what ``build`` returns, of only those segments of a plan whose headers are given.

    Raises:
        ManifestError, ExhaustedError: as ``build`` says, except that others may be missing.
    """
    by_place = sorted(
        headers, key=lambda header: (header.identity.id.rank, header.identity.id.volume)
    )
    if not by_place:
        raise ManifestError("no segment has no index")
    world_size = by_place[0].identity.world_size
    if any(header.identity.world_size != world_size for header in by_place):
        raise ManifestError("segments are of different world sizes")
    boxes_count = sum(len(header.entries) for header in by_place)
    if boxes_count > BOXES_COUNT_MAX:
        raise ExhaustedError(f"{boxes_count} boxes exceed {BOXES_COUNT_MAX}: no index is written")
    found: dict[str, tuple[TensorSpec, list[IndexedBox]]] = {}
    for header in by_place:
        rank, volume = header.identity.id.rank, header.identity.id.volume
        for entry in header.entries:
            spec = entry.spec
            known = found.get(spec.fqn)
            if known is None:
                known = found[spec.fqn] = (spec, [])
            elif (known[0].dtype, known[0].shape) != (spec.dtype, spec.shape):
                raise ManifestError(f"segments disagree about tensor {spec.fqn!r}")
            known[1].append(IndexedBox(rank, volume, spec.box, entry.begin, entry.end))
    shared = SharedOverlaps()
    return Index(
        world_size=world_size,
        segments=tuple(_segment(header) for header in by_place),
        tensors=tuple(_tensor(*found[fqn], shared) for fqn in sorted(found)),
    )


def encode(index: Index) -> bytes:
    """Return the canonical text of what ``build`` returned.

    Raises:
        ExhaustedError: it would be longer than ``INDEX_BYTES_MAX``.
    """
    places = {(s.rank, s.volume): at for at, s in enumerate(index.segments)}
    held = [(at, box) for at, tensor in enumerate(index.tensors) for box in tensor.boxes]
    data = with_digest(
        {
            "format": FORMAT,
            "version": VERSION,
            "algorithm": ALGORITHM,
            "plan": index.plan,
            "world_size": index.world_size,
            "segments": {
                "rank": [s.rank for s in index.segments],
                "volume": [s.volume for s in index.segments],
                "plan_hash": [s.plan_hash for s in index.segments],
                "length_bytes": [s.length_bytes for s in index.segments],
                "data_begin": [s.data_begin for s in index.segments],
            },
            "tensors": {
                "fqn": [t.fqn for t in index.tensors],
                "dtype": [t.dtype for t in index.tensors],
                "shape": [t.shape for t in index.tensors],
            },
            "boxes": {
                "tensor": [at for at, _ in held],
                "segment": [places[b.rank, b.volume] for _, b in held],
                "begin": [b.begin for _, b in held],
                "offsets": [b.box.offsets for _, b in held],
                "lengths": [b.box.lengths for _, b in held],
            },
        }
    )
    if len(data) > INDEX_BYTES_MAX:
        raise ExhaustedError(f"an index of {len(data)} bytes exceeds {INDEX_BYTES_MAX}")
    return data


def decode(data: bytes) -> Index:
    """Return the index in ``data``; every rule is checked before anything is believed.

    Raises:
        ManifestError: a rule of the format is broken; the message names it.
        UnsupportedFormatError: a version this code does not read.
    """
    raw = strict_object(data, what="index", bytes_max=INDEX_BYTES_MAX)
    check_format(raw, what="index", name=FORMAT, version=VERSION)
    check_digest(data, what="index")
    segments = _read_segments(raw)
    index = Index(
        world_size=number_of(raw, "world_size", WORLD_SIZE_MAX),
        segments=segments,
        tensors=_read_tensors(raw, segments),
    )
    _check_segments(index)
    if text_of(raw, "plan") != index.plan:
        raise ManifestError("the index's plan is not that of its segments")
    return index


def _segment(header: SegmentHeader) -> IndexedSegment:
    return IndexedSegment(
        rank=header.identity.id.rank,
        volume=header.identity.id.volume,
        plan_hash=header.identity.plan_hash,
        length_bytes=header.length_bytes,
        data_begin=header.data_begin,
    )


def _tensor(spec: TensorSpec, found: list[IndexedBox], shared: SharedOverlaps) -> IndexedTensor:
    """Return a tensor whose boxes were ``found`` in the order of segments, as ``_order`` has it."""
    boxes = tuple(sorted(found, key=lambda held: held.box.offsets))
    pieces = _pieces(spec.dtype, spec.shape, boxes)
    return IndexedTensor(
        fqn=spec.fqn,
        dtype=spec.dtype,
        shape=spec.shape,
        boxes=boxes,
        pieces=pieces,
        overlaps=shared.of([held.box for held in pieces]),
    )


def _pieces(
    dtype: str, shape: tuple[int, ...], boxes: tuple[IndexedBox, ...]
) -> tuple[IndexedBox, ...]:
    if not any(is_range(shape, held.box) for held in boxes):
        return boxes
    item_bytes, pieces = ITEM_BYTES[dtype], []
    for held in boxes:
        begin = held.begin
        for box in boxes_of(shape, held.box):
            end = begin + item_bytes * box.elements_count
            pieces.append(IndexedBox(held.rank, held.volume, box, begin, end))
            begin = end
    return tuple(pieces)


def _order(box: IndexedBox) -> tuple[object, ...]:
    return (box.box.offsets, box.rank, box.volume)


def _check_segments(index: Index) -> None:
    """Check that the segments are one whole checkpoint, and that boxes fill each of them."""
    check_complete([(s.rank, s.volume) for s in index.segments], index.world_size)
    spans: dict[tuple[int, int], list[tuple[int, int]]] = {
        (s.rank, s.volume): [] for s in index.segments
    }
    for tensor in index.tensors:
        for box in tensor.boxes:
            spans[box.rank, box.volume].append((box.begin, box.end))
    for segment in index.segments:
        at = segment.data_begin
        for begin, end in sorted(spans[segment.rank, segment.volume]):
            if begin != at:
                rule = "overlap" if begin < at else "leave a hole"
                raise ManifestError(f"boxes of rank {segment.rank} {rule} at byte {at}")
            at = end
        if at != segment.length_bytes:
            raise ManifestError(
                f"boxes of rank {segment.rank} end at byte {at} of {segment.length_bytes}"
            )


def _columns(
    raw: Mapping[str, object], key: str, names: Sequence[str], most: int
) -> list[list[object]]:
    """Return the lists of an object of columns, all of one length.

    Raises:
        ManifestError: one is missing, or they differ, or are longer than ``most``.
    """
    table = raw.get(key)
    found = [table.get(name) for name in names] if isinstance(table, dict) else [None]
    lists = [column for column in found if isinstance(column, list)]
    if len(lists) != len(names) or len({len(column) for column in lists}) != 1:
        raise ManifestError(f"{key} is not columns of one length: {', '.join(names)}")
    if len(lists[0]) > most:
        raise ManifestError(f"{len(lists[0])} {key} exceed {most}")
    return lists


def _numbers(column: Sequence[object], what: str, most: int) -> list[int]:
    numbers = [number for number in column if type(number) is int and 0 <= number <= most]
    if len(numbers) != len(column):
        raise ManifestError(f"{what} holds something else than numbers in 0..{most}")
    return numbers


def _texts(column: Sequence[object], what: str) -> list[str]:
    texts = [text for text in column if isinstance(text, str)]
    if len(texts) != len(column):
        raise ManifestError(f"{what} holds something else than texts")
    return texts


def _dims(row: object, what: str) -> tuple[int, ...]:
    if not isinstance(row, list) or len(row) > DIMS_COUNT_MAX:
        raise ManifestError(f"{what} holds no list of at most {DIMS_COUNT_MAX} numbers")
    return tuple(_numbers(row, what, ELEMENTS_MAX))


def _read_segments(raw: Mapping[str, object]) -> tuple[IndexedSegment, ...]:
    names = ("rank", "volume", "plan_hash", "length_bytes", "data_begin")
    columns = _columns(raw, "segments", names, SHARDS_COUNT_MAX)
    ranks = _numbers(columns[0], "segments.rank", WORLD_SIZE_MAX)
    volumes = _numbers(columns[1], "segments.volume", VOLUME_MAX)
    hashes = _texts(columns[2], "segments.plan_hash")
    lengths = _numbers(columns[3], "segments.length_bytes", LENGTH_BYTES_MAX)
    begins = _numbers(columns[4], "segments.data_begin", HEADER_BYTES_MAX + 8)
    if any(begin % ALIGNMENT_BYTES for begin in begins):
        raise ManifestError(f"segments.data_begin holds no multiple of {ALIGNMENT_BYTES}")
    try:
        for text in hashes:
            checked_plan_hash(text)
    except InvalidRequestError as cause:
        raise ManifestError(f"segments.plan_hash: {cause}") from cause
    rows = zip(ranks, volumes, hashes, lengths, begins, strict=True)
    return tuple(
        IndexedSegment(
            rank=rank, volume=volume, plan_hash=text, length_bytes=length, data_begin=begin
        )
        for rank, volume, text, length, begin in rows
    )


def _read_tensors(
    raw: Mapping[str, object], segments: Sequence[IndexedSegment]
) -> tuple[IndexedTensor, ...]:
    columns = _columns(raw, "tensors", ("fqn", "dtype", "shape"), BOXES_COUNT_MAX)
    fqns, dtypes = _texts(columns[0], "tensors.fqn"), _texts(columns[1], "tensors.dtype")
    shapes = [_dims(row, "tensors.shape") for row in columns[2]]
    if any(here >= there for here, there in pairwise(fqns)):
        raise ManifestError("tensors are not sorted by fqn, or one stands twice")
    for fqn, dtype in zip(fqns, dtypes, strict=True):
        if not (0 < len(fqn) <= NAME_LENGTH_MAX and fqn.isprintable()):
            raise ManifestError(f"tensor name {fqn[:80]!r} is not usable")
        if dtype not in ITEM_BYTES:
            raise ManifestError(f"tensor {fqn!r} has the unknown dtype {dtype[:40]!r}")
    sizes = (ITEM_BYTES[dtype] for dtype in dtypes)
    if not all(map(addressable, shapes, sizes)):
        raise ManifestError("a tensor has a shape which no memory can have")
    boxes: list[list[IndexedBox]] = [[] for _ in fqns]
    for at, box in _read_boxes(raw, dtypes, shapes, segments):
        if boxes[at] and _order(boxes[at][-1]) >= _order(box):
            raise ManifestError(f"boxes of tensor {fqns[at]!r} are not sorted, or one stands twice")
        boxes[at].append(box)
    return tuple(
        IndexedTensor(
            fqn=fqn,
            dtype=dtype,
            shape=shape,
            boxes=tuple(held),
            pieces=pieces,
            overlaps=Overlaps([each.box for each in pieces]),
        )
        for fqn, dtype, shape, held in zip(fqns, dtypes, shapes, boxes, strict=True)
        for pieces in [_pieces(dtype, shape, tuple(held))]
    )


def _read_boxes(
    raw: Mapping[str, object],
    dtypes: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    segments: Sequence[IndexedSegment],
) -> Iterator[tuple[int, IndexedBox]]:
    """Yield (number of its tensor, box), each inside its tensor and its segment."""
    names = ("tensor", "segment", "begin", "offsets", "lengths")
    columns = _columns(raw, "boxes", names, BOXES_COUNT_MAX)
    tensors = _numbers(columns[0], "boxes.tensor", len(shapes) - 1)
    owners = _numbers(columns[1], "boxes.segment", len(segments) - 1)
    begins = _numbers(columns[2], "boxes.begin", LENGTH_BYTES_MAX)
    if tensors != sorted(tensors) or set(tensors) != set(range(len(shapes))):
        raise ManifestError("boxes are not sorted by tensor, or a tensor has none")
    if len(set(zip(tensors, owners, strict=True))) != len(tensors):
        raise ManifestError("a segment holds two boxes of one tensor")
    for at, owner, begin, *place in zip(tensors, owners, begins, *columns[3:], strict=True):
        offsets, lengths = (_dims(row, "boxes") for row in place)
        shape, item_bytes, segment = shapes[at], ITEM_BYTES[dtypes[at]], segments[owner]
        if len(offsets) != len(lengths) or not is_inside(shape, Box(offsets, lengths)):
            raise ManifestError(f"a box of tensor {at} lies outside its shape {shape}")
        end = begin + item_bytes * math.prod(lengths)
        if begin % item_bytes or end > segment.length_bytes:
            raise ManifestError(f"a box of tensor {at} is not aligned, or beyond its segment")
        yield (
            at,
            IndexedBox(
                rank=segment.rank,
                volume=segment.volume,
                box=Box(offsets, lengths),
                begin=begin,
                end=end,
            ),
        )
