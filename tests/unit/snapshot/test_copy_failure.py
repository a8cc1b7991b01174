"""What the copy thread does when a copy fails in a way that nobody has foreseen."""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from holdfast.copying.copier import HostCopier
from holdfast.errors import PreconditionError
from holdfast.snapshot import plan as plan_rules
from holdfast.snapshot.buffer import SlotBuffer
from holdfast.snapshot.engine import CopyEngine
from holdfast.state.capture import Capture

_SPEC = importlib.util.spec_from_file_location(
    "holdfast_test_worlds", Path(__file__).parents[1] / "state" / "worlds.py"
)
worlds = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(worlds)


class Unforeseen(list):
    """Chunks that cannot be listed."""

    def __iter__(self) -> Iterator[range]:
        raise LookupError("nobody thought of this")


def test_the_gate_opens_again_whatever_a_copy_fails_with(tmp_path):
    """P4, S4: the save is given up, the thread lives on and copies the next one."""
    weight = nn.Parameter(torch.ones(3))
    state = {"m": nn.ParameterList([weight]), "o": torch.optim.SGD([weight])}
    plan = worlds.plan_of(Capture(state, rank=0, world_size=1))
    lease = worlds.make_slot(tmp_path, "s1", plan.length_bytes)
    buffer = SlotBuffer.open(tmp_path, lease)
    done = threading.Event()
    engine = CopyEngine(lambda _: done.set())
    chunks, plan.chunks = plan.chunks, Unforeseen(plan.chunks)
    failed = engine.begin(plan, buffer, step=1, generation=1)

    assert done.wait(worlds.WAIT_S)
    assert "nobody thought of this" in failed.reason
    assert not engine.busy
    done.clear()
    plan.chunks = chunks
    assert engine.begin(plan, buffer, step=2, generation=1).plan is plan
    assert done.wait(worlds.WAIT_S)
    assert engine.close(worlds.WAIT_S)


def test_a_child_that_was_forked_does_not_write_into_the_slot_of_its_parent(tmp_path, monkeypatch):
    """Both have it mapped, and the child has no copy thread."""
    state = {"x": {"t": torch.ones(3)}}
    plan = worlds.plan_of(Capture(state, rank=0, world_size=1))
    lease = worlds.make_slot(tmp_path, "s1", plan.length_bytes)
    buffer = SlotBuffer.open(tmp_path, lease)
    engine = CopyEngine(lambda _: None)
    before = next(tmp_path.glob("s1*")).read_bytes()
    child = os.getpid() + 1
    monkeypatch.setattr(os, "getpid", lambda: child)

    with pytest.raises(PreconditionError, match="forked child"):
        engine.begin(plan, buffer, step=1, generation=1)
    assert next(tmp_path.glob("s1*")).read_bytes() == before


def test_host_memory_is_copied_chunk_by_chunk_also_while_a_step_waits(tmp_path, monkeypatch):
    """A copy that is given up ends with its chunk; what a device copies is queued at once."""
    weights = nn.ParameterList([nn.Parameter(torch.ones(3)) for _ in range(4)])
    state = {"m": weights, "o": torch.optim.SGD(weights.parameters())}
    monkeypatch.setattr(plan_rules, "BATCH_BYTES_MAX", 1)
    plan = worlds.plan_of(Capture(state, rank=0, world_size=1))
    lease = worlds.make_slot(tmp_path, "s1", plan.length_bytes)
    waited, done, calls = threading.Event(), threading.Event(), []
    later = HostCopier.later

    def held(self, targets, sources):
        assert waited.wait(worlds.WAIT_S)
        calls.append(len(targets))
        later(self, targets, sources)

    monkeypatch.setattr(HostCopier, "later", held)
    engine = CopyEngine(lambda _: done.set())
    engine.begin(plan, SlotBuffer.open(tmp_path, lease), step=1, generation=1)
    assert not engine.let_pass(0.01)
    waited.set()

    assert done.wait(worlds.WAIT_S)
    assert [1, 1, 1, 1] == calls
    assert engine.close(worlds.WAIT_S)
