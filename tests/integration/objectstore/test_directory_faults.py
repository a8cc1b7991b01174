"""A folder as a store, when disks are full, links lead astray and processes are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from holdfast.errors import (
    AccessError,
    ExhaustedError,
    InvalidRequestError,
    NotFoundError,
    PreconditionError,
    UnavailableError,
)
from holdfast.objectstore import UPLOAD_PART_BYTES_MIN as PART
from holdfast.objectstore import open_store, uploads
from holdfast.objectstore.directory import DirectoryStore
from holdfast.objectstore.uploads import LEFT_BEHIND_S_MIN

SDK = Path(__file__).parents[3] / "sdk"


@pytest.fixture
def store(tmp_path):
    made = open_store(f"file://{tmp_path}/store", make=True)
    yield made
    made.close()


@pytest.fixture
def small_disk(tmp_path, mounted):
    """A folder with room for two parts."""
    return mounted(tmp_path / "small", f"size={2 * PART + (1 << 20)}")


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_full_disk_is_said_before_the_bytes_are_sent(small_disk):
    """The space of an upload is taken when it begins; what does not fit leaves nothing."""
    store = DirectoryStore(small_disk)
    with pytest.raises(ExhaustedError, match=str(small_disk)):
        store.begin("k", 3 * PART, PART)

    assert [] == files(small_disk)
    begun = store.begin("k", 2 * PART, PART)
    parts = [store.put_part(begun, n, memoryview(bytes(PART))) for n in range(2)]
    with pytest.raises(ExhaustedError, match=str(small_disk)):
        store.put("big", bytes(2 << 20))
    store.finish(begun, parts)
    assert ["k"] == files(small_disk)


def test_an_object_that_does_not_fit_leaves_the_old_one(small_disk):
    store = DirectoryStore(small_disk)
    store.put("k", b"old")
    for if_absent in (False, True):
        with pytest.raises(ExhaustedError):
            store.put("k", bytes(3 * PART), if_absent=if_absent)

    assert b"old" == store.get("k", length_bytes_max=3)
    assert ["k"] == files(small_disk)


def test_a_volume_that_is_not_mounted_is_not_filled(tmp_path):
    store = open_store(f"file://{tmp_path}/volume/store")
    with pytest.raises(NotFoundError, match="volume/store"):
        store.put("k", b"x")

    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("place", "culprit"),
    [("file/below", "file is no folder"), ("dangling", "dangling is no folder"),
     ("/proc/nowhere/x", "/proc/nowhere/x cannot be made")],
)  # fmt: skip
def test_a_place_where_no_folder_can_be_made_is_named(tmp_path, place, culprit):
    """Nobody looked for an object yet, so none is said to be missing."""
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "at" / "all")
    with pytest.raises(InvalidRequestError, match=f"{culprit}.*choose another path"):
        DirectoryStore(tmp_path / place, make=True)


def test_folders_and_files_are_the_owners_alone(store, tmp_path):
    store.put("a/b/k", b"x")
    begun = store.begin("u/k", PART, PART)
    store.finish(begun, [store.put_part(begun, 0, memoryview(bytes(PART)))])
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "store").rglob("*")}

    assert {0o700, 0o600} == modes
    assert 0o700 == (tmp_path / "store").stat().st_mode & 0o777


def test_no_link_leads_out_of_the_store(store, tmp_path):
    """P9: neither a link in place of an object nor one in place of a folder is followed."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    root = tmp_path / "store"
    (root / "link").symlink_to(outside)
    (root / "file").symlink_to(outside / "secret")

    assert [] == list(store.list())
    assert [] == list(store.folders())
    for key in ("link/secret", "file"):
        with pytest.raises((NotFoundError, AccessError)):
            store.get(key, length_bytes_max=10)
    with pytest.raises((PreconditionError, AccessError)):
        store.put("link/new", b"x")
    store.put("file", b"mine")
    store.delete(["link/secret"])
    assert {"secret": b"secret"} == {path.name: path.read_bytes() for path in outside.iterdir()}
    assert b"mine" == store.get("file", length_bytes_max=4)


def test_a_pipe_in_place_of_an_object_is_none(store, tmp_path):
    os.mkfifo(tmp_path / "store" / "pipe")
    with pytest.raises(NotFoundError):
        store.get("pipe", length_bytes_max=10)

    assert [] == list(store.list())


def test_a_key_is_an_object_or_a_folder(store):
    store.put("a/b", b"x")
    with pytest.raises(PreconditionError):
        store.put("a", b"x")
    with pytest.raises(PreconditionError):
        store.put("a/b/c", b"x")

    assert ["a/b"] == [info.key for info in store.list()]


def test_a_folder_that_may_not_be_written_is_no_access(tmp_path, mounted):
    """Read-only by mount, since root writes past permissions."""
    store = DirectoryStore(mounted(tmp_path / "readonly", "ro"))
    for call in (store.check, lambda: store.put("k", b"x"), lambda: store.begin("k", 1, 1)):
        with pytest.raises(AccessError, match="readonly"):
            call()


# -- processes that are killed -----------------------------------------------------------------

WRITER = """
import sys
from holdfast.objectstore import open_store
store, part = open_store(sys.argv[1]), int(sys.argv[2])
begun = store.begin("d/k", 64 * part, part)
for number in range(64):
    store.put_part(begun, number, memoryview(bytes([number])) * 1 if part == 1
                   else memoryview(bytes([number]) * part))
    print(number, flush=True)
"""


def test_parts_of_a_writer_that_was_killed_are_there(store):
    """G10: SIGKILL in the middle of a part; what was said to be written is."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, store.url, str(PART)],
        env={**os.environ, "PYTHONPATH": str(SDK)}, stdout=subprocess.PIPE, text=True,
    ) as writer:  # fmt: skip
        said = [int(writer.stdout.readline()) for _ in range(3)]
        writer.send_signal(signal.SIGKILL)
        said += [int(line) for line in writer.stdout]
    (found,) = store.open_uploads("d/")
    resumed = store.resume(found, 64 * PART, PART)
    held = store.parts(resumed)

    assert set(said) <= set(held)
    assert len(held) < 64
    for number in set(range(64)) - set(held):
        store.put_part(resumed, number, memoryview(bytes([number]) * PART))
    store.finish(resumed, [part for _, part in sorted(store.parts(resumed).items())])
    view = bytearray(PART)
    for number in range(64):
        store.read_into("d/k", number * PART, memoryview(view))
        assert bytes([number]) * PART == view
    assert ["d/k"] == [info.key for info in store.list()]


def test_a_part_that_was_being_replaced_does_not_count(store, tmp_path):
    """The journal says begun before the first byte changes, so a kill between is seen."""
    begun = store.begin("k", 2 * PART, PART)
    store.put_part(begun, 0, memoryview(bytes(PART)))
    last = store.put_part(begun, 1, memoryview(bytes(PART)))
    journal = tmp_path / "store" / uploads.WORK_FOLDER / begun.id / "journal"
    with journal.open("ab") as opened:
        opened.write(b"- 0\n+ 0 torn-of")

    assert {1: last} == store.parts(begun)


def test_what_a_killed_put_left_behind_is_swept_out_when_it_is_old(store, tmp_path):
    work = tmp_path / "store" / uploads.WORK_FOLDER
    work.mkdir()
    old, young = work / f"{'0' * 32}.put", work / f"{'1' * 32}.put"
    for path in (old, young):
        path.write_bytes(b"torn")
    long_ago = time.time() - LEFT_BEHIND_S_MIN - 60
    os.utime(old, (long_ago, long_ago))

    assert [] == list(store.open_uploads())
    assert [young.name] == [path.name for path in work.iterdir()]
    assert [] == list(store.list())


def test_finish_waits_for_parts_being_written_and_no_later_one_gets_in(store, monkeypatch):
    """A late worker's part must not change an object that readers see."""
    monkeypatch.setattr(uploads, "LOCK_S_MAX", 0.2)
    begun = store.begin("k", PART, PART)
    part = store.put_part(begun, 0, memoryview(bytes(PART)))
    entered, leave = threading.Event(), threading.Event()

    def write_slowly(fd, data, begin):
        entered.set()
        assert leave.wait(30)

    with monkeypatch.context() as slow:
        slow.setattr(uploads, "write_all", write_slowly)
        late = threading.Thread(target=store.put_part, args=(begun, 0, memoryview(bytes(PART))))
        late.start()
        assert entered.wait(30)
        with pytest.raises(UnavailableError, match="another process"):
            store.finish(begun, [part])
        leave.set()
        late.join(30)
    with pytest.raises(PreconditionError):
        store.finish(begun, [part])  # it was replaced meanwhile
    store.finish(begun, [store.parts(begun)[0]])

    assert ["k"] == [info.key for info in store.list()]


def test_puts_and_deletes_of_one_folder_get_along(store):
    """A folder goes when its last object does, and comes back for the next."""

    def churn(name):
        for _ in range(100):
            store.put(f"a/b/{name}", b"x")
            store.delete([f"a/b/{name}"])

    threads = [threading.Thread(target=churn, args=(str(n),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert [] == list(store.list())
    store.put("a/b/k", b"x")
    assert ["a/"] == list(store.folders())


def test_a_finish_that_was_killed_after_the_object_appeared_is_finished(store, tmp_path):
    """The rename is the commit; what is left of the upload goes with the repeat."""
    begun = store.begin("d/k", PART, PART)
    part = store.put_part(begun, 0, memoryview(bytes(PART)))
    root = tmp_path / "store"
    (root / "d").mkdir()
    (root / uploads.WORK_FOLDER / begun.id / "data").rename(root / "d" / "k")
    (listed,) = store.open_uploads()
    store.finish(store.resume(listed, PART, PART), [part])

    assert ["d/k"] == files(root)
