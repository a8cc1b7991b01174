"""Dataclasses to and from JSON: a field that is unknown, missing or of another type is named.

What comes from the network or from a file that a user wrote is read here before anybody believes
it. Numbers are finite; a whole number may stand where a fraction is expected, nothing else.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, asdict, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, TypeVar, get_args, get_origin

from holdfast.core.text import holds_nul
from holdfast.errors import InvalidRequestError

SHOWN_LENGTH_MAX = 60
ITEMS_MAX = 100_000
INT_MAX = 2**63 - 1

T = TypeVar("T")


def from_record(cls: type[T], record: object, where: str = "") -> T:
    """Return the dataclass ``cls`` that ``record``, a JSON object, describes.

    Args:
        cls: Its fields are text, numbers, truth values, enumerations by value, other dataclasses,
            tuples of these, mappings from text to these, or one of these or None.
        record: As ``json.loads`` gives it.
        where: What errors call it.

    Raises:
        InvalidRequestError: names the field, and what it should be.
    """
    if not isinstance(record, Mapping):
        raise InvalidRequestError(f"{where or 'it'} must be an object, not {_shown(record)}")
    known = _fields(typing.cast("Any", cls))
    for name in record:
        if name not in known:
            near = ", ".join(known)
            raise InvalidRequestError(f"{_at(where, str(name))} is not known; known are {near}")
    values = {}
    for name, (field, hint) in known.items():
        if name in record:
            values[name] = _value(hint, record[name], _at(where, name))
        elif field.default is MISSING and field.default_factory is MISSING:
            raise InvalidRequestError(f"{_at(where, name)} is missing")
    return cls(**values)


def to_record(value: Any) -> Any:
    """Return a dataclass as ``from_record`` reads it: objects, lists and what JSON has itself."""
    return _plainly(asdict(value))


def _plainly(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {key: _plainly(one) for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plainly(one) for one in value]
    return value


@cache
def _fields(cls: Any) -> dict[str, tuple[Field[Any], Any]]:
    hints = typing.get_type_hints(cls)
    return {field.name: (field, hints[field.name]) for field in fields(cls)}


def _value(hint: Any, value: object, where: str) -> Any:
    origin = get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        (inner,) = (one for one in get_args(hint) if one is not types.NoneType)
        return None if value is None else _value(inner, value, where)
    if origin is not None:
        read = _items if origin is tuple else _mapping
        return read(hint, value, where)
    if is_dataclass(hint):
        return from_record(typing.cast("type[Any]", hint), value, where)
    return (_member if issubclass(hint, Enum) else _plain)(hint, value, where)


def _items(hint: Any, value: object, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise InvalidRequestError(f"{where} must be a list, not {_shown(value)}")
    if len(value) > ITEMS_MAX:
        raise InvalidRequestError(f"{where} has {len(value)} items, more than {ITEMS_MAX}")
    inner = get_args(hint)[0]
    return tuple(_value(inner, one, f"{where}[{index}]") for index, one in enumerate(value))


def _mapping(hint: Any, value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"{where} must be an object, not {_shown(value)}")
    if len(value) > ITEMS_MAX:
        raise InvalidRequestError(f"{where} has {len(value)} entries, more than {ITEMS_MAX}")
    inner = get_args(hint)[1]
    return {
        _plain(str, key, f"a name in {where}"): _value(inner, one, _at(where, str(key)))
        for key, one in value.items()
    }


def _member(hint: type[Enum], value: object, where: str) -> Enum:
    try:
        return hint(value)
    except ValueError:
        known = ", ".join(str(member.value) for member in hint)
        raise InvalidRequestError(f"{where} must be one of {known}, not {_shown(value)}") from None


def _plain(hint: type, value: object, where: str) -> Any:
    if hint is str:
        if isinstance(value, str) and not holds_nul(value):
            return value
    elif hint is bool:
        if isinstance(value, bool):
            return value
    elif isinstance(value, int) and not isinstance(value, bool):
        if abs(value) <= INT_MAX:
            return float(value) if hint is float else value
    elif hint is float and isinstance(value, float) and math.isfinite(value):
        return value
    raise InvalidRequestError(f"{where} must be {_MEANINGS[hint]}, not {_shown(value)}")


_MEANINGS = {
    str: "a text without NUL",
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
}


def _at(where: str, name: str) -> str:
    return f"{where}.{name[:SHOWN_LENGTH_MAX]}" if where else name[:SHOWN_LENGTH_MAX]


def _shown(value: object) -> str:
    return f"{value!r:.{SHOWN_LENGTH_MAX}}"
