"""A rank that cannot be started leaves nothing behind in its launcher."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.launcher.ranks import Command, Keeper, RankProcess

WORD_BYTES_MAX = 1 << 17
"""What Linux takes as one word of a command."""


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    keeper = Keeper()
    yield keeper
    keeper.close()


def descriptors_count() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_rank_that_cannot_be_started_leaves_no_descriptor(keeper: Keeper) -> None:
    command = Command(words=("train.py", "x" * WORD_BYTES_MAX), module=False)
    before = descriptors_count()
    for _ in range(3):
        with pytest.raises(OSError, match="too long"):
            RankProcess(command, 0, {}, (), keeper, print)
    assert descriptors_count() == before
