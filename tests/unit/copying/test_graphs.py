"""F8: an optimizer's step that is captured in a graph is replayed without a word to anybody."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from tests.late_device import WAIT_S, LateDevice
from tests.unit.copying.late_training import LateTraining

from holdfast.copying import cuda
from holdfast.copying.cuda import CUDA, CudaDevice
from holdfast.integrations.dcp import HoldfastStager
from holdfast.snapshot.engine import THREAD_NAME
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


def test_an_explicit_gate_in_a_capture_puts_nothing_into_the_graph(training):
    """An event of a stream that is not captured would end the capture."""
    training.train()
    training.device.finish()
    training.device.sleep()
    snapshot = training.save()
    queued = list(training.device.training.todo)
    training.device.captures = True
    capturing = threading.Thread(target=training.gate.before_update)
    capturing.start()
    while not training.gate.blind:
        assert capturing.is_alive()
    assert queued == list(training.device.training.todo)
    training.device.wake()
    capturing.join(WAIT_S)
    training.device.captures = False

    assert not training.engine.busy
    training.settle()
    assert snapshot.copied


def test_a_gate_sees_what_has_stepped_before_it_and_was_not_captured(training):
    """A graph that was captured before there was a gate says nothing to it either."""
    optimizers = [training.optimizer]
    assert not training.gate.sees(optimizers)
    assert training.gate.sees([])
    training.train()
    assert training.gate.sees(optimizers)
    capture_a_step(training)
    assert not training.gate.sees(optimizers)
    assert not training.gate.sees([])


@pytest.mark.parametrize("defer", [True, False], ids=["deferred", "at once"])
def test_the_thread_that_copies_stands_aside_before_it_asks_for_anything(
    training, defer, monkeypatch
):
    """What it asks of CUDA else ends the capture of another thread; training's mode is its own."""
    asked, check = [], training.device.check

    def look():
        asked.append((threading.current_thread().name, training.device.stands_aside()))
        check()

    training.train()
    with monkeypatch.context() as patched:
        patched.setattr(training.device, "check", look)
        training.save(defer=defer)
        training.settle()

    assert (THREAD_NAME, True) in asked
    assert (THREAD_NAME, False) not in asked
    assert not training.device.stands_aside()


def test_who_asks_for_a_lost_device_waits_for_nothing(training):
    """It is training: what is queued may take long, or never end."""
    training.engine._copiers.of(training.device)
    training.device.sleep()
    training.engine._copiers.mark()

    assert training.engine.lost(training.plan.accelerators) == ""
    assert not training.device.stands_aside()
    training.device.lose("gone")
    assert "gone" in training.engine.lost(training.plan.accelerators)


def test_each_call_into_the_driver_stands_aside_on_its_own_thread(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(
        CudaDevice, "stand_aside", lambda _: calls.append(threading.current_thread().name)
    )
    CudaDevice(0)._call(lambda: calls.append("call"))

    assert ["holdfast-register", "call"] == calls


def test_the_mode_that_is_asked_for_is_the_relaxed_one(monkeypatch):
    """CU_STREAM_CAPTURE_MODE_RELAXED."""
    modes = []
    monkeypatch.setattr(cuda, "_exchange", lambda: lambda mode: modes.append(mode._obj.value))
    CudaDevice(0).stand_aside()

    assert [2] == modes


@pytest.mark.parametrize("name", ["libc.so.6", "libholdfast-has-none.so"])
def test_a_driver_without_that_call_is_done_without(name, monkeypatch):
    """Also a library that stands in for CUDA's, such as those that share GPUs."""
    monkeypatch.setattr(cuda, "_DRIVER", name)
    cuda._exchange.cache_clear()
    try:
        CudaDevice(0).stand_aside()
        assert cuda._exchange() is None
    finally:
        cuda._exchange.cache_clear()


def test_hooks_are_no_part_of_a_compiled_step():
    """Traced, the gate's counter had each step compiled anew, until torch gave up on it.

    To compile here takes 10 s: it is looked whether torch still knows the mark.
    """
    reads = Path(torch.__file__).with_name("_dynamo") / "symbolic_convert.py"

    assert Gate._before_step._torchdynamo_disable
    assert HoldfastStager._note_step._torchdynamo_disable
    assert '"_torchdynamo_disable"' in reads.read_text()
