"""Pages are put in place while other threads go on."""

import ctypes
import errno
import mmap
import os
import sys
import threading
import time

import pytest

from holdfast import pages

LENGTH = 16 << 20
TRIES = 200


@pytest.fixture
def memory(tmp_path):
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(fd, 0, LENGTH)
    yield mmap.mmap(fd, LENGTH)
    os.close(fd)


@pytest.fixture
def turns():
    """How often another thread has had its turn; it gets one only where the lock is let go."""
    counted, over = [0], threading.Event()

    def count():
        while not over.is_set():
            counted[0] += 1
            time.sleep(0)

    before = sys.getswitchinterval()
    other = threading.Thread(target=count)
    other.start()
    sys.setswitchinterval(1000)
    yield counted
    sys.setswitchinterval(before)
    over.set()
    other.join()


@pytest.mark.parametrize("populate", [pages.populate, pages.populate_present])
def test_another_thread_goes_on_meanwhile(memory, turns, populate):
    for _ in range(TRIES):
        before = turns[0]
        populate(memory)
        if turns[0] > before:
            return
        time.sleep(0.001)
    pytest.fail("the interpreter's lock was held")


@pytest.mark.parametrize("populate", [pages.populate, pages.populate_present])
def test_every_page_is_in_place(memory, populate):
    mapped = mmap.mmap(-1, LENGTH)

    populate(mapped)

    assert resident(mapped) == LENGTH // mmap.PAGESIZE


def resident(memory):
    pages_count = len(memory) // mmap.PAGESIZE
    said = (ctypes.c_ubyte * pages_count)()
    first = ctypes.c_char.from_buffer(memory)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    assert 0 == libc.mincore(ctypes.addressof(first), len(memory), said)
    return sum(one & 1 for one in said)


@pytest.mark.parametrize("populate", [pages.populate, pages.populate_present])
def test_an_older_kernel_touches_each_page(monkeypatch, populate):
    def refuse(*_):
        ctypes.set_errno(errno.EINVAL)
        return -1

    monkeypatch.setattr(pages, "_madvise", refuse)
    memory = mmap.mmap(-1, LENGTH)

    populate(memory)

    assert resident(memory) == LENGTH // mmap.PAGESIZE


@pytest.mark.parametrize("populate", [pages.populate, pages.populate_present])
def test_no_memory_is_an_error_and_the_mapping_can_be_closed(monkeypatch, populate):
    def refuse(*_):
        ctypes.set_errno(errno.ENOMEM)
        return -1

    monkeypatch.setattr(pages, "_madvise", refuse)
    with mmap.mmap(-1, mmap.PAGESIZE) as memory, pytest.raises(OSError, match="memory"):
        populate(memory)
