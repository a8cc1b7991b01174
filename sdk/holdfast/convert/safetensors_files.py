"""Safetensors files and Hugging Face folders, written and read a tensor at a time.

A folder's files hold at most ``SHARD_BYTES_MAX`` each (5 GB as Hugging Face counts it) unless one
tensor is bigger, and ``model.safetensors.index.json`` says which tensor is where.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from holdfast.convert.source import TensorSource, raw, spec_of
from holdfast.errors import (
    InvalidRequestError,
    ManifestError,
    NotFoundError,
    UnsupportedFormatError,
)
from holdfast.format.canonical import strict_object
from holdfast.format.segment import (
    HEADER_BYTES_MAX,
    ITEM_BYTES,
    TENSORS_COUNT_MAX,
    TensorSpec,
    header_length,
)
from holdfast.reading.dtypes import TORCH

SHARD_BYTES_MAX = 5 * 10**9
INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"
_BEGIN_BYTES = 9
STATE = "state.json"

Advance = Callable[[int], None]

_METADATA = "__metadata__"


def write_file(
    source: TensorSource, path: Path, specs: Sequence[TensorSpec], advance: Advance
) -> None:
    """Write one safetensors file with these tensors; the biggest item sizes come first."""
    ordered = sorted(specs, key=lambda spec: -ITEM_BYTES[spec.dtype])
    table: dict[str, Any] = {_METADATA: {"format": "pt"}}
    offset = 0
    for spec in ordered:
        end = offset + spec.length_bytes
        table[spec.fqn] = {
            "dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, end],
        }  # fmt: skip
        offset = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, tensor in source.tensors([spec.fqn for spec in ordered]):
            file.write(raw(tensor))
            advance(tensor.nbytes)


def write_folder(
    source: TensorSource, folder: Path, advance: Advance, shard_bytes_max: int = SHARD_BYTES_MAX
) -> None:
    """Write a folder as ``save_pretrained`` would: one file, or several and their index."""
    folder.mkdir()
    groups = _groups(source.specs(), shard_bytes_max)
    if len(groups) == 1:
        write_file(source, folder / f"model{SUFFIX}", groups[0], advance)
    else:
        weight_map: dict[str, str] = {}
        for number, specs in enumerate(groups, start=1):
            name = f"model-{number:05}-of-{len(groups):05}{SUFFIX}"
            write_file(source, folder / name, specs, advance)
            weight_map.update(dict.fromkeys((spec.fqn for spec in specs), name))
        total = sum(spec.length_bytes for specs in groups for spec in specs)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    write_state(source, folder / STATE)


def write_state(source: TensorSource, path: Path) -> bool:
    """Write what is not tensors, by rank, and say whether there is any."""
    state = source.state()
    if state:
        path.write_text(json.dumps({str(rank): value for rank, value in state.items()}))
    return bool(state)


def state_path(file: Path) -> Path:
    """Return where the state of a single file goes: ``x.safetensors`` -> ``x.state.json``."""
    return file.with_name(f"{file.name.removesuffix(SUFFIX)}.{STATE}")


def is_safetensors(path: Path) -> bool:
    """Return whether the file begins as one does, whatever its name: a length, then JSON."""
    with path.open("rb") as file:
        begin = file.read(_BEGIN_BYTES)
    return len(begin) == _BEGIN_BYTES and begin.endswith(b"{")


class SafetensorsSource:
    """The tensors of one or more files, mapped; headers are checked before anything is believed.

    Raises:
        ManifestError: a header that breaks a rule of safetensors; names the file.
        UnsupportedFormatError: a dtype that a segment cannot hold; names the tensor.
        InvalidRequestError: a tensor stands in two files.
    """

    def __init__(self, files: Sequence[Path], state: Path) -> None:
        self._maps: dict[str, tuple[torch.Tensor, int]] = {}
        self._specs: dict[str, TensorSpec] = {}
        self._state = state
        for path in files:
            self._add(path)

    def specs(self) -> Sequence[TensorSpec]:
        """Return all tensors in the order of the files."""
        return list(self._specs.values())

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield these tensors, views of the files where alignment allows it."""
        for name in names:
            spec, (data, begin) = self._specs[name], self._maps[name]
            view = data[begin : begin + spec.length_bytes]
            if begin % ITEM_BYTES[spec.dtype]:
                view = view.clone()
            yield name, view.view(TORCH[spec.dtype]).view(spec.shape)

    def state(self) -> Mapping[int, Any]:
        """Return the ranks' state that an export of Holdfast wrote beside the tensors."""
        if not self._state.is_file():
            return {}
        found = strict_object(self._state.read_bytes(), what=self._state.name, bytes_max=1 << 30)
        if not all(rank.isascii() and rank.isdigit() for rank in found):
            return {}  # a file of that name from somebody else
        return {int(rank): value for rank, value in found.items()}

    def values(self) -> Mapping[str, Any]:
        """Return nothing: safetensors hold tensors."""
        return {}

    def _add(self, path: Path) -> None:
        with path.open("rb") as file:
            length_bytes = os.fstat(file.fileno()).st_size
            try:
                begin = header_length(file.read(8))
                table = strict_object(
                    file.read(begin - 8), what=f"header of {path.name}", bytes_max=HEADER_BYTES_MAX
                )
            except ManifestError as cause:
                raise ManifestError(f"{path}: {cause.message}") from cause
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        data = torch.frombuffer(mapping, dtype=torch.uint8)
        table.pop(_METADATA, None)
        spans = []
        for name, entry in table.items():
            if name in self._specs:
                raise InvalidRequestError(f"tensor {name!r} stands in two files, one is {path}")
            spec, span = _entry(path, name, entry)
            self._specs[name] = spec
            self._maps[name] = (data, begin + span[0])
            spans.append(span)
        _check_filled(path, spans, length_bytes - begin)


def open_folder(folder: Path) -> SafetensorsSource:
    """Return the source of a Hugging Face folder, with its index or without one.

    Raises:
        NotFoundError: no safetensors there.
        ManifestError: the index is malformed or names a file that is not in the folder.
    """
    index = folder / INDEX
    if index.is_file():
        table = strict_object(index.read_bytes(), what=INDEX, bytes_max=HEADER_BYTES_MAX)
        places = table.get("weight_map")
        if not isinstance(places, dict):
            raise ManifestError(f"{index} has no weight_map")
        names = sorted({str(name) for name in places.values()})
        for name in names:
            # Names come from the file: none of them may lead out of the folder (P9).
            if Path(name).name != name or not (folder / name).is_file():
                raise ManifestError(f"{index} names {name[:80]!r}, which is no file beside it")
    else:
        names = sorted(path.name for path in folder.glob(f"*{SUFFIX}"))
    if not names:
        raise NotFoundError(f"no {SUFFIX} file is in {folder}")
    return SafetensorsSource([folder / name for name in names], folder / STATE)


def _groups(specs: Sequence[TensorSpec], shard_bytes_max: int) -> list[list[TensorSpec]]:
    groups: list[list[TensorSpec]] = [[]]
    room_bytes = shard_bytes_max
    for spec in specs:
        if groups[-1] and spec.length_bytes > room_bytes:
            groups.append([])
            room_bytes = shard_bytes_max
        groups[-1].append(spec)
        room_bytes -= spec.length_bytes
    return groups


def _entry(path: Path, name: str, entry: object) -> tuple[TensorSpec, tuple[int, int]]:
    if not isinstance(entry, dict) or len(entry) != 3:
        raise ManifestError(f"{path}: tensor {name[:80]!r} has no description")
    dtype: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    span: Any = entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise UnsupportedFormatError(f"{path}: tensor {name!r} is {str(dtype)[:40]}")
    if not (_numbers(shape) and _numbers(span)) or len(span) != 2:
        raise ManifestError(f"{path}: tensor {name!r} has a malformed shape or place")
    if span[1] - span[0] != ITEM_BYTES[dtype] * math.prod(shape):
        raise ManifestError(f"{path}: tensor {name!r} has {span[1] - span[0]} bytes for {shape}")
    return spec_of(name, dtype, shape), (span[0], span[1])


def _numbers(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= 64
        and all(type(n) is int and 0 <= n < 1 << 63 for n in value)
    )


def _check_filled(path: Path, spans: list[tuple[int, int]], length_bytes: int) -> None:
    if len(spans) > TENSORS_COUNT_MAX:
        raise ManifestError(f"{path}: {len(spans)} tensors exceed {TENSORS_COUNT_MAX}")
    at = 0
    for begin, end in sorted(spans):
        if begin != at:
            raise ManifestError(f"{path}: tensors overlap or leave a hole at byte {at}")
        at = end
    if at != length_bytes:
        raise ManifestError(f"{path}: tensors end at byte {at} of {length_bytes}")
