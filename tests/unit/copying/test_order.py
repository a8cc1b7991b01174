"""F8, P4: what a save copies beside a device's work is the state of its step, bit for bit.

No device is needed: ``late_device`` does its work as late, and in as bad an order, as one may.
"""

from __future__ import annotations

import threading

import pytest
import torch
from tests.late_device import WAIT_S, LateDevice
from tests.unit.copying.late_training import LateTraining, start_values

from holdfast.copying import flight
from holdfast.copying.batches import cut
from holdfast.copying.copier import HostCopier
from holdfast.copying.stream_copier import StreamCopier
from holdfast.snapshot import engine
from holdfast.snapshot.engine import Snapshot

ORDERS = ("training first", "copies first", "at random")


@pytest.fixture
def train(tmp_path):
    made = []

    def start(order="training first", **more):
        training = LateTraining(tmp_path, LateDevice(order), **more)
        made.append(training)
        return training

    yield start
    for training in made:
        training.close()
        assert [] == training.device.faults


def train_and_save(training, *, defer=True, steps=3):
    """Save each step while the device lies far behind; return what is wrong, by step."""
    for _ in range(steps):
        training.device.sleep()
        training.train()
        snapshot = training.save(defer=defer)
        swap_for_evaluation(training)
        training.train()
        training.settle()
        assert snapshot.copied, snapshot.reason
    return {step: training.wrong(step) for step in training.saved if training.wrong(step)}


def swap_for_evaluation(training):
    """Give a parameter other memory, so that what is being copied is let go."""
    weight = training.model.plain
    fresh = training.device.place(torch.zeros_like(weight.detach()))
    source = training.device._raw(weight.data)
    training.device.launch(lambda raw: raw.copy_(source), fresh)
    weight.data = fresh


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
@pytest.mark.parametrize("defer", [True, False], ids=["deferred", "at once"])
@pytest.mark.parametrize("order", ORDERS)
def test_what_is_saved_is_the_state_of_the_step(train, order, defer, pinned):
    training = train(order, pinned=pinned)
    if not pinned:
        training.device.sleep = lambda: None  # who copies by pageable memory waits for the device

    assert {} == train_and_save(training, defer=defer)
    assert [1, 3, 5] == sorted(training.saved)


def test_every_kind_of_tensor_on_the_device_is_deferred(train):
    """No elements, one, odd many, turned, with gaps: none is copied while the caller waits."""
    plan = train().plan
    deferred = {piece.entry.spec.fqn for piece in plan.deferred}

    assert {f"m.{name}" for name in start_values()} <= deferred
    assert {"m.mean"} == {piece.entry.spec.fqn for piece in plan.eager}


def test_the_host_waits_for_no_byte(train):
    """The device does nothing, and training goes on to its next step."""
    training = train()
    training.device.sleep()
    training.train()
    snapshot = training.save()
    training.train()
    assert not snapshot.copied
    assert not training.ended.is_set()
    training.settle()

    assert [] == training.wrong(1)


def test_a_second_stream_of_training_waits_too(train):
    """Each optimizer's own stream is held, whichever stepped before it."""
    training = train()
    other = training.device.new_stream()
    training.device.sleep()
    training.train()
    training.save()
    with training.device.use(other):
        training.train()
    training.settle()

    assert [] == training.wrong(1)


def copy_thread_waits(monkeypatch, copier):
    """Have the copy thread do nothing until the event that is returned is set."""
    come, later = threading.Event(), copier.later

    def slow(self, *pair):
        assert come.wait(WAIT_S)
        later(self, *pair)

    monkeypatch.setattr(copier, "later", slow)
    return come


COPIERS = pytest.mark.parametrize("copier", [StreamCopier, HostCopier])


@COPIERS
def test_a_step_waits_for_the_copy_thread(train, monkeypatch, copier):
    """Until all is queued: an event before that says nothing; and for what is in host memory."""
    training = train()
    come = copy_thread_waits(monkeypatch, copier)
    training.device.sleep()
    training.train()
    training.save()
    stepping = threading.Thread(target=training.train)
    stepping.start()
    assert training.engine.busy
    come.set()
    stepping.join(WAIT_S)
    training.settle()

    assert [] == training.wrong(1)


@COPIERS
def test_a_step_that_does_not_wait_for_the_copy_thread_shows(train, monkeypatch, copier):
    """That the test above can fail."""
    training = train()
    come = copy_thread_waits(monkeypatch, copier)
    training.device.sleep()
    training.train()
    training.save()
    training.engine._passable.wait = lambda _: True
    training.train()
    come.set()
    training.settle()

    assert training.wrong(1)


def test_bytes_in_flight_are_bounded_until_a_step_comes(train, monkeypatch):
    """Then all is queued, and the step is not held up by the bound."""
    monkeypatch.setattr(StreamCopier.__init__, "__defaults__", (64,))
    training = train()
    training.plan.chunks = [
        run._replace(begin=at, end=at + 1)
        for run in training.plan.chunks
        for at in range(run.begin, run.end)
    ]
    training.device.sleep()
    training.train()
    full = threading.Event()
    make_room = flight.Flight.make_room

    def watched(self, size):
        if self._queued and self._bytes + size > 64:
            full.set()
        make_room(self, size)

    monkeypatch.setattr(flight.Flight, "make_room", watched)
    training.save()
    assert full.wait(WAIT_S)
    assert training.device.copies_count < len(training.plan.deferred)
    training.train()
    training.settle()

    assert [] == training.wrong(1)


def test_who_waits_at_the_gate_waits_for_one_call(train, monkeypatch):
    """CUDA's driver holds up who queues some 60 events among copies; see ``Flight``."""
    monkeypatch.setattr(StreamCopier.__init__, "__defaults__", (64,))
    training = train()
    runs = training.plan.chunks
    training.plan.chunks = [
        run._replace(begin=at, end=at + 1) for run in runs for at in range(run.begin, run.end)
    ]
    training.device.sleep()
    training.train()
    full, hurried = threading.Event(), threading.Event()
    make_room = flight.Flight.make_room

    def slow(self, size):
        if self._queued and self._bytes + size > 64:
            full.set()
            assert hurried.wait(WAIT_S)
        make_room(self, size)

    monkeypatch.setattr(flight.Flight, "make_room", slow)
    training.save()
    assert full.wait(WAIT_S)
    monkeypatch.setattr(engine, "cut", lambda pair: cut(pair, 16))
    calls, events = [], []
    copy, record = training.device.copy, training.device.record
    monkeypatch.setattr(
        training.device, "copy", lambda on, to, of: (calls.append(len(to)), copy(on, to, of))[1]
    )
    monkeypatch.setattr(training.device, "record", lambda on: (events.append(on), record(on))[1])
    hurry = StreamCopier.hurry
    monkeypatch.setattr(StreamCopier, "hurry", lambda self: (hurry(self), hurried.set())[0])
    training.train()
    at_the_gate = len(events)
    training.settle()

    assert len(calls) <= 2, "what was being queued, and what was left"
    assert calls[-1] > len(training.plan.deferred), "what is long is copied in parts"
    assert at_the_gate <= 2, "of what was being queued, and for the step to wait for"
    assert [] == training.wrong(1)


def test_a_parameter_written_past_the_gate_costs_one_save(train):
    """A8: seen on the device too, and an optimizer's own step is not taken for it."""
    training = train()
    training.device.sleep()
    training.train()
    snapshot = training.save()
    training.device.launch(lambda raw: raw.mul_(0.5), training.model.odd.data)
    torch.autograd.graph.increment_version(training.model.odd)
    training.train()
    training.settle()

    assert snapshot.abandoned
    assert "m.odd" in snapshot.reason
    assert "m.plain" not in snapshot.reason
    assert not training.plan.is_current()


def test_a_tensor_that_is_freed_under_its_copy_costs_the_save(train):
    """``resize_(0)`` frees it whoever holds it, and the allocator may give it to somebody else."""
    training = train()
    training.device.sleep()
    training.train()
    snapshot = training.save()
    training.engine.let_pass(WAIT_S)
    memory = torch.ones(7).untyped_storage()
    training.plan._addresses[0] += 1  # memory of the late device cannot be resized
    snapshot.sources[0] = torch.empty(0).set_(memory, 0, (7,))
    memory.resize_(0)
    training.settle()

    assert snapshot.abandoned
    assert "was freed" in snapshot.reason


def test_memory_of_the_device_is_held_no_longer_than_the_copy_takes(train):
    """What a script lets go between two saves is free again."""
    training = train()
    training.train()
    snapshot = training.save()
    training.settle()

    assert [] == snapshot.sources
    assert [] == snapshot.held


def test_a_tensor_that_the_plan_does_not_defer_is_ordered_by_the_stream(train):
    """A buffer is written in forward, right after the save."""
    training = train()
    training.device.sleep()
    training.train()
    training.save()
    training.device.launch(lambda raw: raw.fill_(99), training.model.mean)
    training.settle()

    assert [] == training.wrong(1)


# ---------------------------------------------------------------------- each wait taken away


def _on_the_side(self, targets, sources):
    self._flight.copy(self._side, targets, sources)


MUTANTS = {
    "copies wait for training": (StreamCopier, "mark", lambda _: None),
    "training waits for the copies": (StreamCopier, "hold", lambda _: None),
    "the slot is closed after the copies": (StreamCopier, "land", lambda _: None),
    "eager copies are in training's order": (StreamCopier, "now", _on_the_side),
    "memory is held": (Snapshot, "sources", property(lambda s: s.plan.sources(), lambda *_: None)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_without_this_wait_wrong_bytes_are_saved(tmp_path, monkeypatch, mutant):
    """The tests above would see it: in one order of the device's work at least."""
    owner, name, value = MUTANTS[mutant]
    monkeypatch.setattr(owner, name, value, raising=False)
    seen = []
    for number, order in enumerate(ORDERS):
        folder = tmp_path / str(number)
        folder.mkdir()
        training = LateTraining(folder, LateDevice(order))
        wrong = train_and_save(training)
        seen.append(bool(wrong or training.device.faults))
        training.device.finish()
        training.close()

    assert any(seen), f"nothing shows that {mutant}"
