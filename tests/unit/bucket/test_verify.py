"""A checkpoint in the bucket is checked without loading it (G20, P3)."""

from __future__ import annotations

import pytest
from tests.unit.bucket.folders import make

from holdfast.bucket.verify import BAD_PARTS_COUNT_MAX, ShardState, strangers, verify
from holdfast.errors import UnavailableError
from holdfast.format.digest import PART_BYTES
from holdfast.objectstore.memory import MemoryStore

BIG_ROWS = 5 * PART_BYTES // 2 // 16


@pytest.fixture
def small():
    return make(MemoryStore()).write()


def states(made, **options):
    return [v.state.value for v in verify(made.folder, made.manifest, **options)]


def test_a_sound_checkpoint_is_ok_and_every_byte_was_read(small):
    read = []

    assert ["ok", "ok"] == states(small, progress=read.append)
    assert small.manifest.length_bytes == sum(read)


def test_a_changed_byte_is_a_mismatch_of_its_part():
    made = make(MemoryStore(), world_size=1, rows=BIG_ROWS).write()
    shard = made.manifest.shards[0]
    made.damage(shard, 2 * PART_BYTES + 1)
    largest = []
    (verdict,) = verify(made.folder, made.manifest, pace=largest.append)

    assert ShardState.MISMATCH is verdict.state
    assert (2,) == verdict.bad_parts
    assert not verdict.ok
    assert "part 2 of" in verdict.detail
    assert PART_BYTES == max(largest) <= BAD_PARTS_COUNT_MAX * PART_BYTES


@pytest.mark.parametrize("suffix", ["safetensors", "sum"])
def test_a_missing_object_is_missing_and_the_others_are_still_read(small, suffix):
    small.store.delete([f"{small.prefix}shard-00000-of-00002.{suffix}"])

    assert ["missing", "ok"] == states(small)


def test_another_length_is_a_mismatch(small):
    shard = small.manifest.shards[1]
    small.store.put(small.folder.segment_key(shard), small.segments[shard] + b"x")
    verdicts = list(verify(small.folder, small.manifest))

    assert ["ok", "mismatch"] == [v.state.value for v in verdicts]
    assert f"has {shard.length_bytes + 1} bytes" in verdicts[1].detail


def test_a_broken_sidecar_is_a_mismatch(small):
    small.store.put(small.folder.sidecar_key(small.manifest.shards[0]), b"{}")

    assert ["mismatch", "ok"] == states(small)


def test_a_store_that_cannot_be_reached_is_an_error_and_no_verdict(small):
    def unreachable(_):
        raise UnavailableError("503")

    with pytest.raises(UnavailableError):
        states(small, pace=unreachable)


def test_a_segment_that_the_manifest_does_not_name_is_a_stranger(small):
    """P7: a plain reader lists the folder and would load it."""
    assert () == strangers(small.folder, small.manifest)
    small.store.put(f"{small.prefix}shard-00002-of-00003.safetensors", b"x")

    assert (f"{small.prefix}shard-00002-of-00003.safetensors",) == strangers(
        small.folder, small.manifest
    )
