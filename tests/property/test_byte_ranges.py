"""Needs of drawn regions of drawn plans: enough to read each region, and no shard that is not."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.ids import ShardId
from holdfast.errors import NotReadyError
from holdfast.format import byte_ranges
from holdfast.format.boxes import Box, intersect, whole
from holdfast.format.byte_ranges import needs
from holdfast.format.header import parse_header
from holdfast.format.index import build, of_some
from holdfast.format.segment import SegmentIdentity, TensorSpec, header_template

POISON = 0xEE


def saved(cuts, shape, *, world_size):
    """A checkpoint of one tensor ``w`` whose pieces go to ranks in turn, and a small ``r`` each.

    Returns:
        The index and the bytes of each segment by rank.
    """
    tensor = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    edges = [
        list(itertools.pairwise([0, *sorted(cut), n])) for cut, n in zip(cuts, shape, strict=True)
    ]
    pieces = [
        Box(tuple(a for a, _ in place), tuple(b - a for a, b in place))
        for place in itertools.product(*edges)
    ]
    headers, segments = [], {}
    for rank in range(world_size):
        mine = pieces[rank] if rank < len(pieces) else Box((0,) * len(shape), (0,) * len(shape))
        specs = [TensorSpec(fqn=f"r{rank}", dtype="U8", shape=(3,), box=whole((3,)))]
        if mine.elements_count:
            specs.append(TensorSpec(fqn="w", dtype="I32", shape=tuple(shape), box=mine))
        identity = SegmentIdentity(
            id=ShardId("r1", 1, 1, rank), job="j", world_size=world_size, plan_hash=f"{rank:x}"
        )
        template = header_template(identity, specs)
        data = bytearray(template.length_bytes)
        head = template.fill(step=1, generation=1, parent=None)
        data[: len(head)] = head
        for entry in template.entries:
            if entry.spec.fqn == "w":
                data[entry.begin : entry.end] = tensor[mine.within(whole(shape))].tobytes()
        headers.append(parse_header(memoryview(data), len(data)))
        segments[rank] = bytes(data)
    return build(headers), segments, tensor


@st.composite
def plans(draw):
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    cuts = [
        draw(st.sets(st.integers(1, max(n - 1, 1)), max_size=2)) if n > 1 else set() for n in shape
    ]
    pieces = math.prod(len(cut) + 1 for cut in cuts)
    world_size = pieces + draw(st.integers(0, 2))
    begins = [draw(st.integers(0, n - 1)) for n in shape]
    lengths = [draw(st.integers(0, n - b)) for n, b in zip(shape, begins, strict=True)]
    return cuts, tuple(shape), world_size, Box(tuple(begins), tuple(lengths))


def read(named, segments, region, shape):
    """Read the region of ``w`` from nothing but the bytes that were named."""
    known = False
    target = np.full(shape, -1, dtype=np.int32)
    for need in named:
        data = bytearray([POISON]) * len(segments[need.rank])
        for part in need.ranges:
            data[part.begin : part.end] = segments[need.rank][part.begin : part.end]
        header = parse_header(memoryview(data), len(data))
        for entry in header.entries:
            known = known or entry.spec.fqn == "w"
            shared = intersect(entry.spec.box, region) if entry.spec.fqn == "w" else None
            if shared is not None:
                piece = np.frombuffer(bytes(data[entry.begin : entry.end]), dtype=np.int32)
                piece = piece.reshape(entry.spec.box.lengths)[shared.within(entry.spec.box)]
                target[shared.within(whole(shape))] = piece
    assert known, "no header tells of it"
    return target[region.within(whole(shape))]


@given(plan=plans())
def test_what_is_named_is_enough_and_each_shard_of_it_holds_something_wanted(plan):
    cuts, shape, world_size, region = plan
    index, segments, tensor = saved(cuts, shape, world_size=world_size)
    named = needs(index, [("w", region)])

    assert np.array_equal(read(named, segments, region, shape), tensor[region.within(whole(shape))])
    holding = {held.rank for held in index.tensor("w").boxes if intersect(held.box, region)}
    assert {need.rank for need in named} == (holding if region.elements_count else {0})


@given(rows=st.integers(2, 40), world=st.integers(1, 8), data=st.data())
def test_of_a_tensor_cut_along_its_first_dim_no_byte_too_many_is_named(rows, world, data):
    cuts = [set(range(-(-rows // world), rows, -(-rows // world))), set()]
    index, _, _ = saved(cuts, (rows, 3), world_size=world)
    begin = data.draw(st.integers(0, rows - 1))
    count = data.draw(st.integers(1, rows - begin))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(byte_ranges, "PART_BYTES", 1)  # else all of the part counts as named
        named = needs(index, [("w", Box((begin, 0), (count, 3)))])
    begins = {(s.rank, s.volume): s.data_begin for s in index.segments}
    named_bytes = sum(
        part.end - max(part.begin, begins[need.rank, need.volume])
        for need in named
        for part in need.ranges
        if part.end > begins[need.rank, need.volume]
    )

    assert named_bytes == count * 3 * 4


def test_a_region_of_nothing_takes_nothing_away_from_what_else_is_wanted():
    index, _, _ = saved([{2}], (5,), world_size=2)
    wanted = [("w", whole((5,))), ("r0", whole((3,)))]

    assert needs(index, wanted) == needs(index, [*wanted, ("w", Box((0,), (0,)))])


def test_shards_are_named_in_order_whatever_the_order_of_what_is_wanted():
    index, _, _ = saved([{2}], (5,), world_size=2)

    assert [0, 1] == [
        need.rank for need in needs(index, [("r1", whole((3,))), ("r0", whole((3,)))])
    ]


def test_ranges_are_one_if_they_lie_in_one_part_or_one_begins_where_another_ends(monkeypatch):
    monkeypatch.setattr(byte_ranges, "PART_BYTES", 16)
    index, _, _ = saved([set()], (16,), world_size=1)
    [held] = index.tensor("w").boxes
    wanted = [("w", Box((at,), (1,))) for at in (11, 0, 3, 4, 12, 9)]
    [need] = needs(index, wanted)
    ranges = [(part.begin - held.begin, part.end - held.begin) for part in need.ranges]

    assert held.begin == index.segments[0].data_begin
    assert [(-held.begin, 20), (36, 52)] == ranges


def test_what_several_shards_hold_is_read_from_one():
    identity = [
        SegmentIdentity(id=ShardId("r1", 1, 1, rank), job="j", world_size=2, plan_hash="p")
        for rank in range(2)
    ]
    specs = [TensorSpec(fqn="w", dtype="I32", shape=(4,), box=whole((4,)))]
    templates = [header_template(each, specs) for each in identity]
    headers = []
    for template in templates:
        data = bytearray(template.length_bytes)
        head = template.fill(step=1, generation=1, parent=None)
        data[: len(head)] = head
        headers.append(parse_header(memoryview(data), len(data)))

    assert [need.rank for need in needs(build(headers), [("w", whole((4,)))])] == [0]


@pytest.mark.parametrize(
    ("fqn", "region"), [("v", whole((1,))), ("w", Box((3,), (4,)))], ids=["tensor", "beyond"]
)
def test_what_no_shard_holds_is_named(fqn, region):
    index, _, _ = saved([{2}], (5,), world_size=2)

    with pytest.raises(NotReadyError, match=f"tensor '{fqn}'"):
        needs(index, [(fqn, region)])


def test_a_range_of_which_the_first_box_is_missing_is_not_there():
    """Its last one is: what is found last says nothing of what was looked for before."""
    _, segments, _ = saved([{1}, set()], (3, 4), world_size=2)
    header = parse_header(memoryview(segments[1]), len(segments[1]))

    with pytest.raises(NotReadyError, match="tensor 'w'"):
        needs(of_some([header]), [("w", Box((2,), (8,)))])


def test_a_scalar_is_needed_whole():
    index, segments, tensor = saved([], (), world_size=1)
    [need] = needs(index, [("w", whole(()))])

    assert need.ranges[-1].end >= index.tensor("w").boxes[0].end
    assert read([need], segments, whole(()), ()) == tensor
