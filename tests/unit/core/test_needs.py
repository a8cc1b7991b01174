"""What a rank may name of a checkpoint: an agent reckons with it at each turn."""

from __future__ import annotations

import pytest

from holdfast.core.ids import CheckpointId, Generation, RunId, Step
from holdfast.core.needs import ByteRange, Needs, ShardNeed, checked
from holdfast.errors import InvalidRequestError

KEY = CheckpointId(RunId("r1"), Step(5), Generation(1))


def needs(*shards):
    return Needs(checkpoint=KEY, shards=shards)


def ranges(*spans, rank=0, volume=0):
    made = tuple(ByteRange(begin=begin, end=end) for begin, end in spans)
    return ShardNeed(rank=rank, volume=volume, ranges=made)


def test_shards_and_sorted_ranges_are_taken_as_they_are():
    named = needs(ranges((0, 5), (6, 1 << 62)), ShardNeed(rank=1), ShardNeed(rank=1, volume=1))

    assert checked(named) == named


@pytest.mark.parametrize(
    "shards",
    [
        (ranges((5, 5)),),
        (ranges((9, 3)),),
        (ranges((0, 10), (5, 20)),),
        (ranges((0, 10), (10, 20)),),
        (ranges((10, 20), (0, 5)),),
        (ranges((-5, 3)),),
        (ranges(rank=-1),),
        (ranges(volume=-1),),
        (ShardNeed(rank=1), ranges((0, 5), rank=1)),
    ],
    ids=[
        "empty", "backwards", "overlapping", "touching", "not sorted", "before the segment",
        "no rank", "no volume", "twice",
    ],
)  # fmt: skip
def test_what_is_no_part_of_a_segment_is_refused(shards):
    with pytest.raises(InvalidRequestError, match="needs: "):
        checked(needs(*shards))


@pytest.mark.parametrize(
    ("shards", "whole", "in_parts"),
    [
        ((), False, False),
        ((ShardNeed(rank=0), ShardNeed(rank=1)), False, False),
        ((ShardNeed(rank=0), ranges((0, 5), rank=1)), False, True),
        ((ShardNeed(rank=0), ranges((0, 5), rank=1)), True, False),
    ],
    ids=["nothing", "whole shards", "a part of one", "all, whatever was named"],
)
def test_needs_are_in_parts_where_one_shard_is_not_needed_whole(shards, whole, in_parts):
    assert in_parts is Needs(checkpoint=KEY, shards=shards, whole=whole).in_parts
