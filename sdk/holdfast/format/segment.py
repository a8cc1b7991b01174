"""The segment: a safetensors file whose header says whose it is and where its tensors belong.

``docs/reference/format-v1.md`` is normative; this module lays segments out, as that page has it,
and ``format.header`` reads what they say. Layout::

    bytes 0..8    N, little-endian u64: length of the header
    bytes 8..8+N  JSON, padded with spaces so that the data begin at a multiple of 64
    then          tensors without holes, biggest item size first (so every one is aligned)

The length and every position are constant for a plan: from one save to the next only
fixed-width digits in the header change, and ``HeaderTemplate`` knows where. Pure: bytes in,
values out. Units: bytes, except boxes (elements).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from holdfast.core.ids import Generation, Rank, ShardId, Step, job_name, run_id
from holdfast.core.shard import Shard
from holdfast.errors import InvalidRequestError, ManifestError, UnsupportedFormatError
from holdfast.format.boxes import Box, addressable, whole
from holdfast.format.flat_ranges import flat_shape, is_inside, is_range

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

_STEP_DIGITS = 15
_GENERATION_DIGITS = 10
_PREFIX = struct.Struct("<Q")
_quoted = json.JSONEncoder().encode
_VERSION, _JOB, _RUN, _STEP, _GENERATION, _RANK, _WORLD, _VOLUME, _PLAN, _PARENT = (
    f"holdfast.{word}"
    for word in (
        *("version", "job", "run", "step", "generation"),
        *("rank", "world_size", "volume", "plan", "parent"),
    )
)
METADATA_KEY = "__metadata__"
SHARDING_KEY = "DCP_SHARDING_INFO"
SHAPES_KEY = "holdfast.shapes"


class TensorSpec(NamedTuple):
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


class TensorEntry(NamedTuple):
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
    _check_names(specs)
    checked_plan_hash(identity.plan_hash)
    pairs = ((spec, _checked_cut(spec)) for spec in specs)
    ordered = sorted(pairs, key=lambda pair: -pair[1].item_bytes)
    rows = [(METADATA_KEY, json.dumps(_metadata(identity, ordered), separators=(",", ":")))]
    ends: list[int] = []
    offset = 0
    for spec, cut in ordered:
        begin, offset = offset, offset + cut.length_bytes
        ends.append(offset)
        rows.append((spec.fqn, f'{{{cut.kind},"data_offsets":[{begin},{offset}]}}'))
    if offset > OFFSET_BYTES_MAX:
        raise InvalidRequestError(f"tensors of {offset} bytes exceed {OFFSET_BYTES_MAX}")
    text = _object(rows).encode()
    text += b" " * (-(len(text) + _PREFIX.size) % ALIGNMENT_BYTES)
    if len(text) > HEADER_BYTES_MAX:
        raise InvalidRequestError(f"header of {len(text)} bytes exceeds {HEADER_BYTES_MAX}")
    data = _PREFIX.pack(len(text)) + text
    base = len(data)
    entries = tuple(
        TensorEntry(spec, base + end - cut.length_bytes, base + end)
        for (spec, cut), end in zip(ordered, ends, strict=True)
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


def _check_names(specs: Sequence[TensorSpec]) -> None:
    if len(specs) > TENSORS_COUNT_MAX:
        raise InvalidRequestError(f"{len(specs)} tensors exceed {TENSORS_COUNT_MAX}")
    seen: set[str] = set()
    for spec in specs:
        if not is_usable(spec.fqn) or spec.fqn == METADATA_KEY:
            raise InvalidRequestError(f"tensor name {spec.fqn[:80]!r} is not usable")
        if spec.fqn in seen:
            raise InvalidRequestError(f"tensor {spec.fqn!r} stands twice in one segment")
        seen.add(spec.fqn)


class _Cut(NamedTuple):
    """What all regions of one dtype, shape and box have in common; two parts of JSON of them."""

    item_bytes: int
    length_bytes: int
    kind: str
    place: str


def _checked_cut(spec: TensorSpec) -> _Cut:
    cut = _cut(spec.dtype, spec.shape, spec.box)
    if isinstance(cut, str):
        raise InvalidRequestError(f"tensor {spec.fqn!r} {cut}")
    return cut


@lru_cache(maxsize=4096)
def _cut(dtype: str, shape: tuple[int, ...], box: Box) -> _Cut | str:
    """Return what such regions have in common, or why no tensor can be one."""
    if dtype not in ITEM_BYTES:
        return f"has the unknown dtype {dtype!r}"
    if len(shape) > DIMS_COUNT_MAX:
        return f"has {len(shape)} dims"
    if not is_inside(shape, box):
        return "has a box outside its shape"
    item_bytes = ITEM_BYTES[dtype]
    if not addressable(shape, item_bytes):
        return f"has the shape {shape}, which no memory can have"
    outer = flat_shape(shape) if is_range(shape, box) else shape
    return _Cut(
        item_bytes,
        item_bytes * box.elements_count,
        f'"dtype":"{dtype}","shape":{_list(box.lengths)}',
        f'{{"saved_offsets":{_list(box.offsets)},"global_shape":{_list(outer)}}}',
    )


def _list(numbers: Sequence[int]) -> str:
    return json.dumps(numbers, separators=(",", ":"))


def _object(members: Iterable[tuple[str, str]]) -> str:
    """Return a JSON object of values that are JSON already: most of them are like others."""
    return "{" + ",".join([f"{_quoted(name)}:{text}" for name, text in members]) + "}"


def _metadata(
    identity: SegmentIdentity, ordered: Sequence[tuple[TensorSpec, _Cut]]
) -> dict[str, str]:
    sharding = _object((spec.fqn, cut.place) for spec, cut in ordered)
    flat = {spec.fqn: spec.shape for spec, _ in ordered if is_range(spec.shape, spec.box)}
    shapes = {SHAPES_KEY: json.dumps(flat, separators=(",", ":"))} if flat else {}
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
        SHARDING_KEY: sharding,
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


def is_usable(fqn: str) -> bool:
    """Tell whether a tensor may have this name."""
    return 0 < len(fqn) <= NAME_LENGTH_MAX and fqn.isprintable()


def checked_plan_hash(text: str) -> str:
    """Return ``text`` if it may be a plan hash.

    Raises:
        InvalidRequestError: empty, longer than ``PLAN_HASH_LENGTH_MAX``, or not printable ASCII.
    """
    if not (0 < len(text) <= PLAN_HASH_LENGTH_MAX and text.isascii() and text.isprintable()):
        raise InvalidRequestError(f"plan hash {text[:PLAN_HASH_LENGTH_MAX]!r} is not usable")
    return text


def identity_of(metadata: Mapping[str, str]) -> SegmentIdentity:
    """Return whose segment it is, as its header says.

    Raises:
        ManifestError: a key is missing, or is nobody's name or number.
        UnsupportedFormatError: a format version this code does not read.
    """
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
