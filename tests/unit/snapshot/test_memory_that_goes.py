"""Memory that is freed, or lies elsewhere, between a save and its copy in the background."""

from __future__ import annotations

import threading

import torch
from tests.unit.snapshot.test_engine import begin, trained
from tests.unit.state import worlds


def test_memory_that_is_freed_before_it_is_copied_costs_the_save_and_not_the_process(tmp_path):
    """Such as by another thread, or by FSDP between forward and backward."""
    model, _, state = trained()
    hold = threading.Event()
    engine, plan, _, snapshot, done = begin(tmp_path, state, hold=hold)
    storage = model[0].weight.untyped_storage()
    length_bytes = storage.nbytes()
    storage.resize_(0)
    hold.set()
    assert done.wait(worlds.WAIT_S)
    assert engine.close(worlds.WAIT_S)

    assert snapshot.abandoned
    assert "memory of tensor 'm.0.weight' was freed" in snapshot.reason
    storage.resize_(length_bytes)
    assert not plan.is_current()
    assert worlds.plan_of(plan.capture).is_current()


def test_memory_that_has_moved_is_copied_from_where_it_is(tmp_path):
    model, _, state = trained()
    hold = threading.Event()
    engine, plan, buffer, snapshot, done = begin(tmp_path, state, hold=hold)
    storage = model[0].weight.untyped_storage()
    before, address = model[0].weight.detach().clone(), storage.data_ptr()
    kept = [storage.resize_(storage.nbytes() + size) for size in (1 << 20, 1 << 21)]
    assert address != kept[-1].data_ptr()
    hold.set()
    assert done.wait(worlds.WAIT_S)
    assert engine.close(worlds.WAIT_S)

    assert snapshot.copied
    index = [p.entry.spec.fqn for p in plan.deferred].index("m.0.weight")
    assert torch.equal(before, buffer.deferred(plan)[index])
