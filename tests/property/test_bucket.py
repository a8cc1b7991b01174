"""Manifests, sidecars and the index: round trips, and noise that is refused (P6, P9)."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.golden.attacks.digests import digested
from tests.unit.bucket.folders import make, segment

from holdfast.core.ids import CheckpointId, ShardId
from holdfast.core.shard import Shard
from holdfast.errors import InvalidRequestError, ManifestError, UnsupportedFormatError
from holdfast.format import index, keys, manifest, sidecar
from holdfast.format.boxes import Box, whole
from holdfast.format.digest import parts_count, root_digest
from holdfast.format.header import parse_header
from holdfast.format.manifest import Manifest
from holdfast.format.segment import SegmentIdentity, TensorSpec
from holdfast.format.sidecar import Sidecar

REFUSED = (ManifestError, UnsupportedFormatError)
DECODERS = (manifest.decode, sidecar.decode, index.decode)

runs = st.text("abcxyz019", min_size=1, max_size=32)
jobs = st.from_regex(
    r"[A-Za-z0-9][A-Za-z0-9._-]{0,9}(/[A-Za-z0-9][A-Za-z0-9._-]{0,9}){0,3}", fullmatch=True
)
checkpoints = st.builds(CheckpointId, runs, st.integers(0, 10**15 - 1), st.integers(0, 10**10 - 1))
digests = st.binary(min_size=16, max_size=16)
plans = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=64)
letters = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | letters,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(letters, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
notes = st.dictionaries(letters, plain, max_size=4)


@st.composite
def manifests(draw):
    checkpoint, job = draw(checkpoints), draw(jobs)
    volumes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    shards = [
        Shard(
            id=ShardId(checkpoint.run, checkpoint.step, checkpoint.generation, rank, volume),
            job=job,
            world_size=len(volumes),
            plan_hash=draw(plans),
            length_bytes=draw(st.integers(1, 1 << 44)),
            root_digest=draw(digests),
        )
        for rank, count in enumerate(volumes)
        for volume in range(count)
    ]
    step, generation = draw(st.integers(0, 10**15 - 1)), draw(st.integers(0, checkpoint.generation))
    return Manifest(
        checkpoint=checkpoint,
        job=job,
        world_size=len(volumes),
        shards=tuple(shards),
        write_id=draw(st.text("0123456789abcdef", min_size=32, max_size=32)),
        created_at_s=draw(st.floats(0, 1e12)),
        parent=draw(st.none() | st.just(CheckpointId(checkpoint.run, step, generation))),
        mesh=draw(st.dictionaries(st.sampled_from(["dp", "tp", "pp"]), st.integers(1, 10**6))),
        notes=draw(notes),
        software=draw(st.sampled_from(["", "holdfast 0.1.0"])),
    )


@given(manifests())
@settings(max_examples=200)
def test_a_manifest_is_read_as_it_was_written(value):
    data = manifest.encode(value)

    assert value == manifest.decode(data)
    assert data == manifest.encode(manifest.decode(data))


@given(manifests(), st.data())
@settings(max_examples=200)
def test_a_changed_byte_of_a_manifest_is_refused(value, data):
    """It carries the digest of its own text: no field may change unseen."""
    text = bytearray(manifest.encode(value))
    at, byte = data.draw(st.integers(0, len(text) - 1)), data.draw(st.integers(0, 255))
    if text[at] == byte:
        return
    text[at] = byte
    with pytest.raises(REFUSED):
        manifest.decode(bytes(text))


@given(checkpoints, jobs, plans, st.integers(1, 5), st.integers(1, 16 << 20), st.data())
def test_a_sidecar_is_read_as_it_was_written(checkpoint, job, plan_hash, parts, last, data):
    length = ((parts - 1) << 24) + last
    held = tuple(data.draw(st.lists(digests, min_size=parts, max_size=parts)))
    number = ShardId(checkpoint.run, checkpoint.step, checkpoint.generation, 3, 2)
    value = Sidecar(
        shard=Shard(
            id=number, job=job, world_size=4, plan_hash=plan_hash, length_bytes=length,
            root_digest=root_digest(length, held),
        ),
        digests=held,
    )  # fmt: skip

    assert parts == parts_count(length)
    assert value == sidecar.decode(sidecar.encode(value))


@st.composite
def layouts(draw):
    """One tensor cut anywhere along its rows over the ranks, and others of each rank's own."""
    cuts = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    columns, begin, ranks = draw(st.integers(0, 3)), 0, []
    for rank, rows in enumerate(cuts):
        specs = [
            TensorSpec(
                fqn="w",
                dtype="F32",
                shape=(sum(cuts), columns),
                box=Box((begin, 0), (rows, columns)),
            )
        ]
        for name in draw(st.sets(st.sampled_from("abc"))):
            shape = tuple(draw(st.lists(st.integers(0, 3), max_size=2)))
            dtype = draw(st.sampled_from(["U8", "BF16", "I64"]))
            specs.append(
                TensorSpec(fqn=f"rank.{rank}.{name}", dtype=dtype, shape=shape, box=whole(shape))
            )
        begin += rows
        ranks.append(specs)
    return ranks


def headers(ranks):
    for rank, specs in enumerate(ranks):
        identity = SegmentIdentity(
            id=ShardId("r7", 1, 1, rank), job="a", world_size=len(ranks), plan_hash=f"{rank}"
        )
        data = segment(identity, specs)
        yield parse_header(data, len(data))


@given(layouts())
@settings(max_examples=200)
def test_an_index_is_read_as_it_was_written_and_finds_what_the_headers_say(ranks):
    parsed = list(headers(ranks))
    value = index.build(reversed(parsed))

    assert value == index.decode(index.encode(value))
    listed = {
        (entry.spec.fqn, header.identity.id.rank, entry.begin, entry.end, entry.spec.box)
        for header in parsed
        for entry in header.entries
    }
    found = {
        (tensor.fqn, box.rank, box.begin, box.end, box.box)
        for tensor in value.tensors
        for box in tensor.boxes
    }

    assert listed == found


@given(st.binary(max_size=200) | plain.map(lambda value: json.dumps(value).encode()))
@settings(max_examples=300)
def test_noise_is_refused(noise):
    for decode in DECODERS:
        try:
            decode(noise)
        except REFUSED:
            continue
        raise AssertionError(f"{decode.__module__} took {noise!r}")


def honest():
    made = make(None)
    parsed = [parse_header(data, len(data)) for data in made.segments.values()]
    shard = made.manifest.shards[0]
    texts = (
        manifest.encode(made.manifest),
        sidecar.encode(made.sidecar(shard)),
        index.encode(index.build(parsed)),
    )
    return list(zip(DECODERS, map(json.loads, texts), strict=True))


HONEST = honest()


def places(value, above=()):
    """Yield the path of every value below ``value``."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield (*above, key)
        if isinstance(inner, dict | list):
            yield from places(inner, (*above, key))


@given(st.sampled_from(range(len(HONEST))), st.data())
@settings(max_examples=500)
def test_a_changed_field_is_refused_with_an_error_of_the_format_or_harmless(which, data):
    """Its own digest is right again: what is left are the rules alone."""
    decode, table = HONEST[which]
    table = json.loads(json.dumps(table))
    path = data.draw(st.sampled_from(list(places(table))))
    inner = table
    for key in path[:-1]:
        inner = inner[key]
    strange = plain | st.sampled_from([1 << 63, -1, 1 << 64, 10**400, "\ud800", "../x", [], {}])
    inner[path[-1]] = data.draw(strange)
    try:
        decode(digested(json.dumps(table, sort_keys=True).encode()))
    except REFUSED:
        return


@given(jobs, checkpoints, st.integers(1, 10**6), st.data())
def test_keys_are_read_as_they_were_written(job, checkpoint, world_size, data):
    rank, volume = data.draw(st.integers(0, world_size - 1)), data.draw(st.integers(0, 10**6 - 1))
    shard = ShardId(checkpoint.run, checkpoint.step, checkpoint.generation, rank, volume)
    key = keys.segment_key(job, shard, world_size)
    stem = key.rpartition("/")[2].removesuffix(keys.SEGMENT_SUFFIX)

    assert keys.Place(job, checkpoint) == keys.parse_folder(key)
    assert keys.Place(job, checkpoint) == keys.folder_place(keys.folder(job, checkpoint))
    assert (shard, world_size) == keys.parse_shard_stem(stem, checkpoint)


@given(st.text(max_size=40))
def test_no_text_makes_the_parsers_of_keys_fail(text):
    keys.parse_folder(text)
    keys.parse_folder(f"a/r7/{text}/x")
    keys.parse_shard_stem(text, CheckpointId("r7", 1, 1))
    try:
        keys.manifest_key(text, CheckpointId("r7", 1, 1))
    except InvalidRequestError:
        return
