"""Which files are mapped: sealed slots of this user, of this shard, and no others."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
from tests.integration.persistence.harness import segment

from holdfast.errors import (
    AccessError,
    CheckpointError,
    DigestMismatchError,
    InvalidRequestError,
    ManifestError,
    NotFoundError,
    TruncatedShardError,
    UnavailableError,
)
from holdfast.format.digest import PART_BYTES, part_digests
from holdfast_services.persistence.domain.upload_plan import cut
from holdfast_services.persistence.source import MappedFile


@pytest.fixture
def slot(arena):
    """(path, shard, bytes) of a sealed slot."""
    shard, data = segment(5000)
    path = arena / "s0.1.seg"
    path.write_bytes(data)
    return path, shard, data


def lent(source, shard, data):
    """Return the first part as the source gives it."""
    (part, *_) = cut(shard.length_bytes, part_digests(memoryview(data)), PART_BYTES)
    return bytes(next(source.part(part, threading.Event())))


def test_a_sealed_slot_is_mapped_and_hashed(slot):
    path, shard, data = slot
    source = MappedFile(str(path), shard)

    assert bytes(data) == lent(source, shard, data)
    source.check()
    source.close()


def test_bytes_that_do_not_match_are_corruption_while_the_slot_stands(slot):
    """P3: and no corruption at all once the slot has been given another name."""
    path, shard, data = slot
    source = MappedFile(str(path), shard)
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01" if data[-1] != 1 else b"\x02")

    with pytest.raises(DigestMismatchError):
        lent(source, shard, data)
    path.rename(path.with_name("s0.1.free"))
    with pytest.raises(NotFoundError):
        lent(source, shard, data)
    source.close()


def test_a_slot_that_another_file_replaced_is_gone(slot):
    path, shard, data = slot
    source = MappedFile(str(path), shard)
    path.unlink()
    path.write_bytes(data)

    with pytest.raises(NotFoundError):
        source.check()
    source.close()


def link(path):
    path.rename(path.with_name("s9.1.seg"))
    path.symlink_to(path.with_name("s9.1.seg"))


def pipe(path):
    path.unlink()
    os.mkfifo(path)


REFUSED = {
    "not there": (lambda path: path.unlink(), NotFoundError),
    "a link": (link, AccessError),
    "no plain file": (pipe, AccessError),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"x"), TruncatedShardError),
    "empty": (lambda path: path.write_bytes(b""), TruncatedShardError),
    "another shard": (
        lambda path: path.write_bytes(segment(5000, rank=0, step=11)[1]),
        ManifestError,
    ),
    "no segment": (lambda path: path.write_bytes(bytes(path.stat().st_size)), CheckpointError),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_file_that_is_not_the_shards_slot_is_not_mapped(slot, what):
    """P9: then the bytes are fetched from the agent instead."""
    path, shard, _ = slot
    change, error = REFUSED[what]
    change(path)

    with pytest.raises(error):
        MappedFile(str(path), shard)


def descriptors_of(path):
    """Return how many descriptors this process has of a file."""
    return sum(link.resolve() == path for link in Path("/proc/self/fd").iterdir())


def refuse(*arguments, **options):
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


@pytest.mark.parametrize("call", ["mmap.mmap", "os.pread"])
def test_a_file_that_cannot_be_mapped_now_costs_no_descriptor(slot, monkeypatch, call):
    """The bytes are fetched from the agent instead; a worker does so for weeks."""
    path, shard, data = slot
    good = MappedFile(str(path), shard)
    before = descriptors_of(path)
    monkeypatch.setattr(call, refuse)

    with pytest.raises(UnavailableError, match="Cannot allocate memory"):
        MappedFile(str(path), shard)
    assert descriptors_of(path) == before == 1
    if call == "mmap.mmap":
        with pytest.raises(UnavailableError):
            lent(good, shard, data)
    good.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file away needs root")
def test_a_file_of_another_user_is_not_mapped(slot):
    """P9: one trust domain is one uid."""
    path, shard, _ = slot
    os.chown(path, 12345, 12345)

    with pytest.raises(AccessError):
        MappedFile(str(path), shard)


@pytest.mark.parametrize("path", ["/etc/passwd", "s0.1.seg", "", "/a/s0.1.open", "/a/s0.1.seg/"])
def test_a_path_that_is_not_a_slots_is_not_opened(slot, path):
    """P9: no name from a peer becomes a path unchecked."""
    with pytest.raises(InvalidRequestError):
        MappedFile(path, slot[1])
