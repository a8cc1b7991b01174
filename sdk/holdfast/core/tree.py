"""State that is not tensors, as JSON that gives back exactly what went in.

A *tree* is nested dicts, lists, tuples and sets of numbers, strings, bytes and None; tensors are
taken out and leave their name behind. What only pickle could express is refused by name: nothing
that is loaded can execute. Dict order, key types, tuples, bytes, NaN and infinities survive;
subclasses of dict, list and tuple come back as the plain type.

A JSON object with one key that begins with ``$`` is a marker; dicts that would look like one, or
whose keys are not strings, are written as ``{"$dict": [[key, value], ...]}``.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from holdfast.errors import InvalidRequestError, ManifestError

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

DEPTH_MAX = 64
INT_BITS_MAX = 4_096
"""Longer integers are refused: Python itself refuses to read their digits back."""

Leaf: TypeAlias = Callable[[object, str], str | None]


def encode(tree: object, *, path: str, leaf: Leaf) -> Json:
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


def _encode(value: object, path: str, leaf: Leaf, depth: int) -> Json:
    if depth > DEPTH_MAX:
        raise InvalidRequestError(f"state {path!r} is nested deeper than {DEPTH_MAX}", key=path)
    if isinstance(value, Mapping):
        return _encode_dict(value, path, leaf, depth)
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        items = [_encode(item, f"{path}.{i}", leaf, depth + 1) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, set | frozenset):
        members = [_encode(item, path, leaf, depth + 1) for item in sorted(value, key=repr)]
        return {"$set" if isinstance(value, set) else "$frozenset": members}
    write = _SCALARS.get(type(value))
    if write is not None:
        return write(value, path)
    name = leaf(value, path)
    if name is not None:
        return {"$ref": name}
    raise InvalidRequestError(
        f"state {path!r} holds a {type(value).__module__}.{type(value).__qualname__}, which only "
        f"pickle could express; keep plain data and tensors there, or a state_dict()",
        key=path,
    )


def _encode_int(value: int, path: str) -> Json:
    if value.bit_length() > INT_BITS_MAX:
        raise InvalidRequestError(
            f"state {path!r} holds an integer of {value.bit_length()} bits, "
            f"more than {INT_BITS_MAX}",
            key=path,
        )
    return value


_SCALARS: dict[type, Callable[[Any, str], Json]] = {
    type(None): lambda value, _: value,
    bool: lambda value, _: value,
    str: lambda value, _: value,
    int: _encode_int,
    float: lambda value, _: value if math.isfinite(value) else {"$float": str(value)},
    complex: lambda value, _: {"$complex": [repr(value.real), repr(value.imag)]},
    bytes: lambda value, _: {"$bytes": base64.b64encode(value).decode()},
    bytearray: lambda value, _: {"$bytearray": base64.b64encode(value).decode()},
}


def _encode_dict(value: Mapping[object, object], path: str, leaf: Leaf, depth: int) -> Json:
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {
            str(key): _encode(item, f"{path}.{key}", leaf, depth + 1) for key, item in value.items()
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


def _decode_marker(marker: str, body: Json, leaf: Callable[[str], object], depth: int) -> object:
    if marker == "$ref" and isinstance(body, str):
        return leaf(body)
    read = _MARKERS.get(marker)
    if read is None:
        raise ManifestError(f"state has the unknown marker {marker[:40]!r}")
    kind, build = read
    if not isinstance(body, kind):
        raise ManifestError(f"state has a malformed {marker}: {type(body).__name__}")
    parts = [_decode(item, leaf, depth + 1) for item in body] if isinstance(body, list) else body
    try:
        return build(parts)
    except (TypeError, ValueError) as cause:
        raise ManifestError(f"state has a malformed {marker}: {cause}") from cause


def _float(text: str) -> float:
    if text not in ("nan", "inf", "-inf"):
        raise ValueError(f"{text[:40]!r} is written as a number")
    return float(text)


def _complex(parts: list[Any]) -> complex:
    real, imag = parts
    return complex(float(real), float(imag))


def _dict(pairs: list[Any]) -> dict[object, object]:
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise ValueError("not a list of pairs")
    return dict(pairs)


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


_MARKERS: dict[str, tuple[type[str | list[Json]], Callable[[Any], object]]] = {
    "$float": (str, _float),
    "$complex": (list, _complex),
    "$bytes": (str, _bytes),
    "$bytearray": (str, lambda text: bytearray(_bytes(text))),
    "$tuple": (list, tuple),
    "$set": (list, set),
    "$frozenset": (list, frozenset),
    "$dict": (list, _dict),
}
