"""What the copy thread does when a copy fails in a way that nobody has foreseen."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

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
