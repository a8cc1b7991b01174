"""``torch.save`` and ``torch.load`` with a Holdfast checkpoint in the place of a pickle.

The arguments are those of torch. A path names a folder (or ``s3://bucket/prefix``) that holds one
checkpoint; a file, and anything with ``read`` and ``write``, is left to torch itself, which
unpickles freely only if ``weights_only=False`` asks for it by name (P9).
"""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import IO, Any, TypeAlias, TypeGuard, cast

import torch

from holdfast.errors import InvalidRequestError
from holdfast.format.tree import encode
from holdfast.oneshot import load as load_state
from holdfast.oneshot.world import World
from holdfast.oneshot.writing import write

__all__ = ["load", "save"]

File: TypeAlias = "str | os.PathLike[str] | IO[bytes]"
MapLocation: TypeAlias = (
    "Callable[[torch.UntypedStorage, str], torch.UntypedStorage | None] "
    "| torch.device | str | Mapping[str, str] | None"
)

_OBJECT, _METADATA = "object", "metadata"
_STORES = ("file", "memory", "s3")


def save(
    obj: object,
    f: File,
    pickle_module: ModuleType = pickle,
    pickle_protocol: int = 2,
    **torch_arguments: Any,
) -> None:
    """Write ``obj`` as a checkpoint into the folder ``f``; it is durable on return.

    A checkpoint that is there is replaced, once all bytes of the new one are in the store. As with
    ``torch.save``, the process saves for itself, whatever ranks there are.

    Args:
        obj: Nested dicts, lists and tuples of tensors and plain data, such as a ``state_dict()``.
        f: A path or the URL of a store. An object to write into gets what ``torch.save`` writes.
        pickle_module: For an object to write into; see ``torch.save``.
        pickle_protocol: The same.
        torch_arguments: The same.

    Raises:
        InvalidRequestError: a value that only pickle could express, named; or a file lies there.
        CheckpointError: as ``holdfast.save``.
    """
    if not _is_path(f):
        torch.save(obj, cast("Any", f), pickle_module, pickle_protocol, **torch_arguments)
        return
    path = os.fspath(f)
    if Path(path).is_file():
        raise InvalidRequestError(f"{path} is a file, and a checkpoint is a folder: remove it")
    encode(obj, path=_OBJECT, leaf=_tensors_only)
    state: dict[str, object] = {_OBJECT: obj, _METADATA: list(_metadata(obj, ()))}
    write(path, state, World(0, 1), overwrite=True, notes={})


def load(
    f: File,
    map_location: MapLocation = None,
    pickle_module: ModuleType | None = None,
    *,
    weights_only: bool | None = None,
    mmap: bool | None = None,
    **torch_arguments: Any,
) -> Any:
    """Return what was saved to ``f``.

    Of a folder every part is verified and nothing is unpickled, whatever ``weights_only`` says.
    Tensors come back on the CPU unless ``map_location`` says otherwise, each with memory of its
    own.

    Args:
        f: As for ``save``. A file of ``torch.save``, or an object to read from, is given to
            ``torch.load``.
        map_location: Where tensors go; as in ``torch.load``.
        pickle_module: For files; see ``torch.load``.
        weights_only: For files: False unpickles whatever is in there. None means True, whatever
            the environment says.
        mmap: For files; see ``torch.load``.
        torch_arguments: The same.

    Raises:
        NotFoundError: the folder holds no checkpoint.
        InvalidRequestError: the checkpoint in the folder is none of ``save``.
        CheckpointError: as ``holdfast.load``.
    """
    if not (_is_path(f) and _is_folder(os.fspath(f))):
        return torch.load(
            cast("Any", f), cast("Any", map_location), pickle_module,
            weights_only=True if weights_only is None else weights_only, mmap=mmap,
            **torch_arguments,
        )  # fmt: skip
    state: dict[str, object] = {}
    load_state(os.fspath(f), state)
    if state.keys() != {_OBJECT, _METADATA}:
        raise InvalidRequestError(
            f"the checkpoint in {os.fspath(f)} was not written by torch_io.save: use holdfast.load"
        )
    for keys, metadata in cast("list[tuple[tuple[Any, ...], object]]", state[_METADATA]):
        found: Any = state[_OBJECT]
        for key in keys:
            found = found[key]
        found._metadata = metadata  # noqa: SLF001 - where Module.load_state_dict looks for it
    return _moved(state[_OBJECT], map_location)


def _is_path(f: File) -> TypeGuard[str | os.PathLike[str]]:
    return isinstance(f, str | os.PathLike)


def _is_folder(path: str) -> bool:
    scheme, colon, _ = path.partition(":")
    return (bool(colon) and scheme in _STORES) or Path(path).is_dir()


def _tensors_only(value: object, path: str) -> str | None:
    return path if isinstance(value, torch.Tensor) else None


def _metadata(value: object, keys: tuple[object, ...]) -> Iterator[tuple[object, object]]:
    """Yield the versions of modules that a ``state_dict`` keeps beside its items, and its place."""
    if isinstance(value, OrderedDict) and hasattr(value, "_metadata"):
        yield keys, value._metadata  # noqa: SLF001
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _metadata(item, (*keys, key))
    elif isinstance(value, list | tuple | deque):
        for at, item in enumerate(value):
            yield from _metadata(item, (*keys, at))


def _moved(value: Any, where: MapLocation) -> Any:
    """Return ``value`` with its tensors where ``where`` says; containers stay the same objects."""
    if where is None:
        return value
    if isinstance(value, torch.Tensor):
        return _moved_tensor(value, where)
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(_moved(item, where) for item in value)
    items: Any = ()
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list | deque):
        items = list(enumerate(value))
    for key, item in items:
        value[key] = _moved(item, where)
    return value


def _moved_tensor(tensor: torch.Tensor, where: Any) -> torch.Tensor:
    here = str(tensor.device)
    if isinstance(where, Mapping):
        return tensor.to(where.get(here, here))
    if not callable(where):
        return tensor.to(where)
    storage = where(tensor.untyped_storage(), here)
    if storage is None:
        return tensor
    made = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    return made.set_(storage, 0, tensor.size(), tensor.stride())
