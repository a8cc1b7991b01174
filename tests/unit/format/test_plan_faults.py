"""What is said of plans that do not fit together, beside ``test_tally``: ranges, parts, nothing."""

from __future__ import annotations

import pytest
from tests.unit.format.test_tally import header

from holdfast.format.boxes import Box, whole
from holdfast.format.plan_faults import first_fault
from holdfast.format.segment import TensorSpec


def held(*boxes, shape=(9, 2), dtypes=None):
    """Return what is said of one tensor, of which each rank holds a box."""
    dtypes = dtypes or ["F32"] * len(boxes)
    specs = [
        TensorSpec(fqn="w", dtype=dtype, shape=shape, box=box)
        for box, dtype in zip(boxes, dtypes, strict=True)
    ]
    return first_fault(header(rank, spec) for rank, spec in enumerate(specs))


@pytest.mark.parametrize(
    ("count", "named"),
    [(1, "0 save"), (8, "0, 1, 2, 3, 4, 5, 6, 7 save"), (9, "0, 1, 2, 3, 4, 5, 6, 7 … save")],
)
def test_of_many_ranks_that_leave_a_hole_eight_are_named(count, named):
    rows = [Box((row, 0), (1, 2)) for row in range(count)]
    assert held(*rows, shape=(12, 2)) == (
        f"no rank saves [{count}, 0] + [{12 - count}, 2] of tensor 'w' [12, 2], of which ranks "
        f"{named} parts"
    )


def test_a_rank_whose_range_is_of_two_boxes_is_named_once():
    assert held(Box((1,), (3,))).endswith("of tensor 'w' [9, 2], of which ranks 0 save parts")


def test_who_holds_an_empty_range_is_heard_of_the_dtype():
    """As a rank of ZeRO does whose slice begins behind the tensor."""
    empty = Box((18,), (0,))
    assert "" == held(whole((9, 2)), empty)
    assert held(whole((9, 2)), empty, dtypes=["F32", "F16"]) == (
        "tensor 'w' is F32 [9, 2] on rank 0 and F16 [9, 2] on rank 1"
    )
    assert held(empty).startswith("no rank saves [0, 0] + [9, 2] of tensor 'w' [9, 2]")


@pytest.mark.parametrize("shape", [(0, 2), (9, 0)])
def test_of_a_tensor_without_elements_nothing_is_missing(shape):
    assert "" == held(whole(shape), shape=shape)
    assert "" == held(whole(shape), whole(shape), shape=shape)
    assert "" == held(Box((0, 0), (0, 0)), shape=shape)


def test_ranges_may_lie_in_any_order():
    assert "" == held(Box((7,), (11,)), Box((0,), (3,)), Box((3,), (4,)))
    assert held(Box((7,), (11,)), Box((0,), (3,))).startswith("no rank saves [2, 0] + [1, 2]")


def test_what_is_kept_of_a_rank_alone_is_no_part_of_any_tensor():
    blob = TensorSpec(fqn="holdfast.rank.0", dtype="U8", shape=(3,), box=Box((0,), (1,)))
    assert "" == first_fault([header(0, blob)])
