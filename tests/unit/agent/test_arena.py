"""Files of partial slots: memory for their parts and no more, and nothing left of them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from holdfast.core.needs import ByteRange
from holdfast.core.slot_names import SlotName, SlotState
from holdfast.errors import ExhaustedError, NotFoundError
from holdfast_services.agent.arena import Arena

PAGE = 4096
LENGTH = 64 * PAGE
NAME = SlotName("s1", 0, SlotState.PARTIAL)
RANGES = (ByteRange(begin=0, end=8 * PAGE), ByteRange(begin=32 * PAGE, end=40 * PAGE))


@pytest.fixture
def arena(tmp_path):
    made = Arena(tmp_path / "arena", LENGTH)
    yield made
    made.close()


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def left(arena):
    return [path.name for path in arena.folder.iterdir() if path.name != "sessions"]


def test_memory_is_taken_for_the_parts_before_they_come(arena):
    """On a full file system the first byte that has no page kills the agent (SIGBUS)."""
    arena.create_partial(NAME, LENGTH, RANGES)
    info = (arena.folder / NAME.file_name).stat()

    assert info.st_size == LENGTH
    assert 16 * PAGE <= info.st_blocks * 512 < LENGTH


def test_nothing_is_left_of_parts_for_which_there_is_no_room(arena, monkeypatch):
    """It is tried again and again."""
    before, plain = descriptors(), os.posix_fallocate

    def fallocate(fd, begin, length):
        if begin:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        plain(fd, begin, length)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    with pytest.raises(ExhaustedError, match="no room for parts"):
        arena.create_partial(NAME, LENGTH, RANGES)

    assert left(arena) == []
    assert descriptors() == before
    with pytest.raises(NotFoundError):
        arena.file(NAME.slot)


def test_nothing_is_left_of_parts_that_have_served(arena):
    before = descriptors()
    arena.create_partial(NAME, LENGTH, RANGES)

    assert arena.drop(NAME)
    assert left(arena) == []
    assert descriptors() == before
