"""Leased slots in a trainer: which are mapped, kept and let go, with real files."""

from __future__ import annotations

import pytest

from holdfast.core.session import SlotLease
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
