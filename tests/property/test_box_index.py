"""Which boxes share elements with a region, and what is planned from it: against all pairs."""

from __future__ import annotations

import itertools
from collections import Counter
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.ids import ShardId
from holdfast.errors import NotReadyError
from holdfast.format import box_index, byte_ranges
from holdfast.format.box_index import UNSORTED_COUNT_MAX, Overlaps, SharedOverlaps
from holdfast.format.boxes import Box, intersect, span
from holdfast.format.byte_ranges import needs
from holdfast.format.index import of_some
from holdfast.format.segment import SegmentHeader, SegmentIdentity, TensorEntry, TensorSpec
from holdfast.reading.pieces import Pieces

SIDE_MAX = 6


def by_all_pairs(boxes, region):
    shared = [(number, intersect(box, region)) for number, box in enumerate(boxes)]
    return [(number, box) for number, box in shared if box is not None]


@st.composite
def any_boxes(draw, dims):
    """A box anywhere: it may be empty, and lie in or over others."""
    numbers = st.lists(st.integers(0, SIDE_MAX), min_size=dims, max_size=dims).map(tuple)
    return Box(draw(numbers), draw(numbers))


@st.composite
def grids(draw, dims):
    """A tensor cut along some of its axes, unevenly; what one rank has may be empty."""
    edges = [
        [0, *sorted(draw(st.lists(st.integers(0, SIDE_MAX), max_size=6))), SIDE_MAX]
        for _ in range(dims)
    ]
    places = itertools.product(*(list(itertools.pairwise(axis)) for axis in edges))
    return [Box(tuple(a for a, _ in at), tuple(b - a for a, b in at)) for at in places]


@st.composite
def asked(draw):
    """Boxes in any order, and regions that are asked for one after the other."""
    dims = draw(st.integers(0, 3))
    loose = draw(st.lists(any_boxes(dims), max_size=3 * UNSORTED_COUNT_MAX))
    cut = draw(grids(dims)) if draw(st.booleans()) else []
    boxes = [*cut, *loose]
    if draw(st.booleans()):
        boxes.sort(key=lambda box: box.offsets)
    return boxes, draw(st.lists(any_boxes(dims), min_size=1, max_size=4))


@given(asked())
def test_those_that_share_elements_with_a_region_are_found_in_their_order(drawn):
    boxes, regions = drawn
    found = Overlaps(boxes)

    for region in regions:
        assert by_all_pairs(boxes, region) == list(found.of(region))


@given(asked())
def test_each_box_is_found_where_it_is(drawn):
    boxes, _ = drawn
    found = Overlaps(boxes)

    for number, box in enumerate(boxes):
        assert ((number, box) in found.of(box)) is (box.elements_count > 0)


@pytest.mark.parametrize("count", [1, UNSORTED_COUNT_MAX + 1])
def test_a_region_of_other_dims_is_refused(count):
    for box, region in itertools.permutations(
        [Box((0, 0), (1, 4)), Box((0,), (4,)), Box((), ())], 2
    ):
        with pytest.raises(ValueError, match=f"dims differ: {len(box.offsets)} and"):
            list(Overlaps([box] * count).of(region))


def test_of_a_tensor_cut_along_one_axis_only_those_that_are_hit_are_looked_at(monkeypatch):
    """Whichever axis it is, and whatever the order: no pass over all of them for each region."""
    looked_at = []

    def intersected(box, region):
        looked_at.append(box)
        return intersect(box, region)

    monkeypatch.setattr(box_index, "intersect", intersected)
    boxes = [Box((0, 3 * column), (5, 3)) for column in reversed(range(1000))]
    region = Box((1, 1501), (2, 5))

    assert [498, 499] == [number for number, _ in Overlaps(boxes).of(region)]
    assert 2 == len(looked_at)


@given(asked())
def test_tensors_share_what_finds_their_boxes_only_if_these_are_the_same(drawn):
    boxes, [region, *_] = drawn
    shared = SharedOverlaps()
    found = shared.of(boxes)

    assert found is shared.of([*boxes])
    for other in (boxes[1:], [*boxes, region], [*boxes[1:], region]):
        assert by_all_pairs(other, region) == list(shared.of(other).of(region))
    assert by_all_pairs(boxes, region) == list(found.of(region))


def header(boxes, *, rank):
    """A header whose segment holds all of these boxes of ``w``, which no file of ours does."""
    begins = itertools.accumulate((4 * box.elements_count for box in boxes), initial=64)
    entries = [
        TensorEntry(
            spec=TensorSpec(
                fqn="w", dtype="F32", shape=(2 * SIDE_MAX,) * len(box.offsets), box=box
            ),
            begin=begin,
            end=begin + 4 * box.elements_count,
        )
        for box, begin in zip(boxes, begins, strict=False)
    ]
    return SegmentHeader(
        identity=SegmentIdentity(
            id=ShardId("r1", 1, 1, rank), job="j", world_size=2, plan_hash="p"
        ),
        entries=tuple(entries),
        data_begin=64,
        length_bytes=entries[-1].end if entries else 64,
    )


def all_of(box):
    return set(
        itertools.product(*(range(o, s) for o, s in zip(box.offsets, box.stops, strict=True)))
    )


def filled(boxes, region):
    """Return which boxes make up a region and what of each, by a look at all; None: none do."""
    shared = by_all_pairs(boxes, region)
    enough = [one for one in shared if one[1] == region]
    if enough:
        return [next((one for one in enough if boxes[one[0]] == region), enough[0])]
    left, chosen = all_of(region), []
    for number, box in sorted(shared, key=lambda one: one[1].offsets):
        if left & all_of(box):
            left -= all_of(box)
            chosen.append((number, box))
    return None if left else sorted(chosen, key=lambda one: one[0])


@given(asked())
def test_a_region_is_made_up_of_one_box_or_of_those_that_have_what_none_before_them_has(drawn):
    boxes, regions = drawn
    found = Overlaps(boxes)

    for region in [*regions, *regions, *reversed(regions)]:  # what was asked last is known
        told, hole = found.fill(region)
        chosen = [(shared.number, shared.box) for shared in told]

        assert [one.box.within(region) for one in told] == [one.place for one in told]
        assert [span(boxes[one.number], one.box) for one in told] == [one.span for one in told]
        assert (hole is None) is (filled(boxes, region) is not None)
        if hole is None:
            assert filled(boxes, region) == sorted(chosen, key=lambda one: one[0])
        else:
            assert hole.elements_count
            assert all_of(hole) <= all_of(region)
            assert not by_all_pairs(boxes, hole)


@pytest.mark.parametrize("others", [0, UNSORTED_COUNT_MAX])
def test_boxes_that_lie_twice_hide_no_hole_though_they_have_as_many_elements(others):
    """P1; defect X1: neither where boxes are sorted nor where they are a handful."""
    boxes = [Box((0,), (2,)), Box((0,), (2,)), Box((4,), (2,))]
    boxes += [Box((6 + at,), (1,)) for at in range(others)]

    assert Box((2,), (2,)) == Overlaps(boxes).fill(Box((0,), (6,)))[1]


@given(asked(), st.integers(0, 20))
def test_parts_are_chosen_as_by_a_look_at_all(drawn, cut):
    """None is made up, and each is of a file that has it."""
    boxes, regions = drawn
    pieces = Pieces([header(boxes[:cut], rank=0), header(boxes[cut:], rank=1)])
    for region in regions:
        expected = filled(boxes, region) if boxes else None
        if expected is None:
            with pytest.raises(NotReadyError, match="'w'"):
                pieces.choose("w", region)
            continue
        chosen = pieces.choose("w", region)

        if region.elements_count:
            found = [(part.entry.spec.box, part.box) for part in chosen]
            assert Counter((boxes[at], box) for at, box in expected) == Counter(found)
        assert not any(part.box.elements_count for part in chosen if not region.elements_count)
        for part in chosen:
            assert part.entry.spec.box in boxes[cut * part.number :]


@given(asked(), st.integers(0, 20))
def test_bytes_are_named_as_by_a_look_at_all(drawn, cut):
    """Of each box that is chosen, from the first to the last.

    With parts of one byte; of nothing at all, a header that tells of the tensor.
    """
    boxes, regions = drawn
    index = of_some([header(boxes[:cut], rank=0), header(boxes[cut:], rank=1)])
    tensor = index.tensor("w")
    held = tensor.boxes if tensor else ()
    expected = {0: set(), 1: set()}
    for region in regions:
        chosen = filled([each.box for each in held], region)
        if chosen is None:
            with pytest.raises(NotReadyError, match="'w'"):
                needs(index, [("w", region) for region in regions])
            return
        for number, shared in chosen:
            each = held[number]
            first, last = (each.begin + 4 * n for n in span(each.box, shared))
            expected[each.rank] |= set(range(first, last))
    with mock.patch.object(byte_ranges, "PART_BYTES", 1):
        named = needs(index, [("w", region) for region in regions])
    holders = {rank for rank, found in expected.items() if found}
    if tensor and regions and not holders:
        holders = {min(each.rank for each in held)}

    assert holders == {need.rank for need in named}
    for need in named:
        found = {byte for part in need.ranges for byte in range(part.begin, part.end)}
        assert expected[need.rank] | set(range(64)) == found
