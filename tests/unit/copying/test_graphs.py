"""F8: an optimizer's step that is captured in a graph is replayed without a word to anybody."""

from __future__ import annotations

import threading

import pytest
import torch
from tests.late_device import WAIT_S, LateDevice
from tests.unit.copying.late_training import LateTraining

from holdfast.copying.cuda import CUDA
from holdfast.snapshot.optimizer_gate import Gate


@pytest.fixture
def training(tmp_path):
    made = LateTraining(tmp_path, LateDevice("training first"))
    yield made
    made.close()
    assert [] == made.device.faults


def capture_a_step(training):
    """Have the optimizer step as in a capture: its hooks run, and nothing is queued."""
    training.device.captures = True
    launch, training.device.launch = training.device.launch, lambda *_: None
    try:
        training.optimizer.step()
    finally:
        training.device.launch = launch
        training.device.captures = False
        for kept in training.optimizer.state.values():
            kept["step"].sub_(1)  # what is on the host is not part of a graph


def replay(training):
    """Queue what the step has queued, and call no hook."""
    training.gate.uninstall()
    training.train()


def test_a_replay_finds_the_copy_ended_that_went_on_when_its_step_was_captured(training):
    training.train()
    training.device.sleep()
    snapshot = training.save()
    capturing = threading.Thread(target=capture_a_step, args=(training,))
    capturing.start()
    while not training.gate.blind:
        assert capturing.is_alive()
    assert training.engine.busy, "nothing is proven"
    training.device.wake()
    capturing.join(WAIT_S)
    replay(training)
    training.settle()

    assert snapshot.copied, snapshot.reason
    assert [] == training.wrong(1)
    assert training.gate.waited_s > 0


def test_a_copy_that_hangs_is_given_up_and_not_the_capture(training):
    """P4."""
    training.gate.uninstall()
    training.gate = Gate(training.engine, gate_s_max=0.05, devices=training.device)
    training.train()
    training.device.sleep()
    snapshot = training.save()
    capture_a_step(training)
    training.settle()

    assert "held an optimizer step up" in snapshot.reason


def test_no_save_is_deferred_once_a_step_was_captured(training):
    """Also where hooks were seen to fire before that."""
    optimizers = [training.optimizer]
    training.gate.trusts(optimizers)
    training.train()
    assert training.gate.trusts(optimizers)
    steps_count = training.gate.steps_count
    capture_a_step(training)
    training.train()

    assert not training.gate.trusts(optimizers)
    assert not training.gate.trusts(optimizers)
    assert training.gate.trusts([]), "what is owed to no optimizer needs no gate"
    assert steps_count + 1 == training.gate.steps_count, "a capture is no step"


def test_a_capture_without_a_copy_under_way_waits_for_nothing(training):
    capture_a_step(training)

    assert training.gate.blind
    assert training.gate.waited_s == 0


def test_nothing_of_cuda_is_asked_before_it_is_in_use():
    assert not torch.cuda.is_initialized()
    assert not CUDA.capturing()
