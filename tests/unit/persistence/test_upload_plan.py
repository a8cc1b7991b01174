"""Which parts are sent, copied, kept and read back."""

from __future__ import annotations

import pytest

from holdfast.core.ids import ShardId
from holdfast.core.shard import Shard
from holdfast.format.digest import PART_BYTES, part_digest, parts_count, root_digest
from holdfast.format.sidecar import Sidecar
from holdfast.objectstore import UPLOAD_PARTS_COUNT_MAX
from holdfast_services.persistence.domain.upload_plan import (
    SAMPLE_COUNT,
    comparable,
    cut,
    plan_upload,
    sample,
    to_read_back,
    upload_part_bytes,
)

LENGTH = 5 * PART_BYTES + 100


def digests_of(text):
    return tuple(part_digest(letter.encode()) for letter in text)


def sidecar(text, *, step=1, length=LENGTH, plan="p", world=2):
    digests = digests_of(text)
    shard = Shard(
        id=ShardId("r1", step, 1, 0),
        job="j",
        world_size=world,
        plan_hash=plan,
        length_bytes=length,
        root_digest=root_digest(length, digests),
    )
    return Sidecar(shard=shard, digests=digests)


def numbers(parts):
    return [part.number for part in parts]


@pytest.mark.parametrize("parts", [1, 9_999, 10_000, 10_001, 20_000, 20_001, 1_000_000])
def test_no_upload_has_more_parts_than_a_store_takes(parts):
    """Issue 3.3: parts grow in whole multiples once a segment has more than 10,000."""
    size = upload_part_bytes(parts * PART_BYTES, UPLOAD_PARTS_COUNT_MAX)

    assert 0 == size % PART_BYTES
    assert -(-parts * PART_BYTES // size) <= UPLOAD_PARTS_COUNT_MAX
    assert size == PART_BYTES or -(-parts * PART_BYTES // (size - PART_BYTES)) > (
        UPLOAD_PARTS_COUNT_MAX
    )


@pytest.mark.parametrize("pieces", [1, 2, 3, 7])
def test_the_parts_of_an_upload_fill_the_segment_and_carry_their_digests(pieces):
    digests = digests_of("abcdef")
    parts = cut(LENGTH, digests, pieces * PART_BYTES)

    assert list(range(len(parts))) == numbers(parts)
    assert [0, *(part.end for part in parts)] == [*(part.begin for part in parts), LENGTH]
    assert digests == sum((part.digests for part in parts), ())
    assert all(len(p.digests) == parts_count(p.length_bytes) for p in parts)


def test_every_part_is_kept_copied_or_sent_exactly_once():
    """G10, G16: what a dead worker sent stays; unchanged parts are copied; the rest is sent."""
    parts = cut(LENGTH, digests_of("abcdef"), PART_BYTES)
    earlier = [("old", sidecar("aXcXeX")), ("older", sidecar("XbXXXX"))]
    plan = plan_upload(parts, {0: PART_BYTES, 5: 100}, earlier)

    assert [0, 5] == numbers(plan.kept)
    assert [(1, "older"), (2, "old"), (4, "old")] == [
        (c.part.number, c.source) for c in plan.copies
    ]
    assert [3] == numbers(plan.sends)


def test_a_part_of_another_size_is_sent_again():
    """G10: a part that was cut short is not believed."""
    parts = cut(LENGTH, digests_of("abcdef"), PART_BYTES)
    plan = plan_upload(parts, {0: PART_BYTES - 1, 5: PART_BYTES}, [])

    assert () == plan.kept
    assert 6 == len(plan.sends)


def test_a_part_of_several_pieces_is_copied_only_when_all_of_them_are_unchanged():
    """G16 for segments beyond 10,000 parts."""
    parts = cut(LENGTH, digests_of("abcdef"), 2 * PART_BYTES)
    plan = plan_upload(parts, {}, [("old", sidecar("abcXef"))])

    assert [0, 2] == [copy.part.number for copy in plan.copies]
    assert [1] == numbers(plan.sends)


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({}, True),
        ({"step": 7}, True),
        ({"plan": "q"}, False),
        ({"world": 3}, False),
        ({"text": "abcdefg", "length": LENGTH + PART_BYTES}, False),
    ],
)
def test_only_segments_of_one_plan_and_length_share_parts(change, same):
    """G16: equal bytes at the same place, or nothing."""
    theirs = sidecar(**{"text": "abcdef", **change})

    assert same == comparable(sidecar("abcdef").shard, theirs.shard)


@pytest.mark.parametrize("count", [1, 2, 4, 5, 100])
@pytest.mark.parametrize("seed", [b"\0" * 16, b"\x07" * 16, b"\xff" * 16])
def test_a_sample_is_small_spread_and_without_repeats(count, seed):
    parts = cut(count * PART_BYTES, [bytes(16)] * count, PART_BYTES)
    chosen = numbers(sample(parts, seed))

    assert min(count, SAMPLE_COUNT) == len(set(chosen)) == len(chosen)
    gaps = [b - a for a, b in zip(chosen, [*chosen[1:], chosen[0] + count], strict=True)]
    assert max(gaps) <= -(-count // len(chosen)) + 1


def test_nothing_is_sampled_from_nothing():
    assert () == sample((), b"\1" * 16)


def test_all_that_this_worker_did_not_send_is_read_back():
    """P3: what a dead worker sent and what the store copied, nobody who lives has hashed.

    Defect A6: with a sample of the copies, one rotten part spread to every later checkpoint.
    """
    text = "abcdefghijkl"
    parts = cut(len(text) * PART_BYTES, digests_of(text), PART_BYTES)
    older = sidecar("XXcdefghijkX", length=len(text) * PART_BYTES)
    plan = plan_upload(parts, {0: PART_BYTES, 1: PART_BYTES}, [("old", older)])

    assert list(range(11)) == numbers(to_read_back(plan, b"\0" * 16, checked=True))
    assert list(range(12)) == numbers(to_read_back(plan, b"\0" * 16, checked=False))


def test_of_what_it_sent_a_sample_is_read_back_unless_the_store_checks():
    """P3, G10: each part was hashed just before it was sent."""
    parts = cut(LENGTH, digests_of("abcdef"), PART_BYTES)
    plan = plan_upload(parts, {}, [])

    assert () == to_read_back(plan, b"\0" * 16, checked=True)
    assert SAMPLE_COUNT == len(to_read_back(plan, b"\0" * 16, checked=False))
