"""A checkpoint that is read while another save takes its place, or while it is removed."""

import os
import shutil
import subprocess
import sys

import pytest
import torch

import holdfast
from holdfast.bucket import holding
from holdfast.bucket.holding import opened, remove
from holdfast.errors import ConflictError, NotFoundError
from holdfast.objectstore.folders import exchange
from holdfast.reading.folder import open_folder


@pytest.fixture
def two(tmp_path):
    """Two checkpoints, whose only tensor is 1 and 2."""
    folders = tmp_path / "one", tmp_path / "other"
    for value, folder in enumerate(folders, 1):
        holdfast.save(folder, {"w": {"w": torch.full((4,), float(value))}})
    return folders


def read(checkpoint):
    with open_folder(checkpoint, checkpoint.manifest()) as reader:
        return float(reader.tensor("rank.0.w.w")[0])


def value_of(folder):
    with opened(str(folder)) as checkpoint:
        return read(checkpoint)


def test_what_takes_the_place_of_a_checkpoint_does_not_change_what_is_read(two):
    one, other = two
    with opened(str(one)) as checkpoint:
        manifest = checkpoint.manifest()
        exchange(other, one)
        remove(other)
        with open_folder(checkpoint, manifest) as reader:
            assert 1.0 == float(reader.tensor("rank.0.w.w")[0])

    assert other.is_dir()
    remove(other)
    assert not other.exists()
    assert 2.0 == value_of(one)


def test_a_load_by_path_goes_on_with_what_it_has_opened(two, monkeypatch):
    """What was put in its place meanwhile is of another save: its bytes read like rot."""
    one, other = two
    reader, state = holdfast.oneshot.open_folder, {"w": {"w": torch.zeros(4)}}

    def open_late(checkpoint, manifest):
        exchange(other, one)
        remove(other)
        return reader(checkpoint, manifest)

    monkeypatch.setattr(holdfast.oneshot, "open_folder", open_late)
    holdfast.load(one, state)

    assert 1.0 == float(state["w"]["w"][0])


def test_what_is_being_removed_is_not_opened_but_what_has_its_place(two, monkeypatch):
    one, other = two
    flock, calls = holding.fcntl.flock, []

    def flock_late(descriptor, kind):
        if not calls:
            calls.append(kind)
            exchange(other, one)
            remove(other)
        flock(descriptor, kind)

    monkeypatch.setattr(holding.fcntl, "flock", flock_late)

    assert 2.0 == value_of(one)
    assert not other.exists()


def test_where_nothing_can_be_locked_it_is_said_what_has_happened(two, monkeypatch):
    def no_locks(descriptor, kind):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(holding.fcntl, "flock", no_locks)
    one, other = two

    def read_late():
        with opened(str(one)) as checkpoint:
            exchange(other, one)
            remove(other)
            read(checkpoint)

    with pytest.raises(ConflictError, match="one was replaced by another save while it was read"):
        read_late()


def test_a_file_that_is_missing_is_called_so_where_nothing_was_replaced(two):
    for path in two[0].glob("*.safetensors"):
        path.unlink()

    with pytest.raises(NotFoundError):
        value_of(two[0])


def test_a_removal_that_is_killed_leaves_no_checkpoint(two, monkeypatch):
    def killed(*_args, **_named):
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        remove(two[0])

    with pytest.raises(NotFoundError, match="no checkpoint"):
        value_of(two[0])


def test_the_lock_of_a_reader_that_was_killed_is_gone(two):
    script = f"""
import os
from holdfast.bucket.holding import opened
with opened({str(two[0])!r}):
    os._exit(0)
"""
    subprocess.run([sys.executable, "-c", script], check=True, env=dict(os.environ), timeout=60)
    remove(two[0])

    assert not two[0].exists()
