"""Tensors of more than 2^31 elements, as numbers alone: places, ranges, plans; nobody has them."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from holdfast.core.ids import ShardId
from holdfast.core.needs import ByteRange
from holdfast.core.shard import PRIME
from holdfast.errors import InvalidRequestError
from holdfast.format import index as indexes
from holdfast.format.boxes import Box, whole
from holdfast.format.byte_ranges import needs
from holdfast.format.header import parse_header
from holdfast.format.plan_faults import first_fault
from holdfast.format.segment import SegmentIdentity, TensorSpec, header_template
from holdfast.format.tally import tally
from holdfast.reading.pieces import Pieces

RANKS_COUNT = 3
SHAPES = [(2**31 + 5,), (70_000, 70_000), (3, 2**33), (2**33, 3), (3, 2**20, 2**20)]


def along(dim):
    """Cut a tensor along a dim, the last piece being the odd one."""

    def cut(shape):
        size = -(-shape[dim] // RANKS_COUNT)
        for begin in range(0, shape[dim], size):
            offsets, lengths = [0] * len(shape), list(shape)
            offsets[dim], lengths[dim] = begin, min(size, shape[dim] - begin)
            yield Box(tuple(offsets), tuple(lengths))

    return cut


def flat(shape):
    """Cut a tensor into ranges that are no rows."""
    edges = [0, 2**31 - 1, 2**31 + 3, math.prod(shape)]
    for begin, end in pairwise(edges):
        yield Box((begin,), (end - begin,))


def identity(rank):
    number = ShardId("r1", 1, 1, rank)
    return SegmentIdentity(id=number, job="j", world_size=RANKS_COUNT, plan_hash="p")


def headers(shape, regions):
    """Return the header of each rank as it is read; before its region lies another tensor."""
    found = []
    for rank, region in enumerate(regions):
        specs = [
            TensorSpec(fqn=f"{rank}", dtype="F32", shape=(2**31 + 1,), box=whole((2**31 + 1,))),
            TensorSpec(fqn="w", dtype="F32", shape=shape, box=region),
        ]
        template = header_template(identity(rank), specs)
        text = template.fill(step=1, generation=1, parent=None)
        found.append(parse_header(text, template.length_bytes))
        assert template.entries == found[-1].entries
    return found


@pytest.mark.parametrize("cut", [along(0), along(-1), flat], ids=["rows", "columns", "ranges"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_last_element_is_found_where_it_lies(shape, cut):
    regions = list(cut(shape))
    read = headers(shape, regions)
    corner = Box(tuple(n - 1 for n in shape), (1,) * len(shape))
    index = indexes.build(read)
    [need] = needs(index, [("w", corner)])
    [part] = Pieces(read).choose("w", corner)

    last = RANKS_COUNT - 1
    count = math.prod(regions[last].lengths)
    end = read[last].data_begin + 4 * (2**31 + 1 + count)
    assert (end, last, last) == (read[last].length_bytes, need.rank, part.number)
    assert ByteRange(begin=end - 4, end=end) == need.ranges[-1]
    assert corner == part.box
    assert end == part.entry.end
    assert index == indexes.decode(indexes.encode(index))


@pytest.mark.parametrize("cut", [along(0), along(-1), flat], ids=["rows", "columns", "ranges"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pieces_add_up_and_a_missing_one_is_named(shape, cut):
    regions = list(cut(shape))
    found = sum(tally("w", "F32", shape, region) for region in regions)

    assert tally("w", "F32", shape, whole(shape)) == found % PRIME
    assert not first_fault(headers(shape, regions))
    assert "no rank saves" in first_fault(headers(shape, regions[:-1]))
    assert "both save" in first_fault(headers(shape, [*regions, regions[-1]]))


@pytest.mark.parametrize(
    ("dtype", "shape", "lengths"),
    [
        ("U8", (2**63,), (1,)),
        ("F64", (2**60,), (1,)),
        ("F32", (2**40, 2**40), (1, 1)),
        ("F32", (2**40, 2**40), (5,)),
        ("F32", (0, 2**62, 2), (0, 0, 0)),
    ],
)
def test_a_tensor_beyond_all_memory_is_refused_by_name(dtype, shape, lengths):
    """Before: a header whose numbers no reader takes."""
    spec = TensorSpec(fqn="w", dtype=dtype, shape=shape, box=whole(lengths))
    with pytest.raises(InvalidRequestError, match=r"'w' has the shape .* no memory can have"):
        header_template(identity(0), [spec])


def test_tensors_that_are_together_beyond_all_memory_are_refused():
    shape = (2**61,)
    specs = [TensorSpec(fqn=n, dtype="U16", shape=shape, box=whole(shape)) for n in "abcd"]
    with pytest.raises(InvalidRequestError, match="tensors of 18446744073709551616 bytes exceed"):
        header_template(identity(0), specs)
