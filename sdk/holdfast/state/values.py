"""Plain values on their way back: decoded ones put into what a fresh process has in their place."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import Any, TypeAlias

import torch

from holdfast.errors import InvalidRequestError
from holdfast.format.tree import PLAIN
from holdfast.state.wants import check_fillable

_Keys: TypeAlias = tuple[object, ...]

ABSENT = object()
"""Stands for an object that only the checkpoint has."""
_NUMPY_KINDS = "biufcmMSUV"
"""Those whose bytes are their value: neither objects nor texts kept elsewhere."""


def merge(
    target: object,
    saved: object,
    path: str,
    *,
    exact: bool = True,
    objects: Collection[int] = (),
) -> object:
    """Return ``saved``, put into ``target`` where that can hold it in place.

    Containers of the same type are filled, in the saved order, and so are tensors of the same
    shape and dtype. What stands where an absent object was is left.

    Args:
        target: What is here; the result may be this very object.
        saved: What was decoded; it is the target's own from then on.
        path: Its name, for errors.
        exact: Keys that only a dict here has go, as they had gone when it was saved; else they
            are left, behind the others.
        objects: Identities of what is here and is no plain value: it stays where it is.
    """
    if saved is ABSENT or id(target) in objects:
        return target
    if isinstance(saved, torch.Tensor) and isinstance(target, torch.Tensor):
        return _merge_tensor(target, saved, path)
    if isinstance(saved, dict):
        return _merge_dict(target, saved, path, exact=exact, objects=objects)
    if isinstance(saved, list | tuple | deque):
        return _merge_items(target, saved, path, exact=exact, objects=objects)
    return saved


def check_keys(target: object, saved: object, path: str) -> None:
    """Refuse a tensor or object that has the name of another: ``{0: t}`` beside ``{"0": t}``.

    Both would be filled with the saved one, and the dict that holds both could not be saved.

    Args:
        target: What is here, as for ``merge``.
        saved: What was decoded.
        path: Its name.

    Raises:
        InvalidRequestError: names the keys of both.
    """
    here = dict(_leaves(target, path, ()))
    for name, keys in _leaves(saved, path, ()):
        other = here.get(name, keys)
        if other != keys:
            raise InvalidRequestError(
                f"state {name!r} is under the keys {_shown(other)} of {path!r} now, and was under "
                f"{_shown(keys)} when it was saved: give it the keys of then",
                key=name,
            )


def _leaves(value: object, path: str, keys: _Keys) -> Iterator[tuple[str, _Keys]]:
    """Yield names of the tensors and objects in a value, with the keys that lead there."""
    items: Iterable[tuple[object, object]] = ()
    if isinstance(value, list | tuple | deque):
        items = enumerate(value)
    elif isinstance(value, Mapping):
        items = value.items()
    elif type(value) not in PLAIN and type(value).__module__ != "numpy":
        yield path, keys
    for key, item in items:
        yield from _leaves(item, f"{path}.{key}", (*keys, key))


def _shown(keys: _Keys) -> str:
    return "".join(f"[{key!r}]" for key in keys)


def _merge_tensor(target: torch.Tensor, saved: torch.Tensor, path: str) -> torch.Tensor:
    if saved is target:  # it was read into
        return target
    if target.shape != saved.shape or target.dtype != saved.dtype:
        return saved if target.is_meta else saved.to(target.device)
    check_fillable(path, target)
    with torch.no_grad():
        return target.copy_(saved)


def _merge_items(
    target: object, saved: Any, path: str, *, exact: bool, objects: Collection[int]
) -> object:
    before: list[object] = [*target] if isinstance(target, list | tuple | deque) else []
    items = [
        merge(old, new, f"{path}.{index}", exact=exact, objects=objects)
        for index, (old, new) in enumerate(zip_longest(before[: len(saved)], saved))
        if new is not ABSENT or index < len(before)
    ]
    items += [old for old in before[len(saved) :] if id(old) in objects]
    if isinstance(saved, tuple):
        return type(saved)(items)
    into: Any = target if _same_container(target, saved) else saved
    into.clear()
    into.extend(items)
    return into


def _merge_dict(
    target: object,
    saved: dict[object, object],
    path: str,
    *,
    exact: bool,
    objects: Collection[int],
) -> object:
    before = dict(target) if isinstance(target, Mapping) else {}
    merged = {
        key: merge(before.get(key), value, f"{path}.{key}", exact=exact, objects=objects)
        for key, value in saved.items()
        if value is not ABSENT or key in before
    }
    if not exact:
        merged |= {key: value for key, value in before.items() if key not in merged}
    into: Any = target if _same_container(target, saved) else saved
    into.clear()
    for key, value in merged.items():
        into[key] = value
    return into


def _same_container(target: object, saved: object) -> bool:
    return type(target) is type(saved) and all(
        getattr(target, name, None) == getattr(saved, name, None)
        for name in ("default_factory", "maxlen")
    )


def make_numpy(dtype: str, shape: tuple[int, ...] | None, data: bytes) -> object:
    """Return the NumPy scalar (no shape) or array that was saved.

    Raises:
        ValueError: the bytes are not of that dtype and shape, or it has objects or fields; what
            NumPy is given otherwise can end the process.
    """
    import numpy as np  # noqa: PLC0415 - only where one was saved

    kind, dims = np.dtype(dtype), shape or ()
    plain = kind.kind in _NUMPY_KINDS and kind.names is None and kind.subdtype is None
    if not plain or min(dims, default=0) < 0 or len(data) != kind.itemsize * math.prod(dims):
        raise ValueError(f"{len(data)} bytes are no {dtype[:40]} of shape {shape}")
    if shape is None and kind.kind == "U":  # an array's element loses the NULs at its end
        order = "be" if kind.str[0] == ">" else "le"
        return np.str_(data.decode(f"utf-32-{order}", "surrogatepass"))
    if shape is None and kind.kind == "S":
        return np.bytes_(data)
    array = np.ndarray(dims, dtype=kind, buffer=bytearray(data))
    if kind.itemsize:  # NumPy would make items of one byte out of those of none
        array = array.copy()
    return array[()] if shape is None else array
