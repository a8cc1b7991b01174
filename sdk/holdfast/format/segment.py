"""The segment: a safetensors file whose header says whose it is and where its tensors belong.

``docs/reference/format-v1.md`` is normative; this module is that page as code. Layout::

    bytes 0..8    N, little-endian u64: length of the header
    bytes 8..8+N  JSON, padded with spaces so that the data begin at a multiple of 64
    then          tensors without holes, biggest item size first (so every one is aligned)

The length and every position are constant for a plan: from one save to the next only
fixed-width digits in the header change, and ``HeaderTemplate`` knows where. Pure: bytes in,
values out. Units: bytes, except boxes (elements).
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.core.ids import Generation, Rank, ShardId, Step, job_name, run_id
from holdfast.core.shard import Shard
from holdfast.errors import InvalidRequestError, ManifestError, UnsupportedFormatError
from holdfast.format.boxes import Box, addressable, whole
from holdfast.format.flat_ranges import flat_shape, is_inside, is_range
from holdfast.garbage import no_collection

FORMAT_VERSION = 1
HEADER_BYTES_MAX = 100_000_000
TENSORS_COUNT_MAX = 1_000_000
NAME_LENGTH_MAX = 1_024
DIMS_COUNT_MAX = 64
PLAN_HASH_LENGTH_MAX = 64
ALIGNMENT_BYTES = 64
OFFSET_BYTES_MAX = (1 << 63) - 1

ITEM_BYTES: dict[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Item size of every dtype of the format, by its safetensors name."""

_Dims = tuple[int, ...]
_Place = tuple[str, _Dims, _Dims, _Dims, _Dims | None]
_Sized = tuple[Box, _Dims, int]
_STEP_DIGITS = 15
_GENERATION_DIGITS = 10
_PREFIX = struct.Struct("<Q")
_VERSION, _JOB, _RUN, _STEP, _GENERATION, _RANK, _WORLD, _VOLUME, _PLAN, _PARENT = (
    f"holdfast.{word}"
    for word in (
        *("version", "job", "run", "step", "generation"),
        *("rank", "world_size", "volume", "plan", "parent"),
    )
)
_SHARDING = "DCP_SHARDING_INFO"
_SHAPES = "holdfast.shapes"
_METADATA_KEY = "__metadata__"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One region of one tensor, before it has a position.

    ``shape`` is that of the whole tensor, and ``box`` a box of it or, if it has one dim, a range of
    its elements in row-major order; see ``flat_ranges``.
    """

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    box: Box

    @property
    def length_bytes(self) -> int:
        """Bytes of the box."""
        return ITEM_BYTES[self.dtype] * self.box.elements_count


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One box of one tensor and its bytes ``[begin, end)``, counted from the start of the file."""

    spec: TensorSpec
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentIdentity:
    """Whose segment this is. ``parent`` is the (step, generation) restored from, if any."""

    id: ShardId
    job: str
    world_size: int
    plan_hash: str
    parent: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentHeader:
    """A parsed header; ``entries`` are in file order and fill the file without holes."""

    identity: SegmentIdentity
    entries: tuple[TensorEntry, ...]
    data_begin: int
    length_bytes: int

    def expect(self, shard: Shard) -> None:
        """Do nothing if this is the header of ``shard``: the one check of a segment's identity.

        Raises:
            ManifestError: run, step, generation, rank, volume, job, world size, plan hash or
                length differ; names what does.
        """
        mine = self.identity
        pairs = {
            "shard": (mine.id, shard.id),
            "job": (mine.job, shard.job),
            "world size": (mine.world_size, shard.world_size),
            "plan hash": (mine.plan_hash, shard.plan_hash),
            "length": (self.length_bytes, shard.length_bytes),
        }
        differing = [what for what, (found, wanted) in pairs.items() if found != wanted]
        if differing:
            raise ManifestError(
                f"segment {mine.id.key} lies where {shard.id.key} should: "
                f"{', '.join(differing)} differ",
                shard=shard.id.key,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderTemplate:
    """A header whose digits can be filled in without moving anything."""

    data: bytes
    entries: tuple[TensorEntry, ...]
    length_bytes: int
    _spots: Mapping[str, int]

    def fill(self, *, step: int, generation: int, parent: tuple[int, int] | None) -> bytes:
        """Return the first ``len(data)`` bytes of the segment of this step."""
        header = bytearray(self.data)
        for begin, text in self.patches(step=step, generation=generation, parent=parent):
            header[begin : begin + len(text)] = text
        return bytes(header)

    def patches(
        self, *, step: int, generation: int, parent: tuple[int, int] | None
    ) -> tuple[tuple[int, bytes], ...]:
        """Return what ``fill`` changes, as (position, bytes): all that differs between saves."""
        return (
            (self._spots[_STEP], _step_text(step).encode()),
            (self._spots[_GENERATION], _generation_text(generation).encode()),
            (self._spots[_PARENT], _parent_text(parent).encode()),
        )


def header_template(identity: SegmentIdentity, specs: Sequence[TensorSpec]) -> HeaderTemplate:
    """Lay out a segment that holds ``specs``.

    Tensors are ordered by item size, biggest first, and keep their order otherwise.

    Raises:
        InvalidRequestError: a limit of the format is exceeded, or a name stands twice.
    """
    _check_specs(specs)
    checked_plan_hash(identity.plan_hash)
    ordered = sorted(specs, key=lambda spec: -ITEM_BYTES[spec.dtype])
    table: dict[str, object] = {_METADATA_KEY: _metadata(identity, ordered)}
    ends: list[int] = []
    offset = 0
    for spec in ordered:
        begin, offset = offset, offset + spec.length_bytes
        ends.append(offset)
        table[spec.fqn] = {
            "dtype": spec.dtype,
            "shape": list(spec.box.lengths),
            "data_offsets": [begin, offset],
        }
    if offset > OFFSET_BYTES_MAX:
        raise InvalidRequestError(f"tensors of {offset} bytes exceed {OFFSET_BYTES_MAX}")
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-(len(text) + _PREFIX.size) % ALIGNMENT_BYTES)
    if len(text) > HEADER_BYTES_MAX:
        raise InvalidRequestError(f"header of {len(text)} bytes exceeds {HEADER_BYTES_MAX}")
    data = _PREFIX.pack(len(text)) + text
    entries = tuple(
        TensorEntry(spec=spec, begin=len(data) + end - spec.length_bytes, end=len(data) + end)
        for spec, end in zip(ordered, ends, strict=True)
    )
    spots = {key: _spot(data, key) for key in (_STEP, _GENERATION, _PARENT)}
    return HeaderTemplate(data=data, entries=entries, length_bytes=len(data) + offset, _spots=spots)


def header_length(prefix: bytes) -> int:
    """Return the length of prefix and header from the first 8 bytes.

    Raises:
        ManifestError: fewer than 8 bytes, or a length beyond ``HEADER_BYTES_MAX``.
    """
    if len(prefix) < _PREFIX.size:
        raise ManifestError(f"segment of {len(prefix)} bytes has no header length")
    (length,) = _PREFIX.unpack_from(prefix)
    if length > HEADER_BYTES_MAX:
        raise ManifestError(f"header length {length} exceeds {HEADER_BYTES_MAX}")
    return _PREFIX.size + int(length)


@no_collection()
def parse_header(data: bytes | memoryview, length_bytes: int) -> SegmentHeader:
    """Return the header of a segment of ``length_bytes`` that begins with ``data``.

    Everything is checked before anything is believed: names, dtypes, shapes, that boxes lie in
    their tensors, and that the tensors fill the file without holes or overlap.

    Raises:
        ManifestError: a rule of the format is broken; the message names it.
        UnsupportedFormatError: a format version this code does not read.
    """
    head = bytes(data[:8])
    data_begin = header_length(head)
    if data_begin > length_bytes or data_begin > len(data):
        raise ManifestError(f"header of {data_begin} bytes in a segment of {length_bytes}")
    if data_begin % ALIGNMENT_BYTES:
        raise ManifestError(f"data begin at byte {data_begin}, no multiple of {ALIGNMENT_BYTES}")
    table = _json_object(bytes(data[8:data_begin]), "header")
    metadata = _string_map(table.pop(_METADATA_KEY, None))
    if len(table) > TENSORS_COUNT_MAX:
        raise ManifestError(f"{len(table)} tensors exceed {TENSORS_COUNT_MAX}")
    sharding, shapes = _sharding(metadata), _shapes(metadata, table)
    places: dict[_Place, _Sized] = {}
    entries = [_entry(fqn, raw, sharding, shapes, data_begin, places) for fqn, raw in table.items()]
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    _check_filled(entries, data_begin, length_bytes)
    return SegmentHeader(
        identity=_identity(metadata),
        entries=tuple(entries),
        data_begin=data_begin,
        length_bytes=length_bytes,
    )


def _check_specs(specs: Sequence[TensorSpec]) -> None:
    if len(specs) > TENSORS_COUNT_MAX:
        raise InvalidRequestError(f"{len(specs)} tensors exceed {TENSORS_COUNT_MAX}")
    seen: set[str] = set()
    for spec in specs:
        if not _usable(spec.fqn) or spec.fqn == _METADATA_KEY:
            raise InvalidRequestError(f"tensor name {spec.fqn[:80]!r} is not usable")
        if spec.fqn in seen:
            raise InvalidRequestError(f"tensor {spec.fqn!r} stands twice in one segment")
        if spec.dtype not in ITEM_BYTES:
            raise InvalidRequestError(f"tensor {spec.fqn!r} has the unknown dtype {spec.dtype!r}")
        if len(spec.shape) > DIMS_COUNT_MAX:
            raise InvalidRequestError(f"tensor {spec.fqn!r} has {len(spec.shape)} dims")
        if not is_inside(spec.shape, spec.box):
            raise InvalidRequestError(f"tensor {spec.fqn!r} has a box outside its shape")
        if not addressable(spec.shape, ITEM_BYTES[spec.dtype]):
            raise InvalidRequestError(
                f"tensor {spec.fqn!r} has the shape {spec.shape}, which no memory can have"
            )
        seen.add(spec.fqn)


def _metadata(identity: SegmentIdentity, specs: Sequence[TensorSpec]) -> dict[str, str]:
    flat = {spec.fqn: spec.shape for spec in specs if is_range(spec.shape, spec.box)}
    sharding = {
        spec.fqn: {
            "saved_offsets": list(spec.box.offsets),
            "global_shape": list(flat_shape(spec.shape) if spec.fqn in flat else spec.shape),
        }
        for spec in specs
    }
    shapes = {_SHAPES: json.dumps(flat, separators=(",", ":"))} if flat else {}
    return {
        "format": "pt",
        "DCP_VERSION": "1.0",
        _VERSION: str(FORMAT_VERSION),
        _JOB: identity.job,
        _RUN: identity.id.run,
        _STEP: _step_text(identity.id.step),
        _GENERATION: _generation_text(identity.id.generation),
        _RANK: str(identity.id.rank),
        _WORLD: str(identity.world_size),
        _VOLUME: str(identity.id.volume),
        _PLAN: identity.plan_hash,
        _PARENT: _parent_text(identity.parent),
        **shapes,
        _SHARDING: json.dumps(sharding, separators=(",", ":")),
    }


def _step_text(step: int) -> str:
    return _digits(step, _STEP_DIGITS)


def _generation_text(generation: int) -> str:
    return _digits(generation, _GENERATION_DIGITS)


def _parent_text(parent: tuple[int, int] | None) -> str:
    if parent is None:
        return "-" * (_STEP_DIGITS + 1 + _GENERATION_DIGITS)
    return f"{_step_text(parent[0])}.{_generation_text(parent[1])}"


def _digits(value: int, width: int) -> str:
    text = str(value).zfill(width)
    if value < 0 or len(text) > width:
        raise InvalidRequestError(f"{value} does not fit {width} digits")
    return text


def _spot(data: bytes, key: str) -> int:
    marker = f'"{key}":"'.encode()
    return data.index(marker) + len(marker)


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) != len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ManifestError(f"key {twice[:80]!r} stands twice in the header")
    return table


def _string_map(raw: object) -> dict[str, str]:
    if not isinstance(raw, dict) or not all(isinstance(value, str) for value in raw.values()):
        raise ManifestError("__metadata__ is not a map of strings")
    return raw


def _sharding(metadata: Mapping[str, str]) -> dict[str, object]:
    text = metadata.get(_SHARDING, "").encode(errors="replace")
    return _json_object(text, _SHARDING)


def _shapes(metadata: Mapping[str, str], table: Mapping[str, object]) -> dict[str, _Dims]:
    """Return the shape of each tensor of which a range is here, by name."""
    text = metadata.get(_SHAPES, "{}").encode(errors="replace")
    raw = _json_object(text, _SHAPES)
    unknown = next((fqn for fqn in raw if fqn not in table), None)
    if unknown is not None:
        raise ManifestError(f"{_SHAPES} has a shape of {unknown[:80]!r}, which is not here")
    return {fqn: _integers(fqn, shape) for fqn, shape in raw.items()}


def _json_object(text: bytes, what: str) -> dict[str, object]:
    if text[:1] != b"{":
        raise ManifestError(f"{what} is not a JSON object")
    try:
        table: dict[str, object] = json.loads(text.decode(), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as cause:
        raise ManifestError(f"{what} is not JSON: {cause}") from cause
    return table


def _usable(fqn: str) -> bool:
    return 0 < len(fqn) <= NAME_LENGTH_MAX and fqn.isprintable()


def _inside(offsets: _Dims, lengths: _Dims, shape: _Dims) -> bool:
    return len(offsets) == len(lengths) == len(shape) and all(
        offset + length <= total
        for offset, length, total in zip(offsets, lengths, shape, strict=True)
    )


def checked_plan_hash(text: str) -> str:
    """Return ``text`` if it may be a plan hash.

    Raises:
        InvalidRequestError: empty, longer than ``PLAN_HASH_LENGTH_MAX``, or not printable ASCII.
    """
    if not (0 < len(text) <= PLAN_HASH_LENGTH_MAX and text.isascii() and text.isprintable()):
        raise InvalidRequestError(f"plan hash {text[:PLAN_HASH_LENGTH_MAX]!r} is not usable")
    return text


def _entry(
    fqn: str,
    raw: object,
    sharding: Mapping[str, object],
    shapes: Mapping[str, _Dims],
    base: int,
    places: dict[_Place, _Sized],
) -> TensorEntry:
    sharded = sharding.get(fqn)
    if not _usable(fqn):
        raise ManifestError(f"tensor name {fqn[:80]!r} of {len(fqn)} characters is not usable")
    if not isinstance(raw, dict) or not isinstance(sharded, dict):
        raise ManifestError(f"tensor {fqn!r} has no description or no place")
    dtype = raw.get("dtype")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ManifestError(f"tensor {fqn!r} has the unknown dtype {str(dtype)[:40]!r}")
    lengths = _integers(fqn, raw.get("shape"))
    offsets = _integers(fqn, sharded.get("saved_offsets"))
    shape = _integers(fqn, sharded["global_shape"]) if "global_shape" in sharded else lengths
    span = _integers(fqn, raw.get("data_offsets"))
    # Most tensors of a model are as big as others and cut as they are.
    place = dtype, offsets, lengths, shape, shapes.get(fqn)
    sized = places.get(place)
    if sized is None:
        sized = places[place] = _sized(fqn, *place)
    box, shape, length_bytes = sized
    if len(span) != 2:
        raise ManifestError(f"tensor {fqn!r} has {len(span)} data offsets, not 2")
    if span[1] - span[0] != length_bytes:
        raise ManifestError(f"tensor {fqn!r} has {span[1] - span[0]} bytes for shape {lengths}")
    if span[0] % ITEM_BYTES[dtype]:
        raise ManifestError(f"tensor {fqn!r} begins at {span[0]}, not aligned for {dtype}")
    spec = TensorSpec(fqn=fqn, dtype=dtype, shape=shape, box=box)
    return TensorEntry(spec=spec, begin=base + span[0], end=base + span[1])


def _sized(
    fqn: str, dtype: str, offsets: _Dims, lengths: _Dims, shape: _Dims, of: _Dims | None
) -> _Sized:
    """Return a region of a tensor, the shape of that, and the region's bytes.

    ``shape`` is what the header says of a box, ``of`` that of the tensor if the box is a range.
    """
    if not _inside(offsets, lengths, shape):
        raise ManifestError(f"tensor {fqn!r} has a box outside its shape {shape}")
    if of is not None:
        if flat_shape(of) != shape:
            raise ManifestError(f"tensor {fqn!r} has the shape {shape} and is no range of {of}")
        shape = of
    if not addressable(shape, ITEM_BYTES[dtype]):
        raise ManifestError(f"tensor {fqn!r} has the shape {shape}, which no memory can have")
    return Box(offsets, lengths), shape, ITEM_BYTES[dtype] * math.prod(lengths)


def _integers(fqn: str, raw: object) -> tuple[int, ...]:
    if not isinstance(raw, list) or len(raw) > DIMS_COUNT_MAX:
        raise ManifestError(f"tensor {fqn!r} has no list of at most {DIMS_COUNT_MAX} numbers")
    for n in raw:
        if type(n) is not int or not 0 <= n < 1 << 63:
            raise ManifestError(f"tensor {fqn!r} has a number outside 0..2^63")
    return tuple(raw)


def _check_filled(entries: Sequence[TensorEntry], begin: int, end: int) -> None:
    at = begin
    for entry in entries:
        if entry.begin != at:
            rule = "overlaps another" if entry.begin < at else "leaves a hole before it"
            raise ManifestError(f"tensor {entry.spec.fqn!r} {rule} at byte {at}")
        at = entry.end
    if at != end:
        raise ManifestError(f"tensors end at byte {at} of {end}")


def _identity(metadata: Mapping[str, str]) -> SegmentIdentity:
    version = metadata.get(_VERSION, "")
    if version != str(FORMAT_VERSION):
        raise UnsupportedFormatError(f"segment has format {version[:20]!r}, not {FORMAT_VERSION}")
    try:
        return SegmentIdentity(
            id=ShardId(
                run_id(metadata[_RUN]),
                Step(_number(metadata[_STEP])),
                Generation(_number(metadata[_GENERATION])),
                Rank(_number(metadata[_RANK])),
                _number(metadata[_VOLUME]),
            ),
            job=job_name(metadata[_JOB]),
            world_size=_number(metadata[_WORLD]),
            plan_hash=checked_plan_hash(metadata[_PLAN]),
            parent=_parent(metadata[_PARENT]),
        )
    except (KeyError, InvalidRequestError) as cause:
        raise ManifestError(f"segment does not say whose it is: {cause}") from cause


def _parent(text: str) -> tuple[int, int] | None:
    if text == _parent_text(None):
        return None
    step, _, generation = text.partition(".")
    return _number(step), _number(generation)


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= _STEP_DIGITS + 3):
        raise InvalidRequestError(f"{text[:40]!r} is not a number")
    return int(text)


def blob_spec(fqn: str, capacity_bytes: int) -> TensorSpec:
    """Return the spec of a text blob: a ``U8`` tensor of fixed capacity."""
    return TensorSpec(fqn=fqn, dtype="U8", shape=(capacity_bytes,), box=whole((capacity_bytes,)))
