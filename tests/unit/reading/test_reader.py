"""One reader: any region of any tensor, from files here and from a folder in a store alike."""

from __future__ import annotations

import itertools
import random
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from holdfast.bucket.folder import CheckpointFolder
from holdfast.core.ids import CheckpointId, ShardId
from holdfast.core.needs import ByteRange
from holdfast.core.shard import Shard
from holdfast.errors import (
    DigestMismatchError,
    InvalidRequestError,
    ManifestError,
    NotReadyError,
    TruncatedShardError,
)
from holdfast.format import sidecar as sidecars
from holdfast.format.boxes import Box, whole
from holdfast.format.digest import PART_BYTES, part_digests, root_digest
from holdfast.format.header import parse_header
from holdfast.format.manifest import Manifest
from holdfast.format.names import blob_name
from holdfast.format.segment import SegmentIdentity, TensorSpec, header_length, header_template
from holdfast.objectstore.memory import MemoryStore
from holdfast.reading import folder as folders
from holdfast.reading import reader as readers
from holdfast.reading.files import open_files
from holdfast.reading.folder import open_folder
from holdfast.reading.reader import Want
from holdfast.reading.verified_parts import VerifiedParts

FULL = torch.arange(7 * 5 * 3, dtype=torch.float32).reshape(7, 5, 3)
SHAPE = tuple(FULL.shape)
CUTS = [Box((0, 0, 0), (4, 2, 3)), Box((0, 2, 0), (4, 3, 3)), Box((4, 0, 0), (3, 5, 3))]


def segments():
    """One shard per cut, with its bytes."""
    made = []
    for rank, box in enumerate(CUTS):
        number = ShardId("r1", 1, 1, rank)
        identity = SegmentIdentity(id=number, job="j", world_size=len(CUTS), plan_hash="p")
        spec = TensorSpec(fqn="w", dtype="F32", shape=SHAPE, box=box)
        data = header_template(identity, [spec]).fill(step=1, generation=1, parent=None)
        data += FULL[box.within(whole(SHAPE))].contiguous().numpy().tobytes()
        digests = tuple(part_digests(memoryview(data)))
        shard = Shard(
            id=number, job="j", world_size=len(CUTS), plan_hash="p",
            length_bytes=len(data), root_digest=root_digest(len(data), digests),
        )  # fmt: skip
        made.append((shard, data, digests))
    return made


@contextmanager
def mapped(tmp_path):
    files = []
    for shard, data, _ in segments():
        path = tmp_path / f"{shard.id.rank}.seg"
        path.write_bytes(data)
        files.append((path, shard))
    with open_files(files) as reader:
        yield reader


def parts_of_one(tmp_path, *spans):
    """A file that has only these bytes of the first shard; what is read elsewhere is zeros."""
    shard, data, _ = segments()[0]
    path = tmp_path / "s1.0.part"
    with path.open("wb") as file:
        file.truncate(len(data))
        for begin, end in spans:
            file.seek(begin)
            file.write(data[begin:end])
    held = {shard.id: tuple(ByteRange(begin=begin, end=end) for begin, end in spans)}
    return [(path, shard)], held


def test_of_a_file_with_some_bytes_no_other_is_read(tmp_path):
    """P3: where nothing was fetched there are zeros, which are nobody's tensor."""
    _, data, _ = segments()[0]
    begin = header_length(data)
    row_bytes = 4 * 2 * 3
    with open_files(*parts_of_one(tmp_path, (0, begin + row_bytes))) as reader:
        assert torch.equal(FULL[:1, :2], reader.tensor("w", Box((0, 0, 0), (1, 2, 3))))
        target = torch.full((2, 2, 3), -1.0)
        with pytest.raises(NotReadyError, match="'w' were not fetched"):
            reader.read([Want(target, "w", Box((0, 0, 0), (2, 2, 3)))])
    assert torch.equal(torch.full((2, 2, 3), -1.0), target)


def test_a_header_that_was_not_fetched_whole_is_not_read(tmp_path):
    """A rank that was told of a shorter one: it fetches the others, as for a tensor."""
    _, data, _ = segments()[0]
    with pytest.raises(NotReadyError, match="the header of r1/1/1/0/0 was not fetched"):
        open_files(*parts_of_one(tmp_path, (0, 64), (header_length(data), len(data))))


def one_file(folder, *specs, rank=0, step=1):
    """A segment with these tensors, all spaces, in a file."""
    number = ShardId("r1", step, 1, rank)
    identity = SegmentIdentity(id=number, job="j", world_size=2, plan_hash="p")
    template = header_template(identity, specs)
    data = template.fill(step=step, generation=1, parent=None).ljust(template.length_bytes)
    path = folder / f"{rank}.seg"
    path.write_bytes(data)
    shard = Shard(
        id=number, job="j", world_size=2, plan_hash="p",
        length_bytes=len(data), root_digest=root_digest(len(data), part_digests(memoryview(data))),
    )  # fmt: skip
    return path, shard


W = TensorSpec(fqn="w", dtype="F32", shape=(2, 3), box=Box((0, 0), (1, 3)))


@pytest.mark.parametrize("change", [{"dtype": "I32"}, {"shape": (3, 3)}], ids=str)
def test_segments_that_disagree_about_a_tensor_are_not_read(tmp_path, change):
    files = [one_file(tmp_path, W), one_file(tmp_path, W._replace(**change), rank=1)]

    with pytest.raises(ManifestError, match="disagree about tensor 'w'"):
        open_files(files)


def test_segments_of_two_checkpoints_are_not_read_as_one(tmp_path):
    files = [one_file(tmp_path, W), one_file(tmp_path, W, rank=1, step=2)]

    with pytest.raises(InvalidRequestError, match="2 segments are not of one checkpoint"):
        open_files(files)


def test_a_checkpoint_is_whole_if_it_has_a_segment_of_each_rank(tmp_path):
    files = [one_file(tmp_path, W, rank=rank) for rank in range(2)]
    for count in (1, 2):
        with open_files(files[:count]) as reader:
            assert (count == 2) is reader.is_whole


def test_of_an_empty_tensor_no_bytes_have_to_be_there(tmp_path):
    """Nobody has asked for any: it lies behind what was not fetched."""
    path, shard = one_file(
        tmp_path, W, TensorSpec(fqn="none", dtype="U8", shape=(0,), box=whole((0,)))
    )
    held = {shard.id: (ByteRange(begin=0, end=header_length(path.read_bytes())),)}
    with open_files([(path, shard)], held) as reader:
        assert (0,) == reader.tensor("none").shape


@pytest.mark.parametrize("length", [0, 8])
def test_a_file_of_another_length_is_not_read_and_not_left_open(tmp_path, length):
    path, shard = one_file(tmp_path, W)
    path.write_bytes(bytes(length))

    with pytest.raises(TruncatedShardError, match=f"has {length} bytes, not"):
        open_files([(path, shard)])


def test_a_file_of_another_job_is_not_read(tmp_path):
    path, shard = one_file(tmp_path, W)

    with pytest.raises(ManifestError, match="job differ"):
        open_files([(path, replace(shard, job="k"))])


@pytest.mark.parametrize(("dtype", "length"), [("I8", 4), ("U8", 5)])
def test_what_is_no_text_is_not_taken_for_one(tmp_path, monkeypatch, dtype, length):
    monkeypatch.setattr(readers, "BLOB_BYTES_MAX", 4)
    text = TensorSpec(fqn=blob_name(0), dtype=dtype, shape=(length,), box=whole((length,)))
    with (
        open_files([one_file(tmp_path, text)]) as reader,
        pytest.raises(ManifestError, match="is no text of at most 4 bytes"),
    ):
        reader.blob(0)


def stored():
    """A store with the checkpoint, its folder and its manifest."""
    folder, made = CheckpointFolder(MemoryStore()), segments()
    for shard, data, digests in made:
        folder.store.put(folder.segment_key(shard), data)
        sidecar = sidecars.encode(sidecars.Sidecar(shard=shard, digests=digests))
        folder.store.put(folder.sidecar_key(shard), sidecar)
    manifest = Manifest(
        checkpoint=CheckpointId("r1", 1, 1), job="j", world_size=len(CUTS),
        shards=tuple(shard for shard, _, _ in made), write_id="0" * 32, created_at_s=1.0,
    )  # fmt: skip
    return folder, manifest


@contextmanager
def from_store(tmp_path):
    del tmp_path
    with open_folder(*stored()) as reader:
        yield reader


@pytest.mark.parametrize("opened", [mapped, from_store])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.int32, torch.int16, torch.bfloat16], ids=str
)
def test_values_are_converted_on_their_way_where_that_is_wanted(tmp_path, opened, dtype):
    """Into targets in one row and others, from one piece and from several."""
    boxes = [Box((1, 0, 0), (2, 1, 3)), Box((2, 1, 0), (4, 3, 2)), Box((4, 0, 0), (3, 5, 3))]
    with opened(tmp_path) as reader:
        turned = [torch.empty(*reversed(box.lengths), dtype=dtype) for box in boxes]
        targets = [tensor.permute(2, 1, 0) for tensor in turned]
        targets[2] = targets[2].contiguous()
        reader.read([Want(t, "w", b, converted=True) for t, b in zip(targets, boxes, strict=True)])

    for target, box in zip(targets, boxes, strict=True):
        assert torch.equal(FULL[box.within(whole(SHAPE))].to(dtype), target)


@pytest.mark.parametrize("opened", [mapped, from_store])
def test_any_region_is_read_into_any_target(tmp_path, opened):
    """Regions inside one piece, over several, empty, and into memory that lies otherwise."""
    draw = random.Random(7)
    with opened(tmp_path) as reader:
        wants = []
        for _ in range(60):
            offsets = tuple(draw.randrange(n) for n in SHAPE)
            lengths = tuple(draw.randrange(n - o + 1) for n, o in zip(SHAPE, offsets, strict=True))
            target = torch.full(tuple(reversed(lengths)), -1.0)
            target = target.permute(2, 1, 0) if draw.random() < 0.5 else torch.empty(lengths)
            wants.append(Want(target, "w", Box(offsets, lengths)))
        reader.read(wants)

        for want in wants:
            assert torch.equal(FULL[want.box.within(whole(SHAPE))], want.target), want.box
        assert torch.equal(FULL, reader.tensor("w"))
        assert {"w": SHAPE} == {name: spec.shape for name, spec in reader.specs().items()}
        assert [("w", True)] == [(n, torch.equal(FULL, t)) for n, t in reader.tensors(["w"])]


@pytest.mark.parametrize("opened", [mapped, from_store])
@pytest.mark.parametrize(
    ("bad", "error", "text"),
    [
        (Want(torch.zeros(2), "v", whole((2,))), NotReadyError, "'v'"),
        (Want(torch.zeros(2), "w", whole(SHAPE)), InvalidRequestError, "'w'"),
        (Want(torch.zeros(SHAPE).int(), "w", whole(SHAPE)), InvalidRequestError, "int32"),
        (Want(torch.zeros(SHAPE, device="meta"), "w", whole(SHAPE)), InvalidRequestError, "meta"),
    ],
    ids=["unknown", "shape", "dtype", "meta"],
)
def test_what_cannot_be_read_is_refused_before_the_first_byte(tmp_path, opened, bad, error, text):
    target = torch.full(SHAPE, -1.0)
    with opened(tmp_path) as reader, pytest.raises(error, match=text):
        reader.read([Want(target, "w", whole(SHAPE)), bad])

    assert torch.equal(torch.full(SHAPE, -1.0), target)


def test_a_region_of_rows_reads_no_other_parts(monkeypatch):
    """What one rank needs of a big tensor costs its own parts."""
    folder, manifest = stored()
    read = []
    plain = CheckpointFolder.fetch_part
    monkeypatch.setattr(
        CheckpointFolder,
        "fetch_part",
        lambda *args: (read.append(args[1].shard.id.rank), plain(*args)),
    )
    with open_folder(folder, manifest) as reader:
        reader.tensor("w", Box((4, 0, 0), (2, 5, 3)))

    assert {2} == set(read)


def parts_apart():
    """A folder with one segment: ``a`` ends within part 1, ``none`` is empty, ``b`` follows."""
    number, sizes = ShardId("r1", 1, 1, 0), {"a": PART_BYTES + 5, "none": 0, "b": PART_BYTES}
    specs = [
        TensorSpec(fqn=name, dtype="U8", shape=(size,), box=whole((size,)))
        for name, size in sizes.items()
    ]
    identity = SegmentIdentity(id=number, job="j", world_size=1, plan_hash="p")
    template = header_template(identity, specs)
    data = template.fill(step=1, generation=1, parent=None).ljust(template.length_bytes)
    digests = tuple(part_digests(memoryview(data)))
    shard = Shard(
        id=number, job="j", world_size=1, plan_hash="p",
        length_bytes=len(data), root_digest=root_digest(len(data), digests),
    )  # fmt: skip
    folder = CheckpointFolder(MemoryStore())
    folder.store.put(folder.segment_key(shard), data)
    sidecar = sidecars.encode(sidecars.Sidecar(shard=shard, digests=digests))
    folder.store.put(folder.sidecar_key(shard), sidecar)
    return folder, Manifest(
        checkpoint=number.checkpoint, job="j", world_size=1, shards=(shard,),
        write_id="0" * 32, created_at_s=1.0,
    )  # fmt: skip


def _twice(reader):
    full = {name: spec.box for name, spec in reader.specs().items()}
    names = ("a", "b", "a", "none")
    reader.read([Want(torch.empty(full[n].lengths).byte(), n, full[n]) for n in names])


def _inside(reader):
    """A region ends in an earlier part than one that begins with it; who asks has no order."""
    asked = (("b", PART_BYTES), ("a", PART_BYTES + 5), ("a", 5), ("a", PART_BYTES + 5))
    wants = [Want(torch.zeros(n, dtype=torch.uint8), name, whole((n,))) for name, n in asked]
    reader.read(wants)

    assert all(want.target.eq(ord(" ")).all() for want in wants)


@pytest.mark.parametrize(
    "ask",
    [
        _twice, _inside,
        lambda reader: list(reader.tensors(["none", "a", "b"])),
        lambda reader: reader.tensor("b"),
    ],
    ids=["twice", "inside", "empty", "behind the header"],
)  # fmt: skip
def test_what_is_announced_is_what_is_asked_for(monkeypatch, ask):
    """A part that nobody asks for stays first in line, and nothing more is fetched ahead."""
    announced, asked = [], []

    class Watched(VerifiedParts):
        def announce(self, parts):
            announced.extend(made := list(parts))
            super().announce(made)

        def get(self, file, number):
            asked.append((file, number))
            return super().get(file, number)

    monkeypatch.setattr(folders, "VerifiedParts", Watched)
    with open_folder(*parts_apart()) as reader:
        ask(reader)

    assert [key for key, _ in itertools.groupby(asked)] == announced


def test_buffers_are_used_again_whatever_part_they_had():
    """A short one is given to no other part, and what failed has none."""
    folder, manifest = parts_apart()
    [shard] = manifest.shards
    key = folder.segment_key(shard)
    data = bytearray(folder.store.get(key, length_bytes_max=shard.length_bytes))
    data[PART_BYTES] ^= 1
    folder.store.put(key, bytes(data))
    with VerifiedParts(folder, manifest.shards, lambda: None, window=2, ahead=1) as parts:
        for number in (0, 2, 1, 0, 2, 0, 1, 2):
            if number == 1:
                with pytest.raises(DigestMismatchError, match="part 1"):
                    parts.get(0, number)
            else:
                begin = number * PART_BYTES
                assert data[begin : begin + PART_BYTES] == parts.get(0, number)


def test_a_header_that_is_not_the_one_that_was_hashed_is_no_header(monkeypatch):
    """P3: headers are read first and unverified; nothing they say is used before it is checked."""
    folder, manifest = stored()
    plain = CheckpointFolder.head

    def forged(self, shard):
        return plain(self, shard).replace(b'"DCP_VERSION":"1.0"', b'"DCP_VERSION":"9.9"')

    monkeypatch.setattr(CheckpointFolder, "head", forged)
    with open_folder(folder, manifest) as reader, pytest.raises(ManifestError, match="changed"):
        reader.tensor("w")


def test_a_header_of_another_job_is_refused_before_anything_is_read(monkeypatch):
    folder, manifest = stored()
    plain = CheckpointFolder.head
    monkeypatch.setattr(
        CheckpointFolder,
        "head",
        lambda *args: plain(*args).replace(b'"holdfast.job":"j"', b'"holdfast.job":"k"'),
    )
    with pytest.raises(ManifestError, match="job differ"):
        open_folder(folder, manifest)


def test_a_damaged_part_is_named():
    folder, manifest = stored()
    key = folder.segment_key(manifest.shards[1])
    data = bytearray(folder.store.get(key, length_bytes_max=1 << 20))
    data[-1] ^= 1
    folder.store.put(key, bytes(data))
    with (
        open_folder(folder, manifest) as reader,
        pytest.raises(DigestMismatchError, match="part 0"),
    ):
        reader.tensor("w")


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"id": ShardId("r2", 1, 1, 0)}, "shard"),
        ({"id": ShardId("r1", 2, 1, 0)}, "shard"),
        ({"id": ShardId("r1", 1, 2, 0)}, "shard"),
        ({"id": ShardId("r1", 1, 1, 1)}, "shard"),
        ({"id": ShardId("r1", 1, 1, 0, 1)}, "shard"),
        ({"job": "k"}, "job"),
        ({"world_size": 4}, "world size"),
        ({"plan_hash": "q"}, "plan hash"),
        ({"length_bytes": 1}, "length"),
    ],
    ids=str,
)
def test_a_header_is_that_of_its_shard_in_every_field(changes, what):
    shard, data, _ = segments()[0]
    header = parse_header(data, len(data))
    header.expect(shard)
    with pytest.raises(ManifestError, match=f"should: {what} differ"):
        header.expect(replace(shard, **changes))


def test_views_of_arrays_are_not_needed_after_close(tmp_path):
    with mapped(tmp_path) as reader:
        held = reader.tensor("w")

    assert np.array_equal(FULL.numpy(), held.numpy())
