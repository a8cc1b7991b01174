"""Which object store a stack drains to, and what ``down`` leaves of it."""

from __future__ import annotations

import sqlite3

import pytest

from holdfast.errors import InvalidRequestError, UnavailableError
from holdfast_services.kit.queue.memory import MemoryQueue
from holdfast_services.supervisor import cleanup, store


def test_the_own_folder_is_the_store_unless_another_was_chosen(tmp_path):
    assert store.choose(tmp_path, "") == f"file://{tmp_path}/store"
    assert store.own_folder(tmp_path).stat().st_mode & 0o777 == 0o700


def test_a_choice_is_remembered_until_the_next_one(tmp_path):
    home, other = tmp_path / "home", tmp_path / "other folder"
    home.mkdir()
    other.mkdir()
    chosen = store.choose(home, str(other))

    assert chosen == f"file://{tmp_path}/other%20folder"
    assert not store.own_folder(home).exists()
    assert store.choose(home, "") == store.remembered(home) == chosen
    own = store.own_folder(home).as_uri()
    assert store.choose(home, own) == store.remembered(home) == own


def test_the_own_folder_moves_with_home(tmp_path):
    (tmp_path / "old").mkdir()
    store.choose(tmp_path / "old", "")
    (tmp_path / "old").rename(tmp_path / "new")

    assert store.choose(tmp_path / "new", "") == f"file://{tmp_path}/new/store"


@pytest.mark.parametrize("asked", ["memory:", "ftp://host/x", "file:///nowhere/at/all"])
def test_what_can_be_no_store_is_refused_and_not_remembered(tmp_path, asked):
    with pytest.raises(InvalidRequestError):
        store.choose(tmp_path, asked)

    assert store.remembered(tmp_path) == f"file://{tmp_path}/store"


def test_a_store_that_went_away_does_not_keep_a_stack_from_starting(tmp_path):
    """P4: it was there when it was chosen; now its volume is not mounted."""
    home, volume = tmp_path / "home", tmp_path / "volume"
    home.mkdir()
    volume.mkdir()
    chosen = store.choose(home, str(volume))
    volume.rmdir()

    assert store.choose(home, "") == chosen


def test_scrubs_and_sweeps_are_not_undrained_but_shards_and_manifests_are():
    queue = MemoryQueue(lease_s=30.0)
    queue.offer(["scrub/r/1/1", "orphans/all", "collect/r/1/1"])
    assert cleanup.undrained_count(queue) == 0
    queue.offer(["shard/a", "manifest/r/1/1"])
    queue.claim("w", count_max=5, wait_s=0)

    assert cleanup.undrained_count(queue) == 2


def test_a_queue_that_does_not_answer_counts_as_undrained():
    class Away(MemoryQueue):
        def items_count(self, prefix=""):
            raise UnavailableError("queue does not answer")

    assert cleanup.undrained_count(Away(lease_s=1.0)) == 1


def test_a_catalogue_that_cannot_forget_is_removed_and_that_is_said(tmp_path):
    """P6: what is durable is found again in the store, by the names of the jobs."""
    store.choose(tmp_path, "")
    (store.own_folder(tmp_path) / "object").write_bytes(b"x")
    (tmp_path / "metadata.db").write_bytes(b"this is no database" * 100)
    report = cleanup.clean(tmp_path, everything=False, environ={})

    assert report["catalogue_lost"]
    assert not (tmp_path / "metadata.db").exists()
    assert (store.own_folder(tmp_path) / "object").exists()
    assert report["store"] == f"file://{tmp_path}/store"


def test_everything_is_catalogue_and_own_store_but_never_a_store_elsewhere(tmp_path):
    home, other = tmp_path / "home", tmp_path / "other"
    home.mkdir()
    other.mkdir()
    store.choose(home, "")
    (store.own_folder(home) / "object").write_bytes(b"x" * 8192)
    sqlite3.connect(home / "metadata.db").close()
    chosen = store.choose(home, str(other))
    (other / "object").write_bytes(b"x")
    report = cleanup.clean(home, everything=True, environ={})

    assert list(home.iterdir()) == []
    assert report["store_freed_bytes"] >= 8192
    assert report["store"] == chosen
    assert (other / "object").exists()
