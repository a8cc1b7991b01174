"""P4: what the driver does with a call of ours is no reason for training to stand still."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest
import torch
from tests.late_device import WAIT_S

from holdfast.copying import cuda
from holdfast.copying.cuda import CudaDevice


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    return CudaDevice(0)


def test_a_driver_that_does_not_forget_memory_is_waited_for_no_longer_than_that(
    device, monkeypatch
):
    """It waits for all that the GPU has to do, and training may be what lets go of a slot."""
    answers, done = threading.Event(), threading.Event()

    def unregister(_address):
        assert answers.wait(WAIT_S)
        done.set()

    monkeypatch.setattr(cuda, "UNREGISTER_S_MAX", 0.05)
    monkeypatch.setattr(cuda, "_host_unregister", unregister)
    try:
        with pytest.raises(RuntimeError, match="cuda:0 has not let go of memory in"):
            device.unregister(torch.empty(8, dtype=torch.uint8))
        assert not done.is_set()
    finally:
        answers.set()
        assert done.wait(WAIT_S)


def test_what_the_driver_refuses_is_raised_where_it_was_called(device, monkeypatch):
    def refuse(*_):
        raise RuntimeError("cudaHostUnregister: invalid argument (1)")

    monkeypatch.setattr(cuda, "_host_unregister", refuse)
    with pytest.raises(RuntimeError, match="invalid argument"):
        device.unregister(torch.empty(8, dtype=torch.uint8))
