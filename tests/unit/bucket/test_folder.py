"""One checkpoint in an object store, read and checked (P3, P6)."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from tests.unit.bucket.folders import CHECKPOINT, JOB, Made, make, segment

from holdfast.bucket.folder import CheckpointFolder
from holdfast.core.ids import CheckpointId
from holdfast.errors import (
    DigestMismatchError,
    InvalidRequestError,
    ManifestError,
    NotFoundError,
    TruncatedShardError,
    UnavailableError,
)
from holdfast.format import sidecar as sidecars
from holdfast.format.boxes import Box
from holdfast.format.digest import PART_BYTES
from holdfast.format.keys import folder
from holdfast.format.segment import SegmentIdentity, TensorSpec
from holdfast.objectstore.memory import MemoryStore

BIG_ROWS = 5 * PART_BYTES // 2 // 16


@pytest.fixture
def small():
    return make(MemoryStore()).write()


@pytest.fixture(scope="module")
def big():
    """One shard of three parts, the last one short."""
    return make(MemoryStore(), world_size=1, rows=BIG_ROWS).write()


class Watched(MemoryStore):
    """Notes what is read, and lets the first readings of some places go wrong."""

    def __init__(self, store, broken=()):
        super().__init__()
        self._objects = store._objects
        self.read = []
        self.broken = list(broken)

    def read_into(self, key, begin, view):
        self.read.append((begin, len(view)))
        super().read_into(key, begin, view)
        if begin in self.broken:
            self.broken.remove(begin)
            view[0] ^= 1


def fetch(folder_, shard, *, done=None, stop=None, pace=None):
    data = bytearray(shard.length_bytes)
    folder_.fetch(
        shard,
        folder_.sidecar(shard),
        memoryview(data),
        done=set() if done is None else done,
        threads=3,
        stop=stop or threading.Event(),
        pace=pace,
    )
    return data


def test_what_was_written_is_read_back(small):
    """F72: manifest, sidecars, headers and bytes."""
    folder_ = small.folder
    manifest = folder_.manifest()

    assert small.manifest == manifest
    for shard in manifest.shards:
        assert small.segments[shard] == fetch(folder_, shard)
        assert shard.id == folder_.header(shard).identity.id


def test_parts_are_read_side_by_side_each_once_and_those_done_not_again(big):
    shard = big.manifest.shards[0]
    store = Watched(big.store)
    folder_ = CheckpointFolder(store, big.prefix)
    done, paced = {1}, []
    data = fetch(folder_, shard, done=done, pace=paced.append)
    last = shard.length_bytes - 2 * PART_BYTES

    assert {0, 1, 2} == done
    assert [(0, PART_BYTES), (2 * PART_BYTES, last)] == sorted(store.read)
    assert sorted(paced) == sorted([PART_BYTES, last])
    assert data[:PART_BYTES] == big.segments[shard][:PART_BYTES]
    assert data[2 * PART_BYTES :] == big.segments[shard][2 * PART_BYTES :]
    assert not any(data[PART_BYTES : 2 * PART_BYTES])


def test_a_changed_byte_names_its_part_and_the_other_parts_stay(big):
    shard = big.manifest.shards[0]
    damaged = make(MemoryStore(), world_size=1, rows=BIG_ROWS).write()
    damaged.damage(shard, PART_BYTES + 5)
    done: set[int] = set()
    with pytest.raises(DigestMismatchError, match=r"part 1 of .*shard-00000-of-00001") as caught:
        fetch(damaged.folder, shard, done=done)

    assert {"shard": shard.id.key, "part": "1"} == caught.value.context
    assert 1 not in done

    data = bytearray(shard.length_bytes)
    damaged.folder.fetch(
        shard, big.sidecar(shard), memoryview(data), done={1}, threads=1, stop=threading.Event()
    )

    assert data[-1] == big.segments[shard][-1]


def test_what_broke_on_the_way_is_read_again(big):
    shard = big.manifest.shards[0]
    folder_ = CheckpointFolder(Watched(big.store, [0, 2 * PART_BYTES]), big.prefix)

    assert big.segments[shard] == fetch(folder_, shard)


def test_a_stop_ends_it_as_unavailable(big):
    shard = big.manifest.shards[0]
    stop = threading.Event()
    stop.set()
    with pytest.raises(UnavailableError, match="was stopped"):
        fetch(big.folder, shard, stop=stop)


def test_a_stop_between_parts_keeps_what_is_done(big):
    shard = big.manifest.shards[0]
    stop = threading.Event()
    done: set[int] = set()
    with pytest.raises(UnavailableError, match="was stopped"):
        big.folder.fetch(
            shard,
            big.sidecar(shard),
            memoryview(bytearray(shard.length_bytes)),
            done=done,
            threads=1,
            stop=stop,
            pace=lambda _: stop.set(),
        )

    assert {0} == done


def test_a_view_of_another_length_is_refused_before_anything_is_read(small):
    shard = small.manifest.shards[0]
    with pytest.raises(InvalidRequestError, match="are not for the shard"):
        small.folder.fetch(
            shard,
            small.sidecar(shard),
            memoryview(bytearray(shard.length_bytes + 1)),
            done=set(),
            threads=1,
            stop=threading.Event(),
        )


@pytest.mark.parametrize("suffix", ["safetensors", "sum"])
def test_a_missing_object_is_not_found(small, suffix):
    shard = small.manifest.shards[1]
    small.store.delete([f"{small.prefix}shard-00001-of-00002.{suffix}"])
    with pytest.raises(NotFoundError, match=f"shard-00001-of-00002.{suffix}"):
        fetch(small.folder, shard)


def test_a_folder_without_manifest_is_no_checkpoint(small):
    small.store.delete([f"{small.prefix}manifest.json"])
    with pytest.raises(NotFoundError, match=r"manifest\.json"):
        small.folder.manifest()


def test_a_short_object_is_truncated(small):
    shard = small.manifest.shards[0]
    small.store.put(small.folder.segment_key(shard), small.segments[shard][:-1])
    with pytest.raises(TruncatedShardError):
        fetch(small.folder, shard)
    with pytest.raises(TruncatedShardError, match=f"{shard.length_bytes - 1} bytes"):
        small.folder.check_length(shard)


def test_an_object_with_bytes_after_its_end_is_found_by_its_length(small):
    shard = small.manifest.shards[0]
    small.store.put(small.folder.segment_key(shard), small.segments[shard] + b"x")
    with pytest.raises(TruncatedShardError):
        small.folder.check_length(shard)


def test_the_manifest_of_another_folder_is_refused(small):
    other = folder(JOB, CheckpointId("r7", 1300, 3))
    data = small.store.get(f"{small.prefix}manifest.json", length_bytes_max=1 << 20)
    small.store.put(f"{other}manifest.json", data)
    with pytest.raises(ManifestError, match=r"manifest in team/gpt/r7/step-1300.g3/ is of .*1200"):
        CheckpointFolder(small.store, other).manifest()


def test_a_copy_of_the_folder_under_any_name_is_the_same_checkpoint():
    copy = make(MemoryStore(), prefix="").write()

    assert CHECKPOINT == copy.folder.manifest().checkpoint
    assert copy.segments[copy.manifest.shards[1]] == fetch(copy.folder, copy.manifest.shards[1])


def test_the_sidecar_of_another_shard_is_refused(small):
    first, second = small.manifest.shards
    small.store.put(small.folder.sidecar_key(first), sidecars.encode(small.sidecar(second)))
    with pytest.raises(ManifestError, match="is not that of the shard in the manifest"):
        small.folder.sidecar(first)


def test_the_segment_of_another_shard_is_refused_by_its_header(small):
    first, second = small.manifest.shards
    small.store.put(small.folder.segment_key(first), small.segments[second])
    with pytest.raises(ManifestError, match=r"r7/1200/3/1/0 lies where r7/1200/3/0/0 should"):
        small.folder.header(first)


def test_a_header_longer_than_the_first_guess_is_read_whole():
    made = make(MemoryStore(), world_size=1)
    (shard,) = made.segments
    identity = SegmentIdentity(id=shard.id, job=shard.job, world_size=1, plan_hash=shard.plan_hash)
    many = [
        TensorSpec(fqn=f"layers.{i}.weight", dtype="U8", shape=(1,), box=Box((0,), (1,)))
        for i in range(1_000)
    ]
    data = segment(identity, many)
    longer = replace(shard, length_bytes=len(data))
    made = Made(made.store, made.prefix, made.manifest, {})
    made.store.put(made.folder.segment_key(longer), data)

    assert len(many) == len(made.folder.header(longer).entries)
