"""What a survey compares to notice a change."""

from __future__ import annotations

import sys
import threading
import time

import torch
from tests.unit.state import worlds
from torch import nn

from holdfast.state.capture import Capture
from holdfast.state.survey import Home, Identity, Survey


def test_a_script_that_lets_memory_of_a_device_go_gets_it_back():
    """Bit for bit; defect A8: sizes are compared there, and no second tensor is kept."""
    weight = nn.Parameter(torch.zeros(3, device="meta"))
    survey = Survey()
    survey.add("w", weight, home=Home.SHARED, deferred=False)
    identity = Identity(survey)

    assert identity.places == []
    assert identity.holds()
    weight.data = torch.zeros(4, device="meta")
    assert not identity.holds()


def test_that_nothing_has_changed_is_seen_without_letting_other_threads_in():
    """Where others want the interpreter's lock, each time it is let go costs a save 5 ms."""
    count, times = 1000, 100
    state = {"m": nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(count)])}
    identity = Identity(Capture(state, rank=0, world_size=1).survey())
    turns, ended = [0], threading.Event()

    def want_the_lock():
        while not ended.is_set():
            turns[0] += 1
            time.sleep(0)

    other = threading.Thread(target=want_the_lock)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # nobody is made to let it go
    other.start()
    try:
        before = turns[0]
        held = all(identity.holds() for _ in range(times))
        after = turns[0]
    finally:
        sys.setswitchinterval(interval_s)
        ended.set()
        other.join(worlds.WAIT_S)

    assert held
    assert before == after
