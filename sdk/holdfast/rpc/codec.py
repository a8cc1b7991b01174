"""Messages to core values and back, by field names.

A core dataclass has the name and fields of its message, so one rule converts all: ``tuple`` is
repeated, ``X | None`` is an optional message, ``IntEnum`` is an enum by number, ``Mapping`` is a
map, and a union of classes is a message with a ``oneof kind`` of theirs.
``tests/contract/test_codec.py`` checks every pair.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields
from enum import IntEnum
from functools import cache
from typing import Any, TypeVar

from google.protobuf.message import Message

from holdfast.core.sources import Memory, Object, Rebuilt
from holdfast.errors import InvalidRequestError

V = TypeVar("V")
M = TypeVar("M", bound=Message)
_SCALARS = frozenset({str, int, bytes, float, bool})
_KINDS: Mapping[type[object], str] = {
    Memory: "memory",
    Object: "object",
    Rebuilt: "rebuilt",
}
"""Classes that are members of a union, and their fields in its message's ``oneof kind``."""


def to_message(value: object, message_type: type[M]) -> M:
    """Return ``value`` as a message of ``message_type``; None and empty fields stay unset."""
    return message_type(**_keywords(value))


def from_message(message: Message, value_type: type[V]) -> V:
    """Return ``message`` as a ``value_type``.

    Raises:
        InvalidRequestError: the values do not form one, e.g. an enum number from the future.
    """
    try:
        arguments = {name: read(message) for name, read in _readers(value_type)}  # type: ignore[arg-type]
        return value_type(**arguments)
    except (TypeError, ValueError) as cause:
        raise InvalidRequestError(f"malformed {type(message).__name__}: {cause}") from cause


def _keywords(value: object) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for name in _names(type(value)):  # type: ignore[arg-type]
        item = getattr(value, name)
        if item is not None:
            arguments[name] = item if type(item) in _SCALARS else _plain(item)
    return arguments


@cache
def _names(value_type: type[object]) -> tuple[str, ...]:
    return tuple(spec.name for spec in fields(value_type))  # type: ignore[arg-type]


def _plain(item: object) -> object:
    if isinstance(item, tuple):
        return [_plain(part) for part in item]
    if hasattr(item, "__dataclass_fields__"):
        kind = _KINDS.get(type(item))
        return _keywords(item) if kind is None else {kind: _keywords(item)}
    if isinstance(item, Mapping):
        return dict(item)
    return item


@cache
def _readers(value_type: type[object]) -> tuple[tuple[str, Callable[[Message], object]], ...]:
    hints = typing.get_type_hints(value_type)
    return tuple(
        (spec.name, _reader(spec.name, hints[spec.name]))
        for spec in fields(value_type)  # type: ignore[arg-type]
    )


def _reader(name: str, hint: Any) -> Callable[[Message], object]:
    origin = typing.get_origin(hint)
    if origin is tuple:
        convert = _converter(typing.get_args(hint)[0])
        return lambda message: tuple(convert(part) for part in getattr(message, name))
    if type(None) in typing.get_args(hint):
        convert = _converter(next(t for t in typing.get_args(hint) if t is not type(None)))
        return lambda message: convert(getattr(message, name)) if message.HasField(name) else None
    if origin is not None and issubclass(origin, Mapping):
        return lambda message: dict(getattr(message, name))
    convert = _converter(hint)
    return lambda message: convert(getattr(message, name))


def _converter(hint: Any) -> Callable[[Any], object]:
    if isinstance(hint, types.UnionType):
        return _one_of({_KINDS[kind]: _converter(kind) for kind in typing.get_args(hint)})
    if hasattr(hint, "__dataclass_fields__"):
        return lambda message: from_message(message, hint)
    if isinstance(hint, type) and issubclass(hint, IntEnum):
        return hint
    return lambda value: value


def _one_of(kinds: Mapping[str, Callable[[Any], object]]) -> Callable[[Any], object]:
    def convert(message: Any) -> object:
        kind = message.WhichOneof("kind")
        if kind is None:
            raise ValueError(f"{type(message).__name__} of a kind that is not known here")
        return kinds[kind](getattr(message, kind))

    return convert
