"""One writer and one commit: parts in, digests out, and what a lost answer of a manifest means."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from tests.unit.bucket.folders import make

from holdfast.bucket.publish import publish, put_sidecar, says_the_same
from holdfast.bucket.writing import SegmentStream, SegmentWriter
from holdfast.errors import (
    AlreadyExistsError,
    CorruptionError,
    DigestMismatchError,
    NotFoundError,
    OutcomeUnknownError,
    TruncatedShardError,
    UnavailableError,
)
from holdfast.format import keys
from holdfast.format.digest import PART_BYTES, part_digests
from holdfast.format.header import parse_header
from holdfast.format.manifest import encode
from holdfast.objectstore.memory import MemoryStore

ANOTHER_ID = "f" * 32


class Losing(MemoryStore):
    """Loses the answer to the next conditional create, written or not."""

    def __init__(self, *, written: bool = True) -> None:
        super().__init__()
        self.lose = False
        self.written = written

    def put(self, key, data, *, if_absent=False):
        if not (if_absent and self.lose):
            return super().put(key, data, if_absent=if_absent)
        if self.written:
            super().put(key, data, if_absent=True)
        raise OutcomeUnknownError("the answer was lost")


def shards_only(store):
    made = make(store).write()
    store.delete([f"{made.prefix}{keys.MANIFEST}"])
    return made


def there(made):
    return made.store.get(f"{made.prefix}{keys.MANIFEST}", length_bytes_max=1 << 20)


def other(made):
    first = made.manifest.shards[0]
    shards = (replace(first, root_digest=b"\2" * 16), *made.manifest.shards[1:])
    return replace(made.manifest, shards=shards, write_id=ANOTHER_ID)


def test_parts_in_any_order_are_one_object_and_its_digests():
    store, data = MemoryStore(), os.urandom(2 * PART_BYTES + 5)
    with SegmentWriter(store, "x", len(data)) as writer:
        for number in reversed(range(writer.count)):
            begin, end = writer.range(number)
            writer.put(number, memoryview(data)[begin:end])
        writer.finish()

    assert data == store.get("x", length_bytes_max=len(data))
    assert tuple(part_digests(memoryview(data))) == writer.digests()


def test_a_stream_is_one_object_and_its_digests():
    store, data = MemoryStore(), os.urandom(2 * PART_BYTES + 5)
    with SegmentStream(store, "x", len(data)) as stream:
        for begin in range(0, len(data), 7 << 20):
            stream.write(data[begin : begin + (7 << 20)])
        digests = stream.finish()

    assert data == store.get("x", length_bytes_max=len(data))
    assert tuple(part_digests(memoryview(data))) == digests


@pytest.mark.parametrize("kind", [SegmentWriter, SegmentStream])
def test_what_fails_on_the_way_leaves_no_upload(kind):
    store = MemoryStore()
    with pytest.raises(ZeroDivisionError), kind(store, "x", 10):
        raise ZeroDivisionError

    assert [] == [*store.open_uploads(), *store.list()]


@pytest.mark.parametrize("at", [3, -1], ids=["first part", "last part"])
def test_a_segment_that_is_not_what_was_sent_gets_no_sidecar(monkeypatch, at):
    store = MemoryStore()
    monkeypatch.setattr(MemoryStore, "checks_parts", False)
    made = make(store, world_size=1, rows=(PART_BYTES >> 4) + 1).write()
    shard = made.manifest.shards[0]
    assert PART_BYTES < shard.length_bytes <= 2 * PART_BYTES
    sidecar = made.sidecar(shard)
    store.delete([made.folder.sidecar_key(shard)])
    made.damage(shard, at)
    with pytest.raises(DigestMismatchError):
        put_sidecar(made.folder, sidecar)

    assert made.folder.sidecar_key(shard) not in [found.key for found in store.list()]


@pytest.mark.parametrize("checks_parts", [True, False])
def test_nor_does_a_segment_of_another_length(monkeypatch, checks_parts):
    """Also where the store has checked each part: those that it has may not be all."""
    store = MemoryStore()
    monkeypatch.setattr(MemoryStore, "checks_parts", checks_parts)
    made = shards_only(store)
    shard = made.manifest.shards[0]
    store.delete([made.folder.sidecar_key(shard)])
    store.put(made.folder.segment_key(shard), made.segments[shard] + b"more")
    with pytest.raises(TruncatedShardError):
        put_sidecar(made.folder, made.sidecar(shard))

    assert made.folder.sidecar_key(shard) not in [found.key for found in store.list()]


def test_what_is_published_is_the_manifest_that_was_meant():
    made = shards_only(MemoryStore())

    assert encode(made.manifest) == publish(made.folder, made.manifest) == there(made)


def test_the_index_of_a_plan_is_written_once():
    made = shards_only(MemoryStore())
    asked = []

    def headers():
        asked.append(1)
        return [parse_header(data, len(data)) for data in made.segments.values()]

    publish(made.folder, made.manifest, headers=headers)
    key = keys.index_key(made.manifest.job, made.manifest.checkpoint.run, made.manifest.plan)
    made.store.head(key)
    publish(made.folder, made.manifest, headers=headers)

    assert [1] == asked


def test_there_is_no_manifest_while_there_can_be_no_index():
    """Else a save that has failed would be a checkpoint."""
    made = shards_only(MemoryStore())

    def gone():
        raise NotFoundError("a segment is gone")

    with pytest.raises(NotFoundError, match="a segment is gone"):
        publish(made.folder, made.manifest, headers=gone)

    assert f"{made.prefix}{keys.MANIFEST}" not in [found.key for found in made.store.list()]


def test_a_lost_answer_is_read_back_and_is_success():
    store = Losing()
    made = shards_only(store)
    store.lose = True

    assert encode(made.manifest) == publish(made.folder, made.manifest)


def test_a_lost_answer_to_what_was_not_written_is_to_be_tried_again():
    store = Losing(written=False)
    made = shards_only(store)
    store.lose = True
    with pytest.raises(UnavailableError, match="did not tell whether"):
        publish(made.folder, made.manifest)


def test_another_writer_with_the_same_shards_is_as_good():
    made = shards_only(MemoryStore())
    theirs = publish(made.folder, replace(made.manifest, write_id=ANOTHER_ID, created_at_s=2.0))

    assert theirs == publish(made.folder, made.manifest) == there(made)


@pytest.mark.parametrize("repair", [False, True])
def test_the_manifest_of_other_shards_stays(repair):
    made = shards_only(MemoryStore())
    theirs = publish(made.folder, other(made))
    with pytest.raises(AlreadyExistsError, match="another checkpoint"):
        publish(made.folder, made.manifest, repair=repair)

    assert theirs == there(made)


def test_a_manifest_that_cannot_be_read_is_written_over_by_a_repair_alone():
    made = shards_only(MemoryStore())
    made.store.put(f"{made.prefix}{keys.MANIFEST}", b"torn")
    with pytest.raises(CorruptionError):
        publish(made.folder, made.manifest)
    publish(made.folder, made.manifest, repair=True)

    assert encode(made.manifest) == there(made)


def test_manifests_say_the_same_by_id_or_by_shards():
    mine = make(MemoryStore()).manifest
    later = replace(mine, write_id=ANOTHER_ID, created_at_s=2.0)

    assert says_the_same(mine, mine)
    assert says_the_same(later, mine)
    assert says_the_same(replace(mine, mesh={}, shards=mine.shards[:1]), mine), "its own id"
    assert not says_the_same(other(make(MemoryStore())), mine)
