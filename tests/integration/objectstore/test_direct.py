"""Parts go to a folder past the page cache, whatever their length and alignment."""

from __future__ import annotations

import ctypes
import mmap
import os

import pytest

from holdfast.objectstore import open_store

PART = 6 << 20
LENGTH = 2 * PART + 12_345


@pytest.fixture
def data():
    memory = mmap.mmap(-1, LENGTH)
    memory[:] = os.urandom(LENGTH)
    return memoryview(memory)


def stored(url, data, part_bytes):
    store = open_store(url)
    begun = store.begin("k", LENGTH, part_bytes)
    parts = [
        store.put_part(begun, number, data[begin : begin + part_bytes])
        for number, begin in enumerate(range(0, LENGTH, part_bytes))
    ]
    store.finish(begun, parts)
    return store


@pytest.mark.parametrize("part_bytes", [PART, PART + 4096, PART - 7])
@pytest.mark.parametrize("shift", [0, 1])
def test_what_is_sent_is_what_lies_there_aligned_or_not(tmp_path, data, part_bytes, shift):
    moved = memoryview(bytes(shift) + bytes(data))[shift:] if shift else data
    store = stored(f"file://{tmp_path}", moved, part_bytes)
    found = bytearray(LENGTH)
    store.read_into("k", 0, memoryview(found))

    assert bytes(data) == bytes(found)


def test_whole_blocks_do_not_stay_in_the_page_cache(tmp_path, data):
    """What a training machine reads is not evicted by what it writes."""
    probe = tmp_path / "probe"
    probe.touch()
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"no direct writes on this file system: {error}")
    stored(f"file://{tmp_path}", data, PART)

    assert cached_pages(tmp_path / "k") * mmap.PAGESIZE < PART, "the tail at most"


def cached_pages(path):
    """Return how many pages of a file lie in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        found = (ctypes.c_ubyte * -(-len(mapping) // mmap.PAGESIZE))()
        first = ctypes.c_ubyte.from_buffer(mapping)
        begin, length = ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(mapping))
        assert 0 == libc.mincore(begin, length, found), os.strerror(ctypes.get_errno())
        del first
        return sum(page & 1 for page in found)
