"""State that is not tensors, as JSON that gives back exactly what went in.

A *tree* is nested dicts, lists, tuples and sets of numbers, strings, bytes and None; tensors are taken
out and leave their name behind. What only pickle could express is refused by name: nothing that
is loaded can execute. Dict order, key types, tuples, bytes, NaN and infinities survive.

A JSON object with one key that begins with ``$`` is a marker; dicts that would look like one, or
whose keys are not strings, are written as ``{"$dict": [[key, value], ...]}``.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

from holdfast.errors import InvalidRequestError, ManifestError

Json: TypeAlias = "None | bool | int | float | str | list[Json] | dict[str, Json]"

DEPTH_MAX = 64


def encode(tree: object, *, path: str, leaf: Callable[[object, str], str | None]) -> Json:
    """Return ``tree`` as JSON; tensors become references.

    Args:
        tree: The value.
        path: Its name, for errors and for the names of what lies below it.
        leaf: Called as ``leaf(value, path)`` for what is not plain data: returns the name under
            which it took the value out, or None when it does not know it either.

    Raises:
        InvalidRequestError: a value that only pickle can express, named by its path.
    """
    return _encode(tree, path, leaf, 0)


def decode(value: Json, *, leaf: Callable[[str], object]) -> object:
    """Return the tree that ``encode`` wrote; ``leaf(name)`` gives back what was taken out.

    Raises:
        ManifestError: a marker that is not one of ours, or nesting beyond ``DEPTH_MAX``.
    """
    return _decode(value, leaf, 0)


def _encode(  # noqa: PLR0911 - one line per kind of value
    value: object, path: str, leaf: Callable[[object, str], str | None], depth: int
) -> Json:
    if depth > DEPTH_MAX:
        raise InvalidRequestError(f"state {path!r} is nested deeper than {DEPTH_MAX}")
    if value is None or isinstance(value, bool | str) and type(value) in (bool, str):
        return value
    if type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, bytes | bytearray):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, complex):
        return {"$complex": [repr(value.real), repr(value.imag)]}
    if isinstance(value, Mapping):
        return _encode_dict(value, path, leaf, depth)
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        items = [_encode(v, f"{path}.{i}", leaf, depth + 1) for i, v in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, set | frozenset):
        members = [_encode(v, path, leaf, depth + 1) for v in sorted(value, key=repr)]
        return {"$set": members}
    name = leaf(value, path)
    if name is not None:
        return {"$ref": name}
    raise InvalidRequestError(
        f"state {path!r} holds a {type(value).__module__}.{type(value).__qualname__}, which only "
        f"pickle could express; keep plain data and tensors there, or a state_dict()",
        key=path,
    )


def _encode_dict(
    value: Mapping[object, object],
    path: str,
    leaf: Callable[[object, str], str | None],
    depth: int,
) -> Json:
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {
            str(key): _encode(item, f"{path}.{key}", leaf, depth + 1)
            for key, item in value.items()
        }
    return {
        "$dict": [
            [
                _encode(key, f"{path} (key)", leaf, depth + 1),
                _encode(item, f"{path}.{key}", leaf, depth + 1),
            ]
            for key, item in value.items()
        ]
    }


def _decode(value: Json, leaf: Callable[[str], object], depth: int) -> object:
    if depth > 2 * DEPTH_MAX:
        raise ManifestError(f"state is nested deeper than {DEPTH_MAX}")
    if isinstance(value, list):
        return [_decode(item, leaf, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    marker = next(iter(value), "")
    if len(value) == 1 and marker.startswith("$"):
        return _decode_marker(marker, value[marker], leaf, depth)
    return {key: _decode(item, leaf, depth + 1) for key, item in value.items()}


def _decode_marker(
    marker: str, body: Json, leaf: Callable[[str], object], depth: int
) -> object:
    try:
        if marker == "$ref" and isinstance(body, str):
            return leaf(body)
        if marker == "$float" and body in ("nan", "inf", "-inf"):
            return float(str(body))
        if marker == "$bytes" and isinstance(body, str):
            return base64.b64decode(body, validate=True)
        if isinstance(body, list):
            if marker == "$complex":
                real, imag = map(str, body)
                return complex(float(real), float(imag))
            if marker == "$dict":
                pairs = [_decode(pair, leaf, depth + 1) for pair in body]
                return {key: item for key, item in pairs}  # type: ignore[misc]
            items = [_decode(item, leaf, depth + 1) for item in body]
            if marker == "$tuple":
                return tuple(items)
            if marker == "$set":
                return set(items)
    except (TypeError, ValueError) as cause:
        raise ManifestError(f"state has a malformed {marker}: {cause}") from cause
    raise ManifestError(f"state has the unknown marker {marker[:40]!r}")
