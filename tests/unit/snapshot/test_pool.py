"""Leased slots in a trainer: which are mapped, kept and let go, with real files."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.state import worlds

from holdfast import locks
from holdfast.core.session import SlotLease
from holdfast.snapshot.buffer import SlotBuffer
from holdfast.snapshot.pool import SlotPool

KIB = 1024


@pytest.fixture
def pool(tmp_path):
    made = SlotPool(tmp_path)
    yield made
    made.reset()


def lease(arena, slot, incarnation, plan="p"):
    """Make the file that an agent would lease."""
    (arena / f"{slot}.{incarnation}.open").write_bytes(bytes(KIB))
    return SlotLease(slot=slot, incarnation=incarnation, length_bytes=KIB, plan_hash=plan)


def test_slots_of_a_plan_made_again_stay(pool, tmp_path):
    """Its tensors are others, its layout is not: the agent leases nothing new for it."""
    pool.offer([lease(tmp_path, "s1", 1)])
    pool.reset(keep="p")

    assert pool.acquire("p", 0.0) is not None


def test_slots_of_another_plan_are_let_go(pool, tmp_path):
    pool.offer([lease(tmp_path, "s1", 1)])
    pool.reset(keep="q")

    assert pool.acquire("p", 0.0) is None


def test_an_arena_that_begins_to_count_anew_is_written(pool, tmp_path):
    """The agent came back with an empty arena: its first incarnations are lower than known ones."""
    pool.offer([lease(tmp_path, "s1", 7)])
    (tmp_path / "s1.7.open").unlink()
    pool.offer([])
    pool.offer([lease(tmp_path, "s1", 1)])
    buffer = pool.acquire("p", 0.0)

    assert buffer is not None
    buffer.close_slot()
    assert (tmp_path / "s1.1.closed").exists()


def test_a_closed_slot_still_listed_is_not_mapped_again(pool, tmp_path, caplog):
    listed = lease(tmp_path, "s1", 1)
    pool.offer([listed])
    pool.acquire("p", 0.0).close_slot()
    pool.offer([listed])

    assert pool.acquire("p", 0.0) is None
    assert not caplog.records


def leased_again(pool, arena):
    """Return the lease of a slot that was written, closed, freed and leased anew."""
    pool.offer([lease(arena, "s1", 1)])
    pool.acquire("p", 0.0).close_slot()
    (arena / "s1.1.closed").rename(arena / "s1.2.open")
    return SlotLease(slot="s1", incarnation=2, length_bytes=KIB, plan_hash="p")


def open_files(arena):
    return [link for link in Path("/proc/self/fd").iterdir() if arena in link.resolve().parents]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("way", ["reset", "close"])
def test_a_slot_that_is_let_go_while_it_is_mapped_stays_let_go(
    pool, tmp_path, caplog, monkeypatch, known, way
):
    """S2: the training thread let go of a file that the watch thread was about to lock.

    The descriptor was closed under it, and might by then have been that of another file.
    """
    if known:
        again = leased_again(pool, tmp_path)
        name, meanwhile = "reuse", SlotBuffer.reuse
    else:
        again = lease(tmp_path, "s1", 1)
        name, meanwhile = "open", SlotBuffer.open

    def hook(*args):
        getattr(pool, way)()
        return meanwhile(*args)

    monkeypatch.setattr(SlotBuffer, name, hook)
    pool.offer([again])
    monkeypatch.undo()
    pool.offer([again])

    assert not caplog.records
    assert pool.acquire("p", 0.0) is None
    assert not open_files(tmp_path)


def test_a_slot_of_the_kept_plan_is_mapped_to_the_end(pool, tmp_path, monkeypatch):
    """A plan made again keeps its slots, also one that is just being mapped."""
    again = leased_again(pool, tmp_path)
    reuse = SlotBuffer.reuse

    def hook(*args):
        pool.reset(keep="p")
        return reuse(*args)

    monkeypatch.setattr(SlotBuffer, "reuse", hook)
    pool.offer([again])

    assert pool.acquire("p", 0.0) is not None


def test_nothing_is_mapped_after_the_end(pool, tmp_path):
    """A view that comes late, or leases that the agent has not heard the end of."""
    pool.close()
    pool.offer([lease(tmp_path, "s1", 1)])

    assert not open_files(tmp_path)


def test_a_slot_that_comes_back_after_the_end_is_let_go(pool, tmp_path):
    """Who still read it had a folder that hung; a process that lives on would hold it for ever."""
    pool.offer([lease(tmp_path, "s1", 1)])
    taken = pool.acquire("p", 0.0)
    pool.close()
    pool.put_back(taken)

    assert not open_files(tmp_path)


def test_a_slot_is_locked_until_it_has_the_name_of_one_that_is_closed(tmp_path, monkeypatch):
    """Without a lock it is nobody's: the agent would take it back."""
    seen, release = [], locks.release
    buffer = SlotBuffer.open(tmp_path, worlds.make_slot(tmp_path, "s1", 4096))
    with monkeypatch.context() as watched:
        watched.setattr(locks, "release", lambda fd: (seen.append(names(tmp_path)), release(fd)))
        buffer.close_slot()
    buffer.drop()

    assert [["s1.1.closed"]] == seen


def names(folder):
    return [path.name for path in folder.iterdir()]
