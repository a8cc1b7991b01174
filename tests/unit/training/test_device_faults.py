"""P4, F8: whatever a device does, it costs saves and never the training."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from tests.late_device import WAIT_S, LateDevice
from tests.unit.copying.late_training import LateOptimizer
from tests.unit.training.savers import saver_of

from holdfast.core.session import SessionView
from holdfast.training import unsaved_steps

GONE = "CUDA error: an illegal memory access was encountered"
FULL = "CUDA out of memory. Tried to allocate 64.00 MiB"


class Asked:
    """Has a state of which the device is asked, as its random state is."""

    def __init__(self, device):
        self._device = device
        self.error = None

    def state_dict(self):
        self._device.check()
        if self.error:
            raise self.error
        return {}

    def load_state_dict(self, _):
        """It has nothing to load."""


class LateJob:
    """A saver of a model on a late device, with two slots."""

    def __init__(self, device, saver, model, optimizer):
        self.device, self.saver, self.model = device, saver, model
        self.optimizer = optimizer
        self.events = saver.session._outbox.events
        self._version = 0
        saver._performer.gate._trusted = {id(optimizer): optimizer}
        self.lease_all()

    def lease_all(self):
        """Lease the slots, anew those that were closed."""
        self._version += 1
        leases = tuple([self.saver.lease(self._version, slot) for slot in ("s1", "s2")])
        self.saver.on_view(SessionView(version=str(self._version), leases=leases))

    def save(self, step):
        """Save, have the device do all, and wait for the end."""
        handle = self.saver.save(step)
        self.settle()
        return handle

    def settle(self):
        self.device.wake()
        assert self.saver._performer.engine.wait(WAIT_S)

    def told(self, kind):
        return [event.message for event in self.events if event.kind == kind]


@contextmanager
def late_job(folder, **more):
    device = LateDevice(**more)
    model = torch.nn.Module()
    for name in ("a", "b"):
        model.register_parameter(name, torch.nn.Parameter(device.place(torch.zeros(3))))
    model.register_buffer("mean", device.place(torch.zeros(2)))
    optimizer = LateOptimizer(device, list(model.parameters()))
    state = {"m": model, "o": optimizer, "a": Asked(device)}
    with saver_of(folder, state, devices=device) as saver:
        yield LateJob(device, saver, model, optimizer)


@pytest.fixture
def job(tmp_path):
    with late_job(tmp_path) as made:
        yield made


def test_a_copy_that_fails_costs_its_save(job):
    """The stream fails once; the next save has its slot and works."""
    job.device.fail_copy = (job.device.copies_count + 3, RuntimeError("the stream failed"))
    handle = job.save(2)
    job.optimizer.step()
    job.lease_all()
    again = job.save(3)

    assert handle.abandoned
    assert "the stream failed" in str(handle.error)
    assert 1 == len([told for told in job.told("save_abandoned") if "step 2" in told])
    again.wait("staged", timeout_s=WAIT_S)
    assert [] == job.device.faults


@pytest.mark.parametrize("copies_before", [0, 3], ids=["at once", "deferred"])
def test_a_device_without_memory_costs_the_save_it_runs_out_in(job, copies_before):
    """A tensor that does not lie in one piece is copied by way of new memory of the device."""
    error = torch.OutOfMemoryError(FULL)
    job.device.fail_copy = (job.device.copies_count + copies_before, error)
    handle = job.save(2)
    job.optimizer.step()
    job.lease_all()

    assert handle.abandoned
    assert FULL in str(handle.error)
    job.save(3).wait("staged", timeout_s=WAIT_S)
    assert [] == job.device.faults


def test_a_slot_is_not_used_again_while_copies_of_a_failed_save_are_under_way(job):
    """What failed in the middle had begun, and the device is slow."""
    job.device.sleep()
    job.device.fail_copy = (job.device.copies_count + 3, RuntimeError("the stream failed"))
    handle = job.saver.save(2)
    job.saver._performer.pool.reset()

    assert not job.saver._performer.engine.wait(0.0)
    assert job.device.registered, "the slot is mapped, and known to the driver"
    job.settle()
    assert handle.abandoned
    assert [] == job.device.faults


def test_the_arena_is_resized_under_a_copy(job):
    """The plan is made anew while the slots of the old one are registered, one of them in use."""
    job.device.sleep()
    first = job.saver.save(2)
    job.saver._performer.pool.reset(keep="another plan")
    assert 1 == len(job.device.registered)
    job.settle()
    first.wait("staged", timeout_s=WAIT_S)
    job.saver._performer.pool.reset(keep="another plan")

    assert {} == job.device.registered
    assert [] == job.device.faults


def test_a_device_that_is_reset_costs_all_further_saves_and_one_event(job, monkeypatch):
    """An error that ends CUDA's context stays; nothing of ours raises on training's thread."""
    monkeypatch.setattr(unsaved_steps, "NOTICE_S", 1e9)
    first = job.saver.save(2)
    job.device.lose(GONE)
    job.settle()
    handles = [job.save(step) for step in (3, 4, 5)]
    job.saver.before_update()
    told = job.told("save_abandoned")

    assert all(handle.abandoned for handle in (first, *handles))
    assert all(GONE in str(handle.error) for handle in handles)
    assert 1 == len([text for text in told if "does not answer any more" in text])
    job.saver.close(0.0)


def test_a_device_that_is_reset_before_a_save_costs_that_save(job):
    """The first thing that is asked of it fails, on the training thread."""
    job.device.lose(GONE)
    handles = [job.save(step) for step in (2, 3)]

    assert all(handle.abandoned for handle in handles)
    assert "does not answer any more" in str(handles[1].error)


def test_a_state_that_raises_by_itself_says_so_whatever_the_device_is_doing(job):
    """P4: nobody waits for the device to learn that it is well."""
    job.save(2)
    job.saver._performer.engine._copiers.mark()
    job.device.sleep()
    job.saver._capture.state["a"].error = RuntimeError("no such tokenizer")
    handle = job.saver.save(3)
    job.saver._capture.state["a"].error = None

    assert "no such tokenizer" in str(handle.error)
    assert "does not answer" not in str(handle.error)
    job.lease_all()
    job.save(4).wait("staged", timeout_s=WAIT_S)


def test_a_step_during_a_save_that_the_device_ends_goes_on(job):
    """The gate gives the save up and says why; the step is the script's own affair."""
    job.device.sleep()
    handle = job.saver.save(2)
    job.device.lost = GONE
    job.saver.before_update()
    job.settle()

    assert handle.abandoned or job.saver.save(3).abandoned


def test_slots_that_cannot_be_registered_are_told_once_and_saved_into(tmp_path):
    with late_job(tmp_path) as job:
        job.saver._performer.pool.reset()
        job.device.refuse = "cudaHostRegister: operation not supported (801)"
        job.lease_all()
        job.save(2).wait("staged", timeout_s=WAIT_S)

        (message,) = job.told("slots_unregistered")
        assert "operation not supported" in message
        assert "late:0" in message
