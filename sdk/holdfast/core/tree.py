"""State that is not tensors, as JSON that gives back exactly what went in.

A *tree* is nested dicts, lists, tuples and sets of numbers, strings, bytes and None; tensors are
taken out and leave their name behind. What only pickle could express is refused by name: nothing
that is loaded can execute. Dict order, key types, tuples, bytes, NaN and infinities survive;
subclasses of dict, list, tuple, int, float and str come back as the plain type, except Counter,
OrderedDict and deque, which come back as they were. NumPy scalars and arrays are made by a
function of the caller's: this module imports nothing that could.

A JSON object with one key that begins with ``$`` is a marker; dicts that would look like one, or
whose keys are not strings, are written as ``{"$dict": [[key, value], ...]}``.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from holdfast.errors import InvalidRequestError, ManifestError

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

DEPTH_MAX = 64
INT_BITS_MAX = 4_096
"""Longer integers are refused: Python itself refuses to read their digits back."""

Leaf: TypeAlias = Callable[[object, str], str | None]
MakeNumpy: TypeAlias = Callable[[str, tuple[int, ...] | None, bytes], object]
"""Called as ``make(dtype, shape, data)``; shape None means a scalar."""


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


def decode(value: Json, *, leaf: Callable[[str], object], numpy: MakeNumpy | None = None) -> object:
    """Return the tree that ``encode`` wrote.

    Args:
        value: What ``encode`` returned.
        leaf: Gives back what was taken out under a name.
        numpy: Makes NumPy scalars and arrays; without it they are refused.

    Raises:
        ManifestError: a marker that is not one of ours, or nesting beyond ``DEPTH_MAX``.
    """
    return _decode(value, (leaf, numpy), 0)


def _encode(  # noqa: PLR0911 - one line per kind of value
    value: object, path: str, leaf: Leaf, depth: int
) -> Json:
    if depth > DEPTH_MAX:
        raise InvalidRequestError(f"state {path!r} is nested deeper than {DEPTH_MAX}", key=path)
    if isinstance(value, Counter | OrderedDict):
        marker = "$counter" if isinstance(value, Counter) else "$ordered"
        return {marker: _encode_pairs(value, path, leaf, depth)}
    if isinstance(value, Mapping):
        return _encode_dict(value, path, leaf, depth)
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        items = [_encode(item, f"{path}.{i}", leaf, depth + 1) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, deque):
        return {"$deque": [value.maxlen, _encode(list(value), path, leaf, depth + 1)]}
    if isinstance(value, set | frozenset):
        members = [_encode(item, path, leaf, depth + 1) for item in sorted(value, key=repr)]
        return {"$set" if isinstance(value, set) else "$frozenset": members}
    write = _SCALARS.get(type(value)) or _scalar_writer(value)
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


def _scalar_writer(value: object) -> Callable[[Any, str], Json] | None:
    kind = type(value)
    if kind.__module__ == "numpy" and hasattr(value, "tobytes") and hasattr(value, "dtype"):
        return _encode_numpy
    if isinstance(value, str):
        # The base's own conversion: a subclass may print itself as something else.
        return lambda value, _: str.__str__(value)
    if isinstance(value, int):
        return lambda value, path: _encode_int(int.__int__(value), path)
    if isinstance(value, float):
        return lambda value, path: _SCALARS[float](float.__float__(value), path)
    return None


def _encode_numpy(value: Any, path: str) -> Json:
    dtype = str(value.dtype.str)
    if value.dtype.hasobject or value.dtype.fields:
        raise InvalidRequestError(f"state {path!r} holds a NumPy value of {value.dtype}", key=path)
    # A scalar is not the same thing as an array without dims.
    shape: Json = list(value.shape) if type(value).__name__ == "ndarray" else None
    return {"$numpy": [dtype, shape, base64.b64encode(value.tobytes()).decode()]}


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
    return {"$dict": _encode_pairs(value, path, leaf, depth)}


def _encode_pairs(value: Mapping[Any, object], path: str, leaf: Leaf, depth: int) -> list[Json]:
    return [
        [
            _encode(key, f"{path} (key)", leaf, depth + 1),
            _encode(item, f"{path}.{key}", leaf, depth + 1),
        ]
        for key, item in value.items()
    ]


_Marker: TypeAlias = "tuple[type[str | list[Json]], Callable[[Any], object]]"
_Makers: TypeAlias = tuple[Callable[[str], object], MakeNumpy | None]


def _decode(value: Json, make: _Makers, depth: int) -> object:
    if depth > 2 * DEPTH_MAX:
        raise ManifestError(f"state is nested deeper than {DEPTH_MAX}")
    if isinstance(value, list):
        return [_decode(item, make, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    marker = next(iter(value), "")
    if len(value) == 1 and marker.startswith("$"):
        return _decode_marker(marker, value[marker], make, depth)
    return {key: _decode(item, make, depth + 1) for key, item in value.items()}


def _decode_marker(marker: str, body: Json, make: _Makers, depth: int) -> object:
    if marker == "$ref" and isinstance(body, str):
        return make[0](body)
    if marker == "$numpy" and make[1] is not None:
        read: _Marker = (list, _numpy_reader(make[1]))
    elif marker in _MARKERS:
        read = _MARKERS[marker]
    else:
        raise ManifestError(f"state has the unknown marker {marker[:40]!r}")
    kind, build = read
    if not isinstance(body, kind):
        raise ManifestError(f"state has a malformed {marker}: {type(body).__name__}")
    parts = [_decode(item, make, depth + 1) for item in body] if isinstance(body, list) else body
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


def _deque(parts: list[Any]) -> deque[object]:
    length, items = parts
    return deque(items, length)


def _numpy_reader(make: MakeNumpy) -> Callable[[list[Any]], object]:
    def read(parts: list[Any]) -> object:
        dtype, shape, data = parts
        return make(dtype, None if shape is None else tuple(shape), _bytes(data))

    return read


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


_MARKERS: dict[str, _Marker] = {
    "$float": (str, _float),
    "$complex": (list, _complex),
    "$bytes": (str, _bytes),
    "$bytearray": (str, lambda text: bytearray(_bytes(text))),
    "$tuple": (list, tuple),
    "$set": (list, set),
    "$frozenset": (list, frozenset),
    "$dict": (list, _dict),
    "$counter": (list, lambda pairs: Counter(_dict(pairs))),
    "$ordered": (list, lambda pairs: OrderedDict(_dict(pairs))),
    "$deque": (list, _deque),
}
