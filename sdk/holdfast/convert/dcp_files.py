"""Folders of ``torch.distributed.checkpoint``: written a tensor at a time, read without trust.

DCP's ``.metadata`` is a pickle. It is read by an unpickler that knows DCP's own data classes and
nothing else; what else a folder names is refused (P9). Tensors are loaded with ``weights_only``.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from holdfast.convert.source import TensorSource, spec_of
from holdfast.convert.torch_files import save
from holdfast.errors import InvalidRequestError, ManifestError, UnsupportedFormatError
from holdfast.format.boxes import Box, covers, whole
from holdfast.format.names import blob_name, blob_rank
from holdfast.format.segment import TensorSpec
from holdfast.format.tree import encode
from holdfast.reading.dtypes import dtype_name

METADATA = ".metadata"
DATA = "__0_0.distcp"
METADATA_BYTES_MAX = 4 << 30


def _memory_format(owner: object, name: object) -> object:
    """Stand for getattr, by which Python before 3.11.4 pickles members of an enum; no other use."""
    if owner is not metadata._MEM_FORMAT_ENCODING or name not in owner.__members__:  # noqa: SLF001
        raise InvalidRequestError(
            f"{METADATA} asks for {str(name)[:80]!r} of {str(owner)[:80]}: it is not unpickled"
        )
    return owner[str(name)]


_CLASSES: dict[tuple[str, str], object] = {
    (cls.__module__, cls.__qualname__): cls
    for cls in (
        metadata.Metadata,
        metadata.TensorStorageMetadata,
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.TensorProperties,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata._MEM_FORMAT_ENCODING,  # noqa: SLF001 - what TensorProperties are pickled with
        filesystem._StorageInfo,  # noqa: SLF001 - where FileSystemWriter put a tensor
        torch.Size,
    )
} | {
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,  # noqa: SLF001
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib._local", "PosixPath"): PurePosixPath,
    ("builtins", "getattr"): _memory_format,
}


def write_folder(source: TensorSource, folder: Path, advance: Callable[[int], None]) -> None:
    """Write a folder that ``dcp.load`` reads; state of ranks goes in as plain Python values.

    As ``FileSystemWriter`` does, which however keeps every tensor until the last is written.
    """
    folder.mkdir()
    held: dict[str, metadata.STORAGE_TYPES] = {}
    places: dict[metadata.MetadataIndex, filesystem._StorageInfo] = {}
    with (folder / DATA).open("xb") as file:

        def write(index: metadata.MetadataIndex, value: object) -> None:
            begin = file.tell()
            save(value, file)
            places[index] = filesystem._StorageInfo(DATA, begin, file.tell() - begin)  # noqa: SLF001

        for rank, value in source.state().items():
            name = blob_name(rank)
            held[name] = metadata.BytesStorageMetadata()
            write(metadata.MetadataIndex(name), value)
        for name, tensor in source.tensors([spec.fqn for spec in source.specs()]):
            held[name] = _described(tensor)
            write(metadata.MetadataIndex(name, [0] * tensor.ndim), tensor)
            advance(tensor.nbytes)
    whole_checkpoint = metadata.Metadata(
        state_dict_metadata=held,
        planner_data={name: (name,) for name in held},
        storage_data=places,
        storage_meta=metadata.StorageMeta(),
        version=filesystem.CURRENT_DCP_VERSION,
    )
    (folder / METADATA).write_bytes(pickle.dumps(whole_checkpoint))


def _described(tensor: torch.Tensor) -> metadata.TensorStorageMetadata:
    chunk = metadata.ChunkStorageMetadata(torch.Size([0] * tensor.ndim), tensor.shape)
    properties = metadata.TensorProperties(dtype=tensor.dtype)
    return metadata.TensorStorageMetadata(properties, tensor.shape, [chunk])


class DcpSource:
    """The tensors of a DCP folder, put together from the chunks of all its files.

    Raises:
        InvalidRequestError: ``.metadata`` names a class that is not DCP's own; names it.
        ManifestError: chunks are missing, or a file name leads out of the folder.
        UnsupportedFormatError: written by something else than ``FileSystemWriter``.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        found = _read_metadata(folder / METADATA)
        self._places: Mapping[Any, Any] = found.storage_data
        self._tensors: dict[str, metadata.TensorStorageMetadata] = {}
        self._specs: dict[str, TensorSpec] = {}
        self._values: dict[str, Any] = {}
        self._state: dict[int, Any] = {}
        for name, held in found.state_dict_metadata.items():
            if isinstance(held, metadata.TensorStorageMetadata):
                self._add(name, held)
            else:
                self._add_value(name)

    def specs(self) -> Sequence[TensorSpec]:
        """Return all tensors in the order of their first chunks in the files."""
        return sorted(self._specs.values(), key=lambda spec: self._first(spec.fqn))

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield these tensors, whole."""
        for name in names:
            yield name, self._tensor(name)

    def state(self) -> Mapping[int, Any]:
        """Return the ranks' state that an export of Holdfast put in."""
        return self._state

    def values(self) -> Mapping[str, Any]:
        """Return the other values by name, as JSON trees."""
        return self._values

    def _add(self, name: str, held: metadata.TensorStorageMetadata) -> None:
        shape = tuple(held.size)
        dtype = dtype_name(name, torch.empty(0, dtype=held.properties.dtype))
        boxes = {Box(tuple(c.offsets), tuple(c.sizes)) for c in held.chunks}
        if not covers(whole(shape), boxes):
            raise ManifestError(f"chunks of tensor {name!r} are missing", fqn=name)
        self._tensors[name] = held
        self._specs[name] = spec_of(name, dtype, shape)

    def _add_value(self, name: str) -> None:
        value = self._load(metadata.MetadataIndex(name), f"value {name!r}")
        rank = blob_rank(name)
        if rank is not None and isinstance(value, dict):
            self._state[rank] = value
            return
        self._values[name] = encode(value, path=name, leaf=lambda _value, _path: None)

    def _first(self, name: str) -> tuple[str, int]:
        chunks = self._tensors[name].chunks
        if not chunks:
            return "", 0
        place = self._place(metadata.MetadataIndex(name, chunks[0].offsets), name)
        return place.relative_path, place.offset

    def _tensor(self, name: str) -> torch.Tensor:
        held = self._tensors[name]
        result: torch.Tensor | None = None
        for chunk in held.chunks:
            index = metadata.MetadataIndex(name, chunk.offsets)
            part = self._load(index, f"tensor {name!r}")
            if not isinstance(part, torch.Tensor) or part.dtype != held.properties.dtype:
                raise ManifestError(f"a chunk of {name!r} is not a tensor of its dtype", fqn=name)
            if tuple(part.shape) != tuple(chunk.sizes):
                raise ManifestError(f"a chunk of {name!r} has another shape", fqn=name)
            if tuple(chunk.sizes) == tuple(held.size):
                return part
            if result is None:
                result = torch.empty(held.size, dtype=held.properties.dtype)
            box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            result[box.within(whole(held.size))] = part
        return torch.empty(held.size, dtype=held.properties.dtype) if result is None else result

    def _load(self, index: metadata.MetadataIndex, what: str) -> Any:
        place = self._place(index, what)
        with (self._folder / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            data = io.BytesIO(file.read(place.length))
        try:
            return torch.load(data, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as cause:
            raise InvalidRequestError(
                f"{what} in {self._folder} is more than plain data and is not unpickled: select "
                f"others with --only"
            ) from cause
        except (RuntimeError, ValueError, EOFError) as cause:
            raise ManifestError(f"{what} in {self._folder} cannot be read: {cause}") from cause

    def _place(self, index: metadata.MetadataIndex, what: str) -> Any:
        place = self._places.get(index)
        if not isinstance(place, filesystem._StorageInfo):  # noqa: SLF001
            raise ManifestError(f"{self._folder} does not say where {what} lies")
        name = str(place.relative_path)
        # Names come from the file: none of them may lead out of the folder (P9).
        if Path(name).name != name or not (self._folder / name).is_file():
            raise ManifestError(f"{self._folder} names {name[:80]!r}, which is no file in it")
        if place.transform_descriptors:
            raise UnsupportedFormatError(f"{what} is stored as {place.transform_descriptors}")
        return place


class _Unpickler(pickle.Unpickler):
    """Knows DCP's data classes, dtypes and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES:
            return _CLASSES[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise InvalidRequestError(
            f"{METADATA} names {module}.{name}, which is no data of DCP: it is not unpickled"
        )


def _read_metadata(path: Path) -> metadata.Metadata:
    if path.stat().st_size > METADATA_BYTES_MAX:
        raise ManifestError(f"{path} is longer than {METADATA_BYTES_MAX} bytes")
    with path.open("rb") as file:
        try:
            found = _Unpickler(file).load()
        except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError) as cause:
            if isinstance(cause, InvalidRequestError):
                raise
            raise ManifestError(f"{path} is malformed: {cause}") from cause
    if not isinstance(found, metadata.Metadata) or not isinstance(found.storage_data, dict):
        raise UnsupportedFormatError(f"{path} was not written by torch's FileSystemWriter")
    return found
