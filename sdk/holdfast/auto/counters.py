"""What counts the batches of a pass from outside: ``enumerate``, ``islice`` and ``zip`` around it.

A pass that goes on in its middle is asked by new ones of these, which begin at 0. They are found
among the interpreter's objects and moved on. What cannot be is named.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, repeat
from types import FrameType, GeneratorType
from typing import Any

_AROUND = (enumerate, islice, zip, map, filter)
_INDEX_OFFSET = object.__basicsize__
DEPTH_MAX = 3
"""Of generators and the like between a ``zip`` and a pass."""


@dataclass
class Counters:
    """What counts the batches of one pass.

    ``others`` says what begins anew after a restart: it cannot be moved on.
    """

    enumerates: list[Any] = field(default_factory=list)
    slices: list[Any] = field(default_factory=list)
    others: list[str] = field(default_factory=list)

    def values(self) -> list[int]:
        """Return how far each is that can be moved on."""
        indexes = [one.__reduce__()[1][1] for one in self.enumerates]
        return indexes + [_taken(one) for one in self.slices]

    def follow(self, before: list[int], count: int) -> bool:
        """Tell whether each has counted ``count`` batches since its value was ``before``."""
        moved = zip(before, self.values(), strict=True)
        return all(now - then == count for then, now in moved)

    def move_on(self, count: int) -> list[str]:
        """Have each be where it was after ``count`` batches; return what cannot be."""
        left = ["enumerate" for one in self.enumerates if not _set_index(one, count)]
        return left + ["islice" for one in self.slices if not _set_taken(one, count)]


def counters_of(asked: object) -> Counters:
    """Return what counts the batches of the pass ``asked``, which is asked for one right now.

    Looks at all objects that the garbage collector knows: milliseconds.
    """
    inside = [asked, *_running_generators()]
    around = [value for value in gc.get_objects() if type(value) in _AROUND]
    found = Counters()
    while new := [value for value in around if _holds(value, inside)]:
        around = [value for value in around if not _holds(value, inside)]
        for value in new:
            _sort_in(found, value, inside, asked)
        inside.extend(new)
    return found


def _sort_in(found: Counters, value: Any, inside: list[object], asked: object) -> None:
    if isinstance(value, enumerate):
        found.enumerates.append(value)
    elif isinstance(value, islice):
        found.slices.append(value)
    elif isinstance(value, zip):
        beside = [one for one in _parts(value) if not any(one is other for other in inside)]
        found.others.extend(
            f"{type(one).__name__} beside the batches in zip"
            for one in beside
            if not follows(one, type(asked))
        )


def follows(value: object, passes: type, depth: int = DEPTH_MAX) -> bool:
    """Tell whether an iterator has no place of its own: it is a pass, or gives those of one."""
    if isinstance(value, (passes, repeat)):
        return True
    return (
        depth > 0
        and type(value) in (GeneratorType, *_AROUND)
        and any(follows(inner, passes, depth - 1) for inner in gc.get_referents(value))
    )


def _holds(value: object, inside: list[object]) -> bool:
    return any(part is one for part in _parts(value) for one in inside)


def _parts(value: object) -> list[object]:
    """Return the iterators that one of ``_AROUND`` asks."""
    parts: list[object] = []
    for part in gc.get_referents(value):
        parts.extend(part if type(part) is tuple else [part])
    return [part for part in parts if hasattr(part, "__next__")]


def _running_generators() -> Iterator[object]:
    """Yield the generators that are asked right now, such as that of ``tqdm``."""
    frames = set()
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - what inspect.currentframe returns
    while frame is not None:
        frames.add(frame)
        frame = frame.f_back
    for value in gc.get_objects():
        if type(value) is GeneratorType and value.gi_frame in frames:
            yield value


class _Slice(ctypes.Structure):
    """What CPython keeps in an ``islice``: the calls for it warn from 3.12 on, and end in 3.14."""

    _fields_ = (
        ("_head", ctypes.c_byte * object.__basicsize__),
        ("source", ctypes.c_void_p),
        ("next", ctypes.c_ssize_t),
        ("stop", ctypes.c_ssize_t),
        ("step", ctypes.c_ssize_t),
        ("taken", ctypes.c_ssize_t),
    )


def _fields_of(one: Any) -> _Slice:
    return _Slice.from_address(id(one))


def _knows_slices() -> bool:
    """Tell whether this Python keeps an ``islice`` so."""
    if islice.__basicsize__ != ctypes.sizeof(_Slice):
        return False
    one = islice(iter("abcdefgh"), 2, 8, 3)
    next(one)
    kept = _fields_of(one)
    return (kept.next, kept.stop, kept.step, kept.taken) == (5, 8, 3, 3)


_KNOWS_SLICES = _knows_slices()


def _taken(one: Any) -> int:
    """Return how many an ``islice`` has taken; 0 of one that is used up, or cannot say."""
    if not _KNOWS_SLICES:
        return 0
    kept = _fields_of(one)
    return int(kept.taken) if kept.source else 0


def _set_taken(one: Any, count: int) -> bool:
    """Have an ``islice`` count what was taken before."""
    if _KNOWS_SLICES:
        _fields_of(one).taken = count
    return _KNOWS_SLICES


def _set_index(one: Any, count: int) -> bool:
    """Add ``count`` to the next index of an ``enumerate``; Python has no call for it.

    It is looked for where CPython keeps it, and only written if it is what ``one`` says.
    """
    index = one.__reduce__()[1][1]
    place = ctypes.c_ssize_t.from_address(id(one) + _INDEX_OFFSET)
    if place.value != index:
        return False
    place.value = index + count
    return bool(one.__reduce__()[1][1] == index + count)
