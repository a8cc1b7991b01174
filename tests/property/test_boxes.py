"""Geometry against brute force over sets of points (F38, F76)."""

from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast.format.boxes import Box, covers, intersect, whole

SIDE_MAX = 5


def points(box):
    return set(product(*(range(o, s) for o, s in zip(box.offsets, box.stops, strict=True))))


@st.composite
def boxes(draw, dims):
    numbers = st.lists(st.integers(0, SIDE_MAX), min_size=dims, max_size=dims).map(tuple)
    return Box(draw(numbers), draw(numbers))


pairs = st.integers(0, 3).flatmap(lambda dims: st.tuples(boxes(dims), boxes(dims)))


@given(pairs)
def test_an_intersection_is_the_points_in_both(pair):
    a, b = pair
    shared = intersect(a, b)

    assert points(a) & points(b) == (points(shared) if shared else set())
    assert shared == intersect(b, a)


@given(pairs)
def test_the_count_is_the_number_of_points(pair):
    assert len(points(pair[0])) == pair[0].elements_count


@given(pairs)
def test_within_selects_the_same_points(pair):
    outer, other = pair
    inner = intersect(outer, other)
    if inner is None:
        return
    numbers = {point: i for i, point in enumerate(sorted(points(outer)))}
    array = np.arange(len(numbers)).reshape(outer.lengths)

    assert {numbers[p] for p in points(inner)} == set(np.ravel(array[inner.within(outer)]))


@st.composite
def cuts(draw):
    """A tensor cut into disjoint boxes, some of them dropped."""
    target = draw(st.integers(1, 3).flatmap(boxes))
    pieces = [target]
    for _ in range(draw(st.integers(0, 4))):
        piece = pieces.pop(draw(st.integers(0, len(pieces) - 1)))
        dim = draw(st.integers(0, len(piece.lengths) - 1))
        at = draw(st.integers(0, piece.lengths[dim]))
        left, right = list(piece.lengths), list(piece.lengths)
        left[dim], right[dim] = at, piece.lengths[dim] - at
        moved = list(piece.offsets)
        moved[dim] += at
        pieces += [Box(piece.offsets, tuple(left)), Box(tuple(moved), tuple(right))]
    kept = draw(st.lists(st.booleans(), min_size=len(pieces), max_size=len(pieces)))
    return target, [piece for piece, keep in zip(pieces, kept, strict=True) if keep]


@given(cuts(), st.data())
def test_pieces_cover_what_their_points_cover(cut, data):
    """P1; defect X1: overlapping pieces hide no hole."""
    target, pieces = cut
    pieces += data.draw(st.lists(boxes(len(target.offsets)), max_size=3))
    union = set().union(*(points(piece) for piece in pieces))

    assert covers(target, pieces) is (points(target) <= union)


@given(st.lists(st.integers(0, SIDE_MAX), max_size=3))
def test_the_whole_box_covers_its_tensor(shape):
    assert covers(whole(shape), [whole(shape)])
