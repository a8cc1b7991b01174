"""F8, F31: a slot is registered with a device's driver once, and never unmapped under it."""

from __future__ import annotations

import os

import pytest
from tests.late_device import LateDevice

from holdfast.core.session import SlotLease
from holdfast.snapshot.pool import SlotPool

KIB = 1024


@pytest.fixture
def device():
    made = LateDevice()
    yield made
    assert [] == made.faults


@pytest.fixture
def refusals():
    return []


@pytest.fixture
def pool(tmp_path, device, refusals):
    made = SlotPool(tmp_path, refusals.append)
    made.serve(device)
    yield made
    made.close()


def lease(arena, slot="s1", incarnation=1, *, plan="p", length_bytes=KIB):
    """Make the file that an agent would lease."""
    (arena / f"{slot}.{incarnation}.open").write_bytes(bytes(length_bytes))
    return SlotLease(slot=slot, incarnation=incarnation, length_bytes=length_bytes, plan_hash=plan)


def test_a_slot_is_registered_once_however_often_it_comes_back(pool, device, tmp_path):
    pool.offer([lease(tmp_path)])
    (place,) = device.registered
    for incarnation in (2, 3):
        pool.acquire("p", 0.0).close_slot()
        before = tmp_path / f"s1.{incarnation - 1}.closed"
        before.rename(tmp_path / f"s1.{incarnation}.open")
        again = SlotLease(slot="s1", incarnation=incarnation, length_bytes=KIB, plan_hash="p")
        pool.offer([again])

        assert {place: KIB} == device.registered


@pytest.mark.parametrize("way", ["taken back", "another plan", "closed"])
def test_a_slot_that_is_let_go_is_registered_no_more(pool, device, tmp_path, way):
    pool.offer([lease(tmp_path)])
    assert device.registered
    if way == "taken back":
        pool.offer([])
    elif way == "another plan":
        pool.reset(keep="q")
    else:
        pool.close()

    assert {} == device.registered


def test_slots_of_another_size_are_registered_instead(pool, device, tmp_path):
    """The arena is resized: a plan of another length has slots of its own."""
    pool.offer([lease(tmp_path)])
    pool.reset(keep="q")
    pool.offer([lease(tmp_path, "s2", plan="q", length_bytes=4 * KIB)])

    assert [4 * KIB] == list(device.registered.values())


def test_a_slot_that_is_written_stays_registered_whatever_becomes_of_the_plan(
    pool, device, tmp_path
):
    """Copies may be under way into it."""
    pool.offer([lease(tmp_path)])
    buffer = pool.acquire("p", 0.0)
    pool.reset(keep="q")
    pool.offer([])
    assert device.registered
    pool.put_back(buffer)
    pool.reset(keep="q")

    assert {} == device.registered


def test_a_refusal_is_told_and_the_slot_is_used(pool, device, refusals, tmp_path):
    """Once for each slot: who was refused is not asked again."""
    device.refuse = "cudaHostRegister: out of memory (2)"
    pool.offer([lease(tmp_path)])
    buffer = pool.acquire("p", 0.0)
    buffer.close_slot()
    (tmp_path / "s1.1.closed").rename(tmp_path / "s1.2.open")
    pool.offer([SlotLease(slot="s1", incarnation=2, length_bytes=KIB, plan_hash="p")])

    assert pool.acquire("p", 0.0) is buffer
    assert ["late:0: cudaHostRegister: out of memory (2)"] == refusals


def test_slots_that_were_mapped_before_the_model_moved_are_registered_when_they_come_back(
    tmp_path, device
):
    pool = SlotPool(tmp_path)
    pool.offer([lease(tmp_path)])
    assert {} == device.registered
    pool.serve(device)
    pool.acquire("p", 0.0).close_slot()
    (tmp_path / "s1.1.closed").rename(tmp_path / "s1.2.open")
    pool.offer([SlotLease(slot="s1", incarnation=2, length_bytes=KIB, plan_hash="p")])

    assert [KIB] == list(device.registered.values())
    pool.close()


def test_a_driver_that_fails_to_forget_a_slot_costs_a_line(pool, device, tmp_path, caplog):
    """After an error that ended its context every call fails."""
    pool.offer([lease(tmp_path)])
    device.lose("CUDA error: an illegal memory access was encountered")
    pool.close()

    assert "illegal memory access" in caplog.text


def test_a_fork_leaves_the_registration_to_its_parent(pool, device, tmp_path):
    pool.offer([lease(tmp_path)])
    child = os.fork()
    if child == 0:
        pool.close()
        os._exit(int(bool(device.faults) or not device.registered))

    assert 0 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
