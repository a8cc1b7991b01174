"""Ranges of tensors against brute force: taken apart, found by boxes, read back, named in bytes."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.ids import ShardId
from holdfast.format import index as indexes
from holdfast.format.boxes import Box, whole
from holdfast.format.byte_ranges import needs
from holdfast.format.flat_ranges import boxes_of, flat_shape, is_inside, is_range
from holdfast.format.header import parse_header
from holdfast.format.segment import SegmentIdentity, TensorSpec, header_template
from holdfast.reading.reader import Reader, Want

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def ranges(draw, shape):
    """A range of a tensor; for one of one dim, a box of it."""
    begin, end = sorted(draw(st.lists(st.integers(0, math.prod(shape)), min_size=2, max_size=2)))
    return Box((begin,), (end - begin,))


@st.composite
def boxes(draw, shape):
    begins = [draw(st.integers(0, n)) for n in shape]
    return Box(
        tuple(begins),
        tuple(draw(st.integers(0, n - at)) for n, at in zip(shape, begins, strict=True)),
    )


def numbered(shape):
    return np.arange(math.prod(shape), dtype=np.int32).reshape(shape)


def of(array, region):
    """The elements of a region, by brute force."""
    if is_range(array.shape, region):
        return array.reshape(-1)[region.offsets[0] : region.stops[0]]
    return array[region.within(whole(array.shape))]


@given(shapes.flatmap(lambda shape: st.tuples(st.just(shape), ranges(shape))))
def test_a_range_is_a_few_boxes_one_behind_the_other(drawn):
    shape, region = drawn
    found = boxes_of(shape, region)
    array = numbered(shape)
    laid = [array[box.within(whole(shape))].reshape(-1) for box in found]

    assert [*range(region.offsets[0], region.stops[0])] == [int(n) for row in laid for n in row]
    assert len(found) <= max(2 * len(shape) - 1, 1)
    assert all(box.elements_count for box in found) or len(shape) == 1


def test_a_range_of_a_huge_tensor_is_taken_apart_without_walking_it():
    huge = (1 << 20, 1 << 20, 1 << 20)
    found = boxes_of(huge, Box((5,), ((1 << 60) - 10,)))

    assert 5 == len(found)
    assert (1 << 60) - 10 == sum(box.elements_count for box in found)


@pytest.mark.parametrize(
    "region",
    [
        Box((0,), (13,)), Box((12,), (1,)), Box((0, 0, 0), (1, 1, 1)),
        Box((3, 0), (2, 3)), Box((0, 2), (4, 2)),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_region_of_a_tensor_is_told(region):
    assert not is_inside((4, 3), region)


def test_a_range_outside_is_refused():
    with pytest.raises(ValueError, match="no range of a tensor of shape"):
        boxes_of((4, 3), Box((5,), (8,)))


class Held:
    """Segments in memory; bytes that were not named are not what was saved."""

    def __init__(self, segments, named=None):
        self.headers = [parse_header(data, len(data)) for data in segments]
        self._data = [bytearray(b"\xee" * len(data)) for data in segments]
        whole_of = [(rank, [(0, len(data))]) for rank, data in enumerate(segments)]
        read = whole_of if named is None else [
            (need.rank, [(r.begin, r.end) for r in need.ranges]) for need in named
        ]  # fmt: skip
        for rank, spans in read:
            for begin, end in spans:
                self._data[rank][begin:end] = segments[rank][begin:end]

    def expect(self, parts):
        pass

    def copy(self, copies, *, expected=False):
        for target, part in copies:
            entry = part.entry
            data = np.frombuffer(bytes(self._data[part.number][entry.begin : entry.end]), np.int32)
            held = data.reshape(entry.spec.box.lengths)[part.box.within(entry.spec.box)]
            target.copy_(torch.from_numpy(np.array(held)))

    def close(self):
        pass


def saved(shape, cuts):
    """Segments of ranks that hold one region each."""
    array = numbered(shape)
    segments = []
    for rank, region in enumerate(cuts):
        spec = TensorSpec(fqn="w", dtype="I32", shape=shape, box=region)
        identity = SegmentIdentity(
            id=ShardId("r1", 1, 1, rank), job="j", world_size=len(cuts), plan_hash="p"
        )
        template = header_template(identity, [spec])
        head = template.fill(step=1, generation=1, parent=None)
        segments.append(head + of(array, region).astype("<i4").tobytes())
        assert len(segments[-1]) == template.length_bytes
    return array, segments


@st.composite
def saves(draw):
    """A tensor that was saved in ranges or in rows, and the region of it that is wanted."""
    shape = draw(shapes)
    by_range = draw(st.booleans()) or not shape
    length = math.prod(shape) if by_range else shape[0]
    edges = [0, *sorted(draw(st.lists(st.integers(0, length), max_size=4))), length]
    if by_range:
        cuts = [Box((a,), (b - a,)) for a, b in pairwise(edges)]
    else:
        rest = (0,) * (len(shape) - 1)
        cuts = [Box((a, *rest), (b - a, *shape[1:])) for a, b in pairwise(edges)]
    wanted = draw(st.one_of(ranges(shape), boxes(shape)))
    return shape, cuts, wanted


@given(saves())
def test_any_region_is_read_from_ranges_and_from_boxes(drawn):
    shape, cuts, wanted = drawn
    array, segments = saved(shape, cuts)
    reader = Reader(Held(segments), len(segments))
    target = torch.full(wanted.lengths, -1, dtype=torch.int32)
    reader.read([Want(target, "w", wanted)])

    assert shape == reader.specs()["w"].shape
    assert np.array_equal(of(array, wanted), target.numpy())
    assert np.array_equal(array, reader.tensor("w").numpy())


@given(saves())
def test_the_bytes_that_are_named_for_a_region_suffice(drawn):
    shape, cuts, wanted = drawn
    array, segments = saved(shape, cuts)
    index = indexes.build(parse_header(data, len(data)) for data in segments)
    named = needs(index, [("w", wanted)])
    reader = Reader(Held(segments, named), len(segments))
    target = torch.full(wanted.lengths, -1, dtype=torch.int32)
    reader.read([Want(target, "w", wanted)])

    assert np.array_equal(of(array, wanted), target.numpy())
    assert indexes.decode(indexes.encode(index)) == index


@given(shapes.flatmap(lambda shape: st.tuples(st.just(shape), ranges(shape))))
def test_a_header_gives_back_the_shape_that_a_range_is_of(drawn):
    shape, region = drawn
    _, [data] = saved(shape, [region])
    [entry] = parse_header(data, len(data)).entries

    assert (shape, region) == (entry.spec.shape, entry.spec.box)
    assert (b"holdfast.shapes" in data) == (len(shape) != 1)
    assert list(flat_shape(shape)) == [math.prod(shape)]
