"""Boxes add up to their tensor, and other boxes do not; what is wrong with them is named."""

import random

import pytest

from holdfast.core.ids import Generation, Rank, RunId, ShardId, Step
from holdfast.core.shard import PRIME
from holdfast.format.boxes import Box, whole
from holdfast.format.header import parse_header
from holdfast.format.plan_faults import first_fault
from holdfast.format.segment import SegmentIdentity, TensorSpec, header_template
from holdfast.format.tally import encode, tally

SHAPE = (6, 4)


def rows(*spans):
    return [Box((begin, 0), (end - begin, 4)) for begin, end in spans]


def of(boxes, fqn="w", dtype="F32", shape=SHAPE):
    return sum(tally(fqn, dtype, shape, box) for box in boxes) % PRIME


def cut(box, chance):
    """Cut a box at random, as a grid of meshes or worse."""
    dim = chance.randrange(len(box.lengths))
    if box.lengths[dim] < 2 or chance.random() < 0.2:
        return [box]
    at = chance.randrange(1, box.lengths[dim])
    low, high = list(box.lengths), list(box.lengths)
    low[dim], high[dim] = at, box.lengths[dim] - at
    begin = list(box.offsets)
    begin[dim] += at
    return cut(Box(box.offsets, tuple(low)), chance) + cut(Box(tuple(begin), tuple(high)), chance)


@pytest.mark.parametrize("seed", range(50))
def test_boxes_without_hole_or_overlap_add_up_to_their_tensor_and_others_do_not(seed):
    chance = random.Random(seed)
    shape = tuple(chance.randrange(1, 9) for _ in range(chance.randrange(1, 4)))
    boxes = cut(whole(shape), chance)
    total = of([whole(shape)], shape=shape)

    assert of(boxes, shape=shape) == total
    assert of(boxes[1:], shape=shape) != total
    assert of([*boxes, boxes[0]], shape=shape) != total


def test_a_hole_and_an_overlap_of_one_size_do_not_make_up_for_each_other():
    """What counting elements would not see."""
    assert of(rows((0, 3), (2, 5))) != of([whole(SHAPE)])


@pytest.mark.parametrize("other", [{"fqn": "v"}, {"dtype": "F16"}, {"shape": (7, 4)}])
def test_a_tensor_of_another_name_or_kind_has_another_tally(other):
    assert of(rows((0, 6)), **other) != of(rows((0, 6)))


def test_nothing_has_the_tally_of_nothing():
    assert of(rows((3, 3))) == 0
    assert encode(0) == "0" * 14


def header(rank, *specs):
    key = ShardId(RunId("r1"), Step(1), Generation(1), Rank(rank))
    identity = SegmentIdentity(id=key, job="j", world_size=3, plan_hash="p")
    template = header_template(identity, specs)
    return parse_header(template.fill(step=1, generation=1, parent=None), template.length_bytes)


def fault(*spans, shapes=(SHAPE, SHAPE)):
    parts = [
        TensorSpec(fqn="w", dtype="F32", shape=shape, box=box)
        for shape, box in zip(shapes, rows(*spans), strict=True)
    ]
    return first_fault(header(rank, part) for rank, part in enumerate(parts))


def test_a_fault_names_ranks_tensor_and_box():
    assert fault((0, 3), (3, 6)) == ""
    assert fault((0, 3), (2, 6)) == "ranks 0 and 1 both save [2, 0] + [1, 4] of tensor 'w' [6, 4]"
    assert fault((0, 2), (3, 6)) == (
        "no rank saves [2, 0] + [1, 4] of tensor 'w' [6, 4], of which ranks 0, 1 save parts"
    )
    assert fault((0, 3), (3, 6), shapes=(SHAPE, (8, 4))) == (
        "tensor 'w' is F32 [6, 4] on rank 0 and F32 [8, 4] on rank 1"
    )
