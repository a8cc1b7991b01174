"""A manifest, sidecar or index that would not be read back is not written (P6)."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from tests.unit.bucket.folders import make

from holdfast.core.ids import CheckpointId, ShardId
from holdfast.core.origin import Origin, Tree
from holdfast.errors import ExhaustedError, ManifestError
from holdfast.format import index, manifest, sidecar
from holdfast.format.boxes import Box
from holdfast.format.canonical import with_digest
from holdfast.format.header import parse_header
from holdfast.format.segment import SegmentIdentity, TensorSpec, header_template

MADE = make(None)
FIRST, SECOND = MADE.manifest.shards


@pytest.mark.parametrize("tree", Tree)
def test_what_an_attempt_was_started_with_is_read_back(tree):
    """G19: a catalogue that was lost finds it in the bucket."""
    origin = Origin(commit="4fe1c9a", tree=tree, command='train.py --s "digest":"0"', user="a@b")
    made = replace(MADE.manifest, origin=origin)

    assert made == manifest.decode(manifest.encode(made))


@pytest.mark.parametrize(
    "said", [None, [], "x", {"commit": 7, "dirty": [], "command": None}, {"dirty": "yes"}]
)
def test_what_is_odd_about_a_start_costs_no_checkpoint(said):
    """P9: other writers say what they like there; it decides nothing."""
    raw = json.loads(manifest.encode(MADE.manifest))
    del raw["digest"]
    read = manifest.decode(with_digest({**raw, "origin": said}))

    assert read.shards == MADE.manifest.shards
    assert read.origin in (None, Origin())


def nested(depth: int) -> dict[str, object]:
    inner: dict[str, object] = {}
    for _ in range(depth - 1):
        inner = {"a": inner}
    return inner


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"shards": ()}, "0 shards"),
        ({"shards": (SECOND, FIRST)}, "not sorted"),
        ({"shards": (FIRST,)}, "1 ranks of 2"),
        ({"shards": (FIRST, replace(SECOND, job="other"))}, "of another checkpoint"),
        ({"shards": (FIRST, replace(SECOND, root_digest=b""))}, "is not 16 bytes"),
        ({"shards": (FIRST, replace(SECOND, plan_hash="\n"))}, "is not usable"),
        ({"job": "../x"}, "malformed: job name"),
        ({"checkpoint": CheckpointId("R7", 1, 1)}, "malformed: run id"),
        ({"checkpoint": CheckpointId("r7", 10**15, 1)}, "out of range"),
        ({"parent": CheckpointId("r8", 1, 1)}, "of another run"),
        ({"parent": CheckpointId("r7", 1, 4)}, "of a newer generation"),
        ({"world_size": 0}, "world_size 0"),
        ({"created_at_s": math.nan}, "not a time"),
        ({"created_at_s": math.inf}, "not a time"),
        ({"created_at_s": -1.0}, "not a time"),
        ({"write_id": ""}, "write_id"),
        ({"mesh": {"dp": 0}}, "mesh axis 'dp'"),
        ({"mesh": {1: 2}}, "mesh axis '1'"),
        ({"software": "a\nb"}, "software"),
        ({"notes": {"x": math.nan}}, "notes are not JSON"),
        ({"notes": {"x": object()}}, "notes are not JSON"),
        ({"notes": {1: 2}}, "notes are not plain JSON"),
        ({"notes": {"x": (1, 2)}}, "notes are not plain JSON"),
        ({"notes": {"x": "\ud800"}}, "notes are not JSON"),
        ({"notes": {"x": "x" * 16384}}, "exceed 16384"),
        ({"notes": nested(64)}, "nested deeper than 64"),
    ],
)
def test_a_manifest_that_breaks_a_rule_is_not_written(changes, says):
    with pytest.raises(ManifestError, match=says):
        manifest.encode(replace(MADE.manifest, **changes))


def test_notes_as_deep_as_allowed_are_read_back():
    deep = replace(MADE.manifest, notes=nested(63))

    assert deep == manifest.decode(manifest.encode(deep))


def test_the_plan_is_equal_when_only_step_and_bytes_differ():
    later = make(None, CheckpointId("r7", 1300, 4)).manifest
    other = replace(SECOND, plan_hash="f" * 32)

    assert MADE.manifest.plan == later.plan == manifest.checkpoint_plan((SECOND, FIRST))
    assert MADE.manifest.plan != manifest.checkpoint_plan((FIRST, other))


def test_a_sidecar_that_breaks_a_rule_is_not_written():
    sound = MADE.sidecar(FIRST)
    with pytest.raises(ManifestError, match="2 part digests"):
        sidecar.encode(replace(sound, digests=sound.digests * 2))
    with pytest.raises(ManifestError, match="do not give the root"):
        sidecar.encode(replace(sound, shard=replace(FIRST, root_digest=b"\0" * 16)))


def headers(specs_of_ranks, world_size):
    for rank, specs in enumerate(specs_of_ranks):
        identity = SegmentIdentity(
            id=ShardId("r7", 1, 1, rank), job="a", world_size=world_size, plan_hash="p"
        )
        template = header_template(identity, specs)
        yield parse_header(template.data, template.length_bytes)


W = TensorSpec(fqn="w", dtype="F32", shape=(4,), box=Box((0,), (2,)))


@pytest.mark.parametrize(
    ("ranks", "world_size", "says"),
    [
        ([], 1, "no segment has no index"),
        ([[W]], 2, "1 ranks of 2"),
        ([[W], [W._replace(dtype="I32")]], 2, "disagree about tensor 'w'"),
        ([[W], [W._replace(shape=(5,))]], 2, "disagree about tensor 'w'"),
    ],
)
def test_segments_that_are_not_one_checkpoint_have_no_index(ranks, world_size, says):
    with pytest.raises(ManifestError, match=says):
        index.build(headers(ranks, world_size))


def test_segments_of_two_worlds_have_no_index():
    both = [*headers([[W]], 1), *headers([[W]], 2)]
    with pytest.raises(ManifestError, match="different world sizes"):
        index.build(both)


def test_the_limit_holds_what_is_designed_for():
    """Architecture 7, defect X14: 10^5 tensors, each over 64 ranks."""
    assert index.BOXES_COUNT_MAX >= 10**5 * 64


def test_more_boxes_than_the_limit_have_no_index(monkeypatch):
    monkeypatch.setattr(index, "BOXES_COUNT_MAX", 1)
    with pytest.raises(ExhaustedError, match="2 boxes exceed 1"):
        index.build(headers([[W, W._replace(fqn="v")]], 1))


def test_a_tensor_tells_which_bytes_of_which_segment_hold_a_region():
    """What resharding asks: box to (rank, volume, byte range)."""
    rows = [
        TensorSpec(fqn="w", dtype="F32", shape=(6, 4), box=Box((2 * rank, 0), (2, 4)))
        for rank in range(3)
    ]
    parsed = list(headers([[spec] for spec in rows], 3))
    built = index.build(parsed)
    region = Box((1, 0), (2, 4))
    tensor = built.tensor("w")
    found = [tensor.boxes[number] for number, _ in tensor.overlaps.of(region)]

    assert [0, 1] == [held.rank for held in found]
    assert [(h.data_begin, h.length_bytes) for h in parsed[:2]] == [
        (held.begin, held.end) for held in found
    ]
    assert built.tensor("v") is None
