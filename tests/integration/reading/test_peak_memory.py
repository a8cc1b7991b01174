"""What a restore takes beside the state is bounded, wherever from, whatever into, in any order."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from tests.integration.reading.peaks import LOADS, SAVES
from tests.servers.nursery import NURSERY

HERE = Path(__file__).parent
WAIT_S = 480

pytestmark = pytest.mark.timeout(540)


def run(table: str, size: int, folder: Path, logs: Path) -> None:
    environ = {
        "PYTHONPATH": str(HERE.parents[2] / "sdk"), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"
    }  # fmt: skip
    arguments = [[table, str(folder), str(rank), str(size)] for rank in range(size)]
    NURSERY.together(HERE / "peaks.py", arguments, env=environ, folder=logs, timeout_s=WAIT_S)


@pytest.fixture(scope="module")
def folder():
    """Checkpoints in memory: the disk is not what is measured."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="holdfast-test-") as made:
        for size in {size for size, _ in SAVES.values()}:
            run("save", size, Path(made), Path(made))
        yield Path(made)


@pytest.mark.parametrize("size", sorted({size for size, _ in LOADS.values()}))
def test_no_restore_takes_more_than_the_largest_tensor_and_the_window(folder, size, tmp_path):
    """A state of 192 MiB, in tensors of 16: whoever holds some of it twice is seen."""
    run("load", size, folder, tmp_path)
