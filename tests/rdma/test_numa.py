"""Where the pages of a slot come to lie, on two processors with memory of their own."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from holdfast.core.slot_names import SlotName, SlotState
from holdfast_services.agent.arena import Arena
from holdfast_services.agent.numa import memory_nodes, on_node_of

PAGES = 256
NAME = SlotName("s1", 0, SlotState.FREE)
MOVE_PAGES = 279  # of x86-64: asked for no nodes, it says where pages are


@pytest.fixture
def rank():
    """A process that is bound to the second processor."""
    made = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    os.sched_setaffinity(made.pid, {1})
    yield made.pid
    made.kill()
    made.communicate()


@pytest.fixture(autouse=True)
def _on_the_first_processor():
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {0})
    yield
    os.sched_setaffinity(0, before)


def nodes_of(memory: mmap.mmap) -> Counter[int]:
    """Return how many pages of a mapping lie on which node."""
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    places = [begin + page * mmap.PAGESIZE for page in range(PAGES)]
    said = (ctypes.c_int * PAGES)()
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    assert 0 == syscall(
        MOVE_PAGES, 0, ctypes.c_ulong(PAGES), (ctypes.c_void_p * PAGES)(*places), None, said, 0
    )
    return Counter(said)


def test_pages_lie_where_the_agents_thread_allocates_them_whoever_writes_first():
    """So a slot that was made anywhere is far from a rank of another node."""
    memory = os.open("/dev/shm/plain", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(memory, 0, PAGES * mmap.PAGESIZE)
    os.sched_setaffinity(0, {1})
    mapped = mmap.mmap(memory, PAGES * mmap.PAGESIZE)
    mapped[:] = bytes(len(mapped))

    assert {0: frozenset({0}), 1: frozenset({1})} == memory_nodes()
    assert Counter({0: PAGES}) == nodes_of(mapped)
    Path("/dev/shm/plain").unlink()


def test_a_slot_lies_on_the_node_of_the_rank_that_it_is_made_for(rank):
    arena = Arena(Path("/dev/shm/arena"), 1 << 24)
    with on_node_of(rank):
        arena.create(NAME, PAGES * mmap.PAGESIZE)

    assert {0} == os.sched_getaffinity(0)
    assert Counter({1: PAGES}) == nodes_of(arena.file("s1").map)
    arena.close()
