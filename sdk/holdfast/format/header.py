"""Reads the header of a segment; ``docs/reference/format-v1.md`` is normative.

Everything is checked before anything is believed. A header names up to a million tensors, so what
is of one type is looked at in columns, and what most tensors have in common once. Pure: bytes in,
values out. Units: bytes, except boxes (elements).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import NamedTuple, cast

from holdfast.errors import ManifestError
from holdfast.format.boxes import Box, addressable
from holdfast.format.flat_ranges import flat_shape
from holdfast.format.segment import (
    ALIGNMENT_BYTES,
    DIMS_COUNT_MAX,
    ITEM_BYTES,
    METADATA_KEY,
    SHAPES_KEY,
    SHARDING_KEY,
    TENSORS_COUNT_MAX,
    SegmentHeader,
    TensorEntry,
    TensorSpec,
    header_length,
    identity_of,
    is_usable,
)
from holdfast.garbage import no_collection

NUMBER_MAX = 1 << 63
_Dims = tuple[int, ...]
_Table = dict[str, object]


class _Region(NamedTuple):
    """What a tensor says of itself but its name and position; most are like others."""

    box: Box
    shape: _Dims
    item_bytes: int
    length_bytes: int


@no_collection()
def parse_header(data: bytes | memoryview, length_bytes: int) -> SegmentHeader:
    """Return the header of a segment of ``length_bytes`` that begins with ``data``.

    Everything is checked before anything is believed: names, dtypes, shapes, that boxes lie in
    their tensors, and that the tensors fill the file without holes or overlap.

    Raises:
        ManifestError: a rule of the format is broken; the message names it.
        UnsupportedFormatError: a format version this code does not read.
    """
    data_begin = header_length(bytes(data[:8]))
    if data_begin > length_bytes or data_begin > len(data):
        raise ManifestError(f"header of {data_begin} bytes in a segment of {length_bytes}")
    if data_begin % ALIGNMENT_BYTES:
        raise ManifestError(f"data begin at byte {data_begin}, no multiple of {ALIGNMENT_BYTES}")
    table = _json_object(bytes(data[8:data_begin]), "header")
    metadata = _string_map(table.pop(METADATA_KEY, None))
    if len(table) > TENSORS_COUNT_MAX:
        raise ManifestError(f"{len(table)} tensors exceed {TENSORS_COUNT_MAX}")
    entries = _entries(table, _sharding(metadata), _shapes(metadata, table), data_begin)
    entries.sort(key=attrgetter("begin", "end"))
    _check_filled(entries, data_begin, length_bytes)
    return SegmentHeader(
        identity=identity_of(metadata),
        entries=tuple(entries),
        data_begin=data_begin,
        length_bytes=length_bytes,
    )


def _json_object(text: bytes, what: str) -> _Table:
    if text[:1] != b"{":
        raise ManifestError(f"{what} is not a JSON object")
    try:
        table: _Table = json.loads(text.decode(), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as cause:
        raise ManifestError(f"{what} is not JSON: {cause}") from cause
    return table


def _no_duplicates(pairs: list[tuple[str, object]]) -> _Table:
    table = dict(pairs)
    if len(table) != len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ManifestError(f"key {twice[:80]!r} stands twice in the header")
    return table


def _string_map(raw: object) -> dict[str, str]:
    if not isinstance(raw, dict) or not all(isinstance(value, str) for value in raw.values()):
        raise ManifestError("__metadata__ is not a map of strings")
    return raw


def _sharding(metadata: Mapping[str, str]) -> _Table:
    text = metadata.get(SHARDING_KEY, "").encode(errors="replace")
    return _json_object(text, SHARDING_KEY)


def _shapes(metadata: Mapping[str, str], table: _Table) -> dict[str, _Dims]:
    """Return the shape of each tensor of which a range is here, by name."""
    text = metadata.get(SHAPES_KEY, "{}").encode(errors="replace")
    raw = _json_object(text, SHAPES_KEY)
    unknown = next((fqn for fqn in raw if fqn not in table), None)
    if unknown is not None:
        raise ManifestError(f"{SHAPES_KEY} has a shape of {unknown[:80]!r}, which is not here")
    return dict(zip(raw, _dims(raw, raw.values()), strict=True))


def _entries(
    table: _Table, sharding: _Table, shapes: Mapping[str, _Dims], base: int
) -> list[TensorEntry]:
    """Return the tensors of a header, in its order."""
    fqns = list(table)
    rows = [_row(fqn, raw, sharding.get(fqn)) for fqn, raw in table.items()]
    lengths = _dims(fqns, [row.get("shape") for row, _ in rows])
    offsets = _dims(fqns, [place.get("saved_offsets") for _, place in rows])
    totals = _dims(fqns, [place.get("global_shape", row.get("shape")) for row, place in rows])
    spans = _dims(fqns, [row.get("data_offsets") for row, _ in rows])
    dtypes = [cast("str", row["dtype"]) for row, _ in rows]
    regions: dict[tuple[str, _Dims, _Dims, _Dims, _Dims | None], _Region] = {}
    entries = []
    kinds = zip(dtypes, offsets, lengths, totals, map(shapes.get, fqns), strict=True)
    for fqn, kind, span in zip(fqns, kinds, spans, strict=True):
        region = regions.get(kind)
        if region is None:
            region = regions[kind] = _region(fqn, *kind)
        box, shape, item_bytes, length_bytes = region
        if len(span) != 2:
            raise ManifestError(f"tensor {fqn!r} has {len(span)} data offsets, not 2")
        begin, end = span
        if end - begin != length_bytes:
            raise ManifestError(f"tensor {fqn!r} has {end - begin} bytes for shape {box.lengths}")
        if begin % item_bytes:
            raise ManifestError(f"tensor {fqn!r} begins at {begin}, not aligned for {kind[0]}")
        spec = TensorSpec(fqn, kind[0], shape, box)
        entries.append(TensorEntry(spec, base + begin, base + end))
    return entries


def _row(fqn: str, raw: object, place: object) -> tuple[_Table, _Table]:
    """Return what the header says of a tensor, and of its place."""
    if not is_usable(fqn):
        raise ManifestError(f"tensor name {fqn[:80]!r} of {len(fqn)} characters is not usable")
    if not isinstance(raw, dict) or not isinstance(place, dict):
        raise ManifestError(f"tensor {fqn!r} has no description or no place")
    dtype = raw.get("dtype")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ManifestError(f"tensor {fqn!r} has the unknown dtype {str(dtype)[:40]!r}")
    return raw, place


def _region(
    fqn: str, dtype: str, offsets: _Dims, lengths: _Dims, shape: _Dims, of: _Dims | None
) -> _Region:
    """Return a region of a tensor.

    ``shape`` is what the header says of a box, ``of`` that of the tensor if the box is a range.
    """
    if not _inside(offsets, lengths, shape):
        raise ManifestError(f"tensor {fqn!r} has a box outside its shape {shape}")
    if of is not None:
        if flat_shape(of) != shape:
            raise ManifestError(f"tensor {fqn!r} has the shape {shape} and is no range of {of}")
        shape = of
    item_bytes = ITEM_BYTES[dtype]
    if not addressable(shape, item_bytes):
        raise ManifestError(f"tensor {fqn!r} has the shape {shape}, which no memory can have")
    return _Region(Box(offsets, lengths), shape, item_bytes, item_bytes * math.prod(lengths))


def _inside(offsets: _Dims, lengths: _Dims, shape: _Dims) -> bool:
    return len(offsets) == len(lengths) == len(shape) and all(
        offset + length <= total
        for offset, length, total in zip(offsets, lengths, shape, strict=True)
    )


def _dims(fqns: Iterable[str], rows: Collection[object]) -> list[_Dims]:
    """Return lists of numbers, one of each tensor; looked at one by one if any breaks a rule."""
    if set(map(type, rows)) <= {list}:
        lists = cast("Collection[list[int]]", rows)
        numbers = list(chain.from_iterable(lists))
        if (
            set(map(type, numbers)) <= {int}
            and min(numbers, default=0) >= 0
            and max(numbers, default=0) < NUMBER_MAX
            and max(map(len, lists), default=0) <= DIMS_COUNT_MAX
        ):
            return list(map(tuple, lists))
    return [_integers(fqn, row) for fqn, row in zip(fqns, rows, strict=True)]


def _integers(fqn: str, row: object) -> _Dims:
    if not isinstance(row, list) or len(row) > DIMS_COUNT_MAX:
        raise ManifestError(f"tensor {fqn!r} has no list of at most {DIMS_COUNT_MAX} numbers")
    for n in row:
        if type(n) is not int or not 0 <= n < NUMBER_MAX:
            raise ManifestError(f"tensor {fqn!r} has a number outside 0..2^63")
    return tuple(row)


def _check_filled(entries: Sequence[TensorEntry], begin: int, end: int) -> None:
    at = begin
    for entry in entries:
        if entry.begin != at:
            rule = "overlaps another" if entry.begin < at else "leaves a hole before it"
            raise ManifestError(f"tensor {entry.spec.fqn!r} {rule} at byte {at}")
        at = entry.end
    if at != end:
        raise ManifestError(f"tensors end at byte {at} of {end}")
