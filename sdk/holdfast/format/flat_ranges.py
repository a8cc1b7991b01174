"""Ranges of a tensor's elements in row-major order, and the boxes that they are made of.

Who keeps a tensor flat holds a range ``[begin, end)`` of its elements, which is seldom a box of it,
but always a few of them. A *region* of a tensor is a box of as many dims as the tensor has, or else
a range, written as a box of one dim; of a tensor of one dim the two are the same.

Pure. Units: elements, never bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from holdfast.format.boxes import Box


def is_range(shape: Sequence[int], region: Box) -> bool:
    """Tell whether a region of a tensor of this shape is a range of its elements, and no box.

    >>> is_range((4, 3), Box((5,), (2,))), is_range((12,), Box((5,), (2,)))
    (True, False)
    """
    return len(region.offsets) == 1 != len(shape)


def is_inside(shape: Sequence[int], region: Box) -> bool:
    """Tell whether this is a region of a tensor of this shape.

    >>> is_inside((4, 3), Box((10,), (2,))), is_inside((4, 3), Box((10,), (3,)))
    (True, False)
    """
    outer = flat_shape(shape) if is_range(shape, region) else shape
    return len(region.offsets) == len(outer) and all(
        stop <= length for stop, length in zip(region.stops, outer, strict=True)
    )


def flat_shape(shape: Sequence[int]) -> tuple[int]:
    """Return the shape of a tensor whose elements lie in one row.

    >>> flat_shape((4, 3)), flat_shape(())
    ((12,), (1,))
    """
    return (math.prod(shape),)


def boxes_of(shape: Sequence[int], region: Box) -> list[Box]:
    """Return boxes of a tensor that make up ``region``: itself, if it is no range.

    Those of a range are in the order of its elements; each of them is a range, too, so they follow
    each other in memory. Of a tensor of ``n`` dims they are at most ``2 * n - 1``, and none if the
    range is empty.

    Raises:
        ValueError: the range does not lie in the tensor.

    >>> [(box.offsets, box.lengths) for box in boxes_of((4, 3), Box((2,), (8,)))]
    [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]
    """
    if not is_range(shape, region):
        return [region]
    if not is_inside(shape, region):
        raise ValueError(f"{region} is no range of a tensor of shape {tuple(shape)}")
    return list(_boxes(shape, region.offsets[0], region.stops[0]))


def _boxes(shape: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    # How many elements one step along each dim goes, and before them how many there are.
    steps = [math.prod(shape[dim:]) for dim in range(len(shape) + 1)]
    at = begin
    while at < end:
        # Along the first dim on which a whole step fits; of the tensor itself there is only one.
        dim = next(d for d, step in enumerate(steps) if at % step == 0 and step <= end - at)
        place = [at // step % length for step, length in zip(steps[1:], shape, strict=True)]
        lengths = [1] * dim + list(shape[dim:])
        if dim:
            lengths[dim - 1] = min(shape[dim - 1] - place[dim - 1], (end - at) // steps[dim])
        box = Box(tuple(place), tuple(lengths))
        yield box
        at += box.elements_count
