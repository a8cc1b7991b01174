"""Files are not overwritten while a script catches up; what it loads has a digest."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path

import pytest
import torch

from holdfast.auto.files import Files
from holdfast.patches import Patches


class Phase:
    """Of a script."""

    counts = True
    muted = False
    told = 0

    def tell(self):
        self.told += 1


@pytest.fixture
def phase():
    return Phase()


@pytest.fixture
def files(phase):
    patches = Patches()
    yield Files(patches, counts=lambda: phase.counts, is_muted=lambda: phase.muted, tell=phase.tell)
    patches.undo()


def test_nothing_is_written_while_it_is_muted_and_then_it_is(files, phase, tmp_path):
    path = tmp_path / "own.pt"
    phase.muted = True
    torch.save(1, path)
    torch.save(1, f=str(path))
    assert not path.exists()
    assert phase.told == 2
    phase.muted = False
    torch.save(1, path)
    assert torch.load(path) == 1


def test_buffers_are_written_always(files, phase):
    phase.muted = True
    buffer = io.BytesIO()
    torch.save(3, buffer)
    buffer.seek(0)
    assert torch.load(buffer) == 3


@pytest.mark.parametrize(
    "move", [os.replace, os.rename, shutil.copy, shutil.copyfile, shutil.copy2, shutil.move]
)
def test_what_was_not_written_is_not_moved(files, phase, tmp_path, move):
    move = getattr(shutil if move.__module__ == "shutil" else os, move.__name__)
    part, own, other = tmp_path / "part", tmp_path / "own", tmp_path / "other"
    own.write_text("before")
    phase.muted = True
    torch.save(1, part)
    move(part, own)
    Path(own).replace(other) if move is os.replace else move(own, other)
    assert own.read_text() == "before"
    assert not other.exists()
    phase.muted = False
    move(own, other)
    assert other.read_text() == "before"


def test_other_files_are_moved_meanwhile(files, phase, tmp_path):
    phase.muted = True
    torch.save(1, tmp_path / "part")
    (tmp_path / "log").write_text("a line")
    (tmp_path / "log").replace(tmp_path / "log.1")
    assert (tmp_path / "log.1").read_text() == "a line"


def test_a_digest_tells_what_was_loaded(tmp_path):
    path, found = tmp_path / "own.pt", []
    for value in (torch.zeros(50_000), torch.zeros(50_000), torch.ones(50_000)):
        torch.save(value, path)
        patches = Patches()
        files = Files(patches, counts=lambda: True, is_muted=bool, tell=bool)
        torch.load(path)
        patches.undo()
        found.append((files.loads, files.loaded))
    assert found[0] == found[1] != found[2]


def test_what_is_loaded_counts_only_when_it_is_to(files, phase, tmp_path):
    torch.save(1, tmp_path / "own.pt")
    phase.counts = False
    torch.load(tmp_path / "own.pt")
    assert (files.loads, files.loaded) == (0, "")


def test_undone_all_is_as_before():
    before = torch.save, torch.load, os.replace, shutil.copy
    patches = Patches()
    Files(patches, counts=bool, is_muted=bool, tell=bool)
    assert torch.save is not before[0]
    patches.undo()
    assert (torch.save, torch.load, os.replace, shutil.copy) == before
