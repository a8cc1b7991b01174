"""Shard geometry: where a rank's piece of a tensor sits in the global tensor.

Pure integer arithmetic over half-open boxes. Knows nothing of torch, devices or storage: a
``Box`` has a place and an extent, and that is enough to reshard.

Units: every offset and length is counted in *elements*, never bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import add

ELEMENTS_COUNT_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Box:
    """A half-open hyper-rectangle ``[offset, offset + length)`` per tensor dim.

    Invariants:
        * ``len(offsets) == len(lengths)``; a 0-dim tensor has two empty tuples.
        * every offset is >= 0 and every length is >= 0; a zero length means empty.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.lengths):
            raise ValueError(f"{len(self.offsets)} offsets for {len(self.lengths)} lengths")
        for n in self.offsets + self.lengths:
            if n < 0:
                raise ValueError(f"negative offset or length in {self}")

    @property
    def elements_count(self) -> int:
        """Number of elements inside; 1 for a 0-dim tensor."""
        return math.prod(self.lengths)

    @property
    def stops(self) -> tuple[int, ...]:
        """Exclusive end per dim."""
        return tuple(map(add, self.offsets, self.lengths))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Return the slices that select this box from an array that holds ``outer``.

        Raises:
            ValueError: it does not lie inside ``outer``.
        """
        edges = zip(self.offsets, self.stops, outer.offsets, outer.stops, strict=True)
        if any(begin < base or end > stop for begin, end, base, stop in edges):
            raise ValueError(f"{self} does not lie inside {outer}")
        return tuple(
            slice(begin - base, end - base)
            for begin, end, base in zip(self.offsets, self.stops, outer.offsets, strict=True)
        )


def addressable(shape: Sequence[int], item_bytes: int) -> bool:
    """Tell whether memory can be of this shape: neither its bytes nor the steps in it are too many.

    Of a shape that is empty in one dim and huge in others its bytes tell nothing.

    >>> addressable((2**60,), 4), addressable((2**61,), 4)
    (True, False)
    >>> addressable((2**62, 0, 2), 4), addressable((0, 2**62, 2), 4)
    (True, False)
    """
    steps = math.prod(max(length, 1) for length in shape[1:])
    return max(steps, math.prod(shape) * item_bytes) <= ELEMENTS_COUNT_MAX


def whole(shape: Iterable[int]) -> Box:
    """Return the box that covers a tensor of this shape.

    >>> whole((2, 3))
    Box(offsets=(0, 0), lengths=(2, 3))
    """
    return _whole(tuple(shape))


@lru_cache(maxsize=4096)
def _whole(lengths: tuple[int, ...]) -> Box:
    return Box((0,) * len(lengths), lengths)


def intersect(a: Box, b: Box) -> Box | None:
    """Return the region shared by ``a`` and ``b``, or ``None`` when they are disjoint.

    Both boxes are in the coordinates of the same global tensor, and so is the result. Two boxes of
    0-dim tensors share their one element. A box that lies in the other one is returned itself.

    Raises:
        ValueError: ``a`` and ``b`` have different numbers of dims.

    >>> intersect(Box((0, 0), (4, 4)), Box((2, 3), (4, 4)))
    Box(offsets=(2, 3), lengths=(2, 1))
    """
    check_dims(a, b)
    starts, lengths = [], []
    # Comparisons, since all pairs that touch come here, and `min` and `max` take twice as long.
    for at, length, start, other in zip(a.offsets, a.lengths, b.offsets, b.lengths, strict=True):
        stop = at + length if at + length < start + other else start + other  # noqa: FURB136
        first = at if at > start else start  # noqa: FURB136
        if first >= stop:
            return None
        starts.append(first)
        lengths.append(stop - first)
    corner, extent = tuple(starts), tuple(lengths)
    for box in (a, b):
        if box.offsets == corner and box.lengths == extent:
            return box
    return Box(corner, extent)


def check_dims(a: Box, b: Box) -> None:
    """Do nothing if both are boxes of tensors of as many dims.

    Raises:
        ValueError: they are not.
    """
    if len(a.offsets) != len(b.offsets):
        raise ValueError(f"dims differ: {len(a.offsets)} and {len(b.offsets)}")


def covers(target: Box, pieces: Iterable[Box]) -> bool:
    """Tell whether ``pieces``, which may overlap, leave no element of ``target`` out.

    >>> covers(whole((4, 6)), [Box((0, 0), (4, 3)), Box((0, 0), (4, 3))])
    False
    """
    shared = [part for part in (intersect(piece, target) for piece in pieces) if part is not None]
    # Too few elements are too few however they lie; enough of them may lie twice in one place.
    if sum(part.elements_count for part in shared) < target.elements_count:
        return False
    holes = [target] if target.elements_count else []
    # In order of place there are never many holes, however finely a grid is cut.
    for piece in sorted(shared, key=lambda box: box.offsets):
        holes = [rest for hole in holes for rest in without(hole, piece)]
        if not holes:
            break
    return not holes


def in_rows(box: Box, elements_count_max: int) -> Iterator[Box]:
    """Yield boxes that make up ``box``, some rows of it each: so many elements at most, or one row.

    >>> [(part.offsets, part.lengths) for part in in_rows(Box((1, 2), (5, 3)), 7)]
    [((1, 2), (2, 3)), ((3, 2), (2, 3)), ((5, 2), (1, 3))]
    """
    if not box.lengths:
        yield box
        return
    count = max(1, elements_count_max // max(1, math.prod(box.lengths[1:])))
    first, *others = box.offsets
    for begin in range(0, box.lengths[0], count):
        rows = min(count, box.lengths[0] - begin)
        yield Box((first + begin, *others), (rows, *box.lengths[1:]))


def span(box: Box, shared: Box) -> tuple[int, int]:
    """Return which of the elements of ``box``, row by row, the first to the last of ``shared`` are.

    ``shared`` lies inside ``box`` and has an element.

    >>> span(Box((0, 0), (4, 4)), Box((1, 2), (2, 1)))
    (6, 11)
    """
    first = last = 0
    for dim, length in enumerate(box.lengths):
        begin = shared.offsets[dim] - box.offsets[dim]
        first = first * length + begin
        last = last * length + begin + shared.lengths[dim] - 1
    return first, last + 1


def without(hole: Box, piece: Box) -> Iterator[Box]:
    """Yield disjoint boxes that make up ``hole`` without ``piece``; none if nothing is left."""
    shared = intersect(hole, piece)
    if shared is None:
        yield hole
        return
    if shared is hole:
        return
    corner, extent = list(hole.offsets), list(hole.lengths)
    for dim, (first, length) in enumerate(zip(shared.offsets, shared.lengths, strict=True)):
        edges = (corner[dim], first), (first + length, corner[dim] + extent[dim])
        for begin, stop in edges:
            if begin < stop:
                corner[dim], extent[dim] = begin, stop - begin
                yield Box(tuple(corner), tuple(extent))
        corner[dim], extent[dim] = first, length
