"""Where slots lie in these tests: where those of an arena do."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def folder():
    """A folder on a tmpfs: of a file on a disk the kernel lets no driver keep pages to write to."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="hf-gpu-") as name:
        yield Path(name)
