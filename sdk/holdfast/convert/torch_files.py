"""Files of ``torch.save``, loadable with ``weights_only=True``; read with nothing less (P9).

``torch.save`` wants all tensors at once: they are put into a file beside first and mapped, so
that memory stays bounded. Takes the space of the checkpoint twice on the disk while it writes.
"""

from __future__ import annotations

import mmap
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch

from holdfast.convert.source import TensorSource, raw, spec_of
from holdfast.errors import InvalidRequestError, UnsupportedFormatError
from holdfast.format.names import blob_name, blob_rank
from holdfast.format.segment import ALIGNMENT_BYTES, TensorSpec
from holdfast.format.tree import encode
from holdfast.reading.dtypes import TORCH, dtype_name

_ZIP = b"PK\x03\x04"


def write_file(source: TensorSource, path: Path, advance: Callable[[int], None]) -> None:
    """Write ``{name: tensor, "holdfast.rank.0": {...}}`` as one file of ``torch.save``."""
    with path.with_name(f"{path.name}.data").open("x+b") as spool:
        Path(spool.name).unlink()  # the open file is enough
        begins: dict[str, int] = {}
        specs = source.specs()
        for name, tensor in source.tensors([spec.fqn for spec in specs]):
            begins[name] = spool.seek(spool.tell() + -spool.tell() % ALIGNMENT_BYTES)
            spool.write(raw(tensor))
            advance(tensor.nbytes)
        spool.flush()
        content: dict[str, Any] = {blob_name(rank): value for rank, value in source.state().items()}
        # A mapping of nothing is an error, and no tensor needs it.
        mapping = mmap.mmap(spool.fileno(), 0) if spool.tell() else mmap.mmap(-1, 1)
        for spec in specs:
            content[spec.fqn] = _mapped(mapping, spec, begins[spec.fqn])
        with path.open("xb") as file:
            save(content, file)


def save(content: object, file: IO[bytes]) -> None:
    """Write as ``torch.save`` does.

    Raises:
        OSError: what the file raised, of which torch makes a RuntimeError about positions.
    """
    try:
        torch.save(content, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise


class TorchSource:
    """A file of ``torch.save``, mapped and loaded with ``weights_only=True``.

    Tensors anywhere in nested dicts, lists and tuples are named by their path.

    Raises:
        InvalidRequestError: it holds what only pickle can make; names it.
        UnsupportedFormatError: not a zip file of ``torch.save``, as torch >= 1.6 writes.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            if file.read(len(_ZIP)) != _ZIP:
                raise UnsupportedFormatError(f"{path} is no file of torch.save of torch >= 1.6")
        try:
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except pickle.UnpicklingError as cause:
            raise InvalidRequestError(
                f"{path} holds more than tensors and plain data, which is not unpickled: "
                f"{_refused(cause)}"
            ) from cause
        except (RuntimeError, ValueError, EOFError, KeyError) as cause:
            raise UnsupportedFormatError(f"{path} is no file of torch.save: {cause}") from cause
        if not isinstance(content, dict):
            raise InvalidRequestError(f"{path} holds a {type(content).__name__}, not a dict")
        self._tensors: dict[str, torch.Tensor] = {}
        self._values: dict[str, Any] = {}
        self._state: dict[int, Any] = {}
        for key, value in content.items():
            rank = blob_rank(str(key))
            if rank is not None and isinstance(value, dict):
                self._state[rank] = value
            else:
                self._add(str(key), value)

    def specs(self) -> Sequence[TensorSpec]:
        """Return all tensors in the order of the file."""
        return [
            spec_of(name, dtype_name(name, tensor), tensor.shape)
            for name, tensor in self._tensors.items()
        ]

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield these tensors, views of the file."""
        for name in names:
            yield name, self._tensors[name]

    def state(self) -> Mapping[int, Any]:
        """Return the ranks' state that an export of Holdfast put in."""
        return self._state

    def values(self) -> Mapping[str, Any]:
        """Return everything else by its key, tensors replaced by references."""
        return self._values

    def _add(self, key: str, value: object) -> None:
        before = len(self._tensors)
        tree = encode(value, path=key, leaf=self._take)
        alone = tree == {"$ref": key}
        if not alone and not (isinstance(value, dict) and _only_tensors(value)):
            self._values[key] = tree
        elif not alone and len(self._tensors) == before:
            self._values[key] = tree  # an empty dict

    def _take(self, value: object, path: str) -> str | None:
        if not isinstance(value, torch.Tensor):
            return None
        if path in self._tensors:
            raise InvalidRequestError(f"two tensors would be named {path!r}")
        self._tensors[path] = value.detach()
        return path


def _only_tensors(value: Mapping[Any, Any]) -> bool:
    return all(isinstance(item, torch.Tensor) for item in value.values())


def _mapped(mapping: mmap.mmap, spec: TensorSpec, begin: int) -> torch.Tensor:
    dtype = TORCH[spec.dtype]
    if not spec.length_bytes:
        return torch.empty(spec.shape, dtype=dtype)
    count = spec.box.elements_count
    return torch.frombuffer(mapping, dtype=dtype, count=count, offset=begin).view(spec.shape)


def _refused(cause: Exception) -> str:
    """Return the line of torch's long message that names what it refused."""
    for line in str(cause).splitlines():
        if "GLOBAL" in line or "Unsupported" in line:
            return line.strip()[:300]
    return str(cause).split("\n", maxsplit=1)[0][:300]
