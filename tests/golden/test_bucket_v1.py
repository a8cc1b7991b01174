"""The objects of a bucket, byte for byte: what was written once is read for ever (G15, P7)."""

from __future__ import annotations

from pathlib import Path

from tests.unit.bucket.folders import CHECKPOINT, JOB, make

from holdfast.core.ids import CheckpointId, ShardId
from holdfast.format import index, keys, manifest, sidecar
from holdfast.format.header import parse_header

GOLDEN = Path(__file__).parent / "bucket-v1"
FIX = "bucket v1 is frozen: undo the change, or make it version 2 and keep reading 1"
MADE = make(None, parent=CheckpointId("r7", 1000, 2))
SHARD = MADE.manifest.shards[1]


def built():
    return index.build(parse_header(data, len(data)) for data in MADE.segments.values())


def names():
    number = ShardId("r7", 1200, 3, 1)
    many = ShardId("r7", 1200, 3, 123_456, 7)
    return [
        keys.segment_key(JOB, number, 2),
        keys.sidecar_key(JOB, number, 2),
        keys.segment_key(JOB, many, 1_000_000),
        keys.manifest_key(JOB, CHECKPOINT),
        keys.index_key(JOB, "r7", "0123456789abcdef" * 2),
    ]


def test_keys_are_what_they_were():
    assert (GOLDEN / "keys.txt").read_text().splitlines() == names(), FIX


def test_a_manifest_is_written_and_read_as_it_always_was():
    golden = (GOLDEN / "manifest.json").read_bytes()

    assert golden == manifest.encode(MADE.manifest), FIX
    assert MADE.manifest == manifest.decode(golden), FIX


def test_a_sidecar_is_written_and_read_as_it_always_was():
    golden = (GOLDEN / "shard-00001-of-00002.sum").read_bytes()

    assert golden == sidecar.encode(MADE.sidecar(SHARD)), FIX
    assert MADE.sidecar(SHARD) == sidecar.decode(golden), FIX


def test_an_index_is_written_and_read_as_it_always_was():
    golden = (GOLDEN / "index.json").read_bytes()

    assert golden == index.encode(built()), FIX
    assert built() == index.decode(golden), FIX
    assert MADE.manifest.plan == built().plan
