"""Which boxes of a tensor share elements with a region, found without a look at each of them.

Boxes are sorted by where they begin along the axis that cuts them most. Those that can share
anything with a region are then one run: from the first of which some box has not ended before the
region begins, to the last that begins before it ends. Of a tensor that is cut along one axis that
run is the answer; of one cut along several, boxes that lie beside the region are in it too. Pure.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from math import prod
from operator import le
from typing import NamedTuple, TypeAlias

from holdfast.format.boxes import Box, check_dims, intersect, span, without

UNSORTED_COUNT_MAX = 4
"""Of so few boxes a look at each takes less time than sorting them."""


class Shared(NamedTuple):
    """The part ``box`` of a region that the box of a ``number`` gives.

    ``place`` selects it from an array that holds the region; ``span`` are the first and the end of
    its elements among those of the box that has it, see ``boxes.span``.
    """

    number: int
    box: Box
    place: tuple[slice, ...]
    span: tuple[int, int]


Filling: TypeAlias = tuple[Sequence[Shared], Box | None]
"""What makes up a region, and what of it none has."""


class Overlaps:
    """Boxes of one tensor, which may overlap, by what they share with a region.

    They are sorted when a region is first asked for, and not at all if they are a handful. The last
    answer is kept: of tensors that are cut alike, a rank asks for the same region of each.
    """

    __slots__ = ("_apart", "_axis", "_begins", "_boxes", "_furthest", "_last", "_order")

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._boxes = boxes
        self._axis = 0
        self._order: Sequence[int] = ()
        self._begins: list[int] = []
        self._furthest: list[int] = []
        self._apart = False
        """Whether each ends before the next one begins, along the axis."""
        self._last: tuple[Box, Filling] | None = None

    def of(self, region: Box) -> Iterator[tuple[int, Box]]:
        """Yield each box that shares elements with ``region``, by its number, and what they share.

        In the order in which the boxes were given.

        Raises:
            ValueError: the region has another number of dims.
        """
        for number in self._near(region):
            shared = intersect(self._boxes[number], region)
            if shared is not None:
                yield number, shared

    def fill(self, region: Box) -> Filling:
        """Return which boxes make up ``region``, and what of it none has; None: they have all.

        One alone if it has all, at best it and no more; else, in order of place, each that has
        elements which none before it has.

        Raises:
            ValueError: the region has another number of dims.
        """
        last = self._last  # once: other threads may ask, too
        if last is None or last[0] != region:
            chosen, hole = self._chosen(region)
            told = [
                Shared(at, box, box.within(region), span(self._boxes[at], box))
                for at, box in chosen
            ]
            last = self._last = region, (told, hole)
        return last[1]

    def _chosen(self, region: Box) -> tuple[Sequence[tuple[int, Box]], Box | None]:
        found = list(self.of(region))
        enough = [one for one in found if one[1].lengths == region.lengths]
        if enough:
            return [next((one for one in enough if self._boxes[one[0]] == region), enough[0])], None
        missing = region.elements_count
        if self._apart and missing == sum(prod(shared.lengths) for _, shared in found):
            return found, None
        holes = [region] if missing else []
        chosen = []
        # In order of place there are never many holes, however finely a grid is cut.
        for number, shared in sorted(found, key=lambda one: one[1].offsets):
            rest = [part for hole in holes for part in without(hole, shared)]
            if rest != holes:
                chosen.append((number, shared))
                holes = rest
        return chosen, holes[0] if holes else None

    def _near(self, region: Box) -> Iterable[int]:
        """Return the numbers of the boxes that may share something with ``region``, ascending."""
        if len(self._boxes) <= UNSORTED_COUNT_MAX:
            return range(len(self._boxes))
        check_dims(self._boxes[0], region)
        if not region.offsets:
            return range(len(self._boxes))
        if not self._order:
            self._sort()
        begin = region.offsets[self._axis]
        first = bisect_right(self._furthest, begin)
        last = bisect_left(self._begins, begin + region.lengths[self._axis])
        near = self._order[first:last]
        return near if isinstance(near, range) else sorted(near)

    def _sort(self) -> None:
        boxes = self._boxes
        dims = range(len(boxes[0].offsets))
        columns = [[box.offsets[axis] for box in boxes] for axis in dims]
        self._axis = axis = max(dims, key=lambda axis: len(set(columns[axis])))
        begins = columns[axis]
        ends = [box.offsets[axis] + box.lengths[axis] for box in boxes]
        self._order = range(len(boxes))
        # An index has its boxes in order, and they end in order where none lies in another.
        if begins != sorted(begins):
            self._order = sorted(self._order, key=begins.__getitem__)
            begins = [begins[number] for number in self._order]
            ends = [ends[number] for number in self._order]
        self._begins = begins
        self._furthest = ends if ends == sorted(ends) else list(accumulate(ends, max))
        self._apart = all(map(le, self._furthest, begins[1:]))


class SharedOverlaps:
    """The ``Overlaps`` of many tensors: one for all whose boxes are the same objects.

    Tensors of one shape that are cut alike are, in a header, as ``parse_header`` makes them.
    """

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], Overlaps] = {}

    def of(self, boxes: Sequence[Box]) -> Overlaps:
        """Return those of ``boxes``, which stay as they are from now on."""
        objects = tuple(map(id, boxes))
        found = self._known.get(objects)
        if found is None:
            # It keeps the boxes, so that no other box comes to have their identity.
            found = self._known[objects] = Overlaps(boxes)
        return found
