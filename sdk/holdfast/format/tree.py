"""State that is not tensors, as JSON that gives back exactly what went in.

A *tree* is nested dicts, lists, tuples and sets of numbers, strings, bytes and None; tensors are
taken out and leave their name behind. What only pickle could express is refused by name: nothing
that is loaded can execute. What is taken comes back equal in value and type, dicts in their order;
what could not is refused too: subclasses that the table of ``format-v1`` does not have, enums,
``np.matrix``. NumPy values and torch sizes are made by functions of the caller's: this module
imports nothing that could.

A JSON object with one key that begins with ``$`` is a marker; dicts that would look like one, or
whose keys are not strings, are written as ``{"$dict": [[key, value], ...]}``.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, TypeAlias, cast

from holdfast.errors import InvalidRequestError, ManifestError

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

DEPTH_MAX = 64
INT_BITS_MAX = 4_096
"""Longer integers are refused: Python itself refuses to read their digits back."""

_REGISTERED = 2
"""``dtype.isbuiltin`` of a dtype that a library registered: its text does not name it."""

LIKE_PLAIN = (Mapping, list, tuple, str, int, float, set, frozenset)
"""What comes of these and is none of ``PLAIN`` is refused with the plain type to keep instead."""

Leaf: TypeAlias = Callable[[object, str], str | None]
MakeNumpy: TypeAlias = Callable[[str, tuple[int, ...] | None, bytes], object]
"""Called as ``make(dtype, shape, data)``; shape None means a scalar."""
MakeSize: TypeAlias = Callable[[Sequence[Any]], object]


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


def decode(
    value: Json,
    *,
    leaf: Callable[[str], object],
    numpy: MakeNumpy | None = None,
    size: MakeSize = tuple,
) -> object:
    """Return the tree that ``encode`` wrote.

    Args:
        value: What ``encode`` returned.
        leaf: Gives back what was taken out under a name.
        numpy: Makes NumPy scalars and arrays; without it they are refused.
        size: Makes what was a ``torch.Size``.

    Raises:
        ManifestError: a marker that is not one of ours, or nesting beyond ``DEPTH_MAX``.
    """
    return _decode(value, (leaf, numpy, size), 0)


def _encode(value: object, path: str, leaf: Leaf, depth: int) -> Json:
    if depth > DEPTH_MAX:
        raise InvalidRequestError(f"state {path!r} is nested deeper than {DEPTH_MAX}", key=path)
    kind = type(value)
    if kind in _SCALARS:
        return _SCALARS[kind](value, path)
    if kind in _CONTAINERS:
        return _CONTAINERS[kind](value, path, leaf, depth)
    if kind.__module__ == "numpy" and any(
        cls.__name__ in ("generic", "ndarray") and cls.__module__ == "numpy" for cls in kind.__mro__
    ):
        return _encode_numpy(value, path)
    if (kind.__module__, kind.__name__) == ("torch", "Size"):
        return {"$size": list(cast("tuple[Json]", value))}
    name = leaf(value, path)
    if name is not None:
        return {"$ref": name}
    raise InvalidRequestError(
        f"state {path!r} holds a {kind.__module__}.{kind.__qualname__}, {_why(value)}", key=path
    )


def _why(value: object) -> str:
    if isinstance(value, Enum):
        return "and only pickle could make that member again; keep its name or value there"
    for plain in LIKE_PLAIN:
        if isinstance(value, plain):
            name = "dict" if plain is Mapping else plain.__name__
            return f"which would come back as another type; keep a plain {name} there"
    return "which only pickle could express; keep plain data and tensors there, or a state_dict()"


def _encode_numpy(value: Any, path: str) -> Json:
    dtype = str(value.dtype.str)
    kind = type(value).__name__
    if value.dtype.hasobject or value.dtype.fields or value.dtype.isbuiltin == _REGISTERED:
        raise InvalidRequestError(f"state {path!r} holds a NumPy value of {value.dtype}", key=path)
    is_array = any(cls.__name__ == "ndarray" for cls in type(value).__mro__)
    if is_array and kind != "ndarray":
        raise InvalidRequestError(
            f"state {path!r} holds a numpy.{kind}, which would come back as another type; keep a "
            f"plain numpy.ndarray there",
            key=path,
        )
    # A scalar is not the same thing as an array without dims.
    shape: Json = list(value.shape) if is_array else None
    data = value.tobytes()[: value.nbytes]  # an empty text has a NUL too many
    return {"$numpy": [dtype, shape, base64.b64encode(data).decode()]}


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


def _encode_default(value: Any, path: str, leaf: Leaf, depth: int) -> Json:
    factory = value.default_factory
    if factory is not None and _FACTORIES.get(getattr(factory, "__name__", "")) is not factory:
        raise InvalidRequestError(
            f"state {path!r} is a defaultdict of {factory!r}, which only pickle could express; "
            f"keep a dict there, or a factory among {', '.join(_FACTORIES)}",
            key=path,
        )
    name = None if factory is None else factory.__name__
    return {"$default": [name, _encode_pairs(value, path, leaf, depth)]}


def _encode_items(value: Any, path: str, leaf: Leaf, depth: int) -> list[Json]:
    return [_encode(item, f"{path}.{i}", leaf, depth + 1) for i, item in enumerate(value)]


def _encode_members(value: Any, path: str, leaf: Leaf, depth: int) -> list[Json]:
    return [_encode(item, path, leaf, depth + 1) for item in sorted(value, key=repr)]


def _encode_pairs(value: Mapping[Any, object], path: str, leaf: Leaf, depth: int) -> list[Json]:
    return [
        [
            _encode(key, f"{path} (key)", leaf, depth + 1),
            _encode(item, f"{path}.{key}", leaf, depth + 1),
        ]
        for key, item in value.items()
    ]


_CONTAINERS: dict[type, Callable[[Any, str, Leaf, int], Json]] = {
    dict: _encode_dict,
    list: _encode_items,
    tuple: lambda *given: {"$tuple": _encode_items(*given)},
    set: lambda *given: {"$set": _encode_members(*given)},
    frozenset: lambda *given: {"$frozenset": _encode_members(*given)},
    Counter: lambda *given: {"$counter": _encode_pairs(*given)},
    OrderedDict: lambda *given: {"$ordered": _encode_pairs(*given)},
    defaultdict: _encode_default,
    deque: lambda value, *more: {"$deque": [value.maxlen, _encode(list(value), *more)]},
}
PLAIN = frozenset({*_SCALARS, *_CONTAINERS})
"""The types that are written as they are."""
_FACTORIES: dict[str, Callable[[], object]] = {
    kind.__name__: kind for kind in (bool, int, float, str, list, dict, set, tuple)
}

_Marker: TypeAlias = "tuple[type[str | list[Json]], Callable[[Any], object]]"
_Makers: TypeAlias = tuple[Callable[[str], object], MakeNumpy | None, MakeSize]


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
    elif marker == "$size":
        read = (list, make[2])
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


def _default(parts: list[Any]) -> defaultdict[object, object]:
    name, pairs = parts
    if name is not None and name not in _FACTORIES:
        raise ValueError(f"{name[:40]!r} is not a factory that is saved")
    return defaultdict(None if name is None else _FACTORIES[name], _dict(pairs))


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
    "$default": (list, _default),
    "$deque": (list, _deque),
}
