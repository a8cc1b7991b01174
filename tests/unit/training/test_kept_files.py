"""Files for people: whole or gone, and whose ``.part`` may be deleted (ADR 0081)."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from holdfast.training import kept_files
from holdfast.training.kept_files import KeptFile, delete_left

WRITER = """
import sys, time
from pathlib import Path
from holdfast.training.kept_files import KeptFile
def pieces():
    yield bytes(10)
    print("begun", flush=True)
    time.sleep(600)
KeptFile(Path(sys.argv[1]), 7, 1, 3).write(pieces())
"""


@pytest.fixture
def writer(tmp_path):
    """A process in the middle of ``step-7-attempt-1-rank-3``."""
    with subprocess.Popen([sys.executable, "-c", WRITER, tmp_path], stdout=subprocess.PIPE) as one:
        assert one.stdout.readline()
        yield one
        one.kill()


def test_what_a_killed_process_has_begun_is_deleted_by_another_attempt(tmp_path, writer):
    """While it lives nobody touches it, and other ranks of its own attempt never do."""
    (begun,) = tmp_path.iterdir()
    assert KeptFile(tmp_path, 7, 1, 3).begun == begun

    delete_left(tmp_path, attempt=2)
    assert begun.exists()
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait(30)
    delete_left(tmp_path, attempt=1)
    assert begun.exists()
    delete_left(tmp_path, attempt=2)
    assert not begun.exists()


@pytest.mark.parametrize(
    "name",
    [
        "step-7-attempt-1-rank-0.another.part",
        "step-7-attempt-1-rank-0..part",
        "step-7-attempt-1-rank-0.part",
        "step-7-attempt-1-rank-0.HOST.part.part",
        "mine-step-7-attempt-1-rank-0.HOST.part",
        "step-\u0667-attempt-1-rank-0.HOST.part",
        "step-7-attempt-1-rank-0.HOST.safetensors",
        "thesis.part",
    ],
)
def test_what_has_another_name_is_nobodys_to_delete(tmp_path, name):
    path = tmp_path / name.replace("HOST", socket.gethostname())
    path.write_text("mine")

    delete_left(tmp_path, attempt=2)

    assert path.exists()


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_what_is_no_plain_file_stays_and_nobody_waits_for_it(tmp_path, kind):
    path, thesis = KeptFile(tmp_path, 7, 1, 0).begun, tmp_path / "thesis"
    thesis.write_text("mine")
    if kind == "link":
        path.symlink_to(thesis)
    elif kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)

    delete_left(tmp_path, attempt=2)

    assert path.lstat()
    assert "mine" == thesis.read_text()


def test_a_folder_that_is_not_there_has_nothing_left(tmp_path):
    delete_left(tmp_path / "none", attempt=2)


def test_a_file_that_was_taken_for_left_is_not_named(tmp_path, monkeypatch):
    """Somebody looks at it between its making and its lock: it is said, nothing is half there."""
    file, lock = KeptFile(tmp_path, 7, 1, 0), kept_files.fcntl.flock

    def meanwhile(descriptor, kind):
        other = os.open(file.begun, os.O_RDWR)
        lock(other, kind)
        try:
            lock(descriptor, kind)
        finally:
            os.close(other)

    monkeypatch.setattr(kept_files.fcntl, "flock", meanwhile)
    with pytest.raises(BlockingIOError):
        file.write([b"abc"])

    assert [] == list(tmp_path.iterdir())


def test_a_folder_without_locks_has_its_file_and_what_is_left_there_stays(tmp_path, monkeypatch):
    left = KeptFile(tmp_path, 3, 1, 0).begun
    left.write_text("of one that lives?")

    def refuse(_descriptor, _kind):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(kept_files.fcntl, "flock", refuse)
    delete_left(tmp_path, attempt=2)
    KeptFile(tmp_path, 7, 2, 0).write([b"abc"])

    assert left.exists()
    assert b"abc" == KeptFile(tmp_path, 7, 2, 0).path.read_bytes()


def test_nothing_is_replaced_whatever_kind_it_is(tmp_path):
    """Not a link either that leads nowhere, and not what another one has begun."""
    file = KeptFile(tmp_path, 7, 1, 0)
    file.path.symlink_to("nowhere")
    with pytest.raises(FileExistsError):
        file.write([b"abc"])
    assert [file.path] == list(tmp_path.iterdir())

    file.path.unlink()
    file.begun.write_text("another's")
    with pytest.raises(FileExistsError):
        file.write([b"abc"])
    assert "another's" == file.begun.read_text()
