"""F8, S1: the stager's copies beside a device's work are what the state was when it was staged."""

from __future__ import annotations

import pytest
import torch
from tests.late_device import WAIT_S, LateDevice
from tests.unit.copying.late_training import LateOptimizer
from torch import nn

from holdfast.copying.stream_copier import StreamCopier
from holdfast.errors import PreconditionError
from holdfast.integrations.dcp import HoldfastStager
from holdfast.integrations.dcp.staging import Memory
from holdfast.snapshot.later_copies import Copies
from holdfast.snapshot.optimizer_gate import Gate

ORDERS = ("training first", "copies first", "at random")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


class Staging:
    """A training on a late device, and a stager of it with pinned memory."""

    def __init__(self, order: str) -> None:
        self.device = LateDevice(order)
        self.model = nn.Module()
        self.model.w = nn.Parameter(self.device.place(torch.zeros(5)))
        self.model.register_buffer("mean", self.device.place(torch.zeros(2)))
        self.optimizer = LateOptimizer(self.device, [self.model.w])
        self.stager = HoldfastStager()
        self.stager._gate.uninstall()
        self.stager._copies.close(WAIT_S)
        self.stager._copies = Copies(self.device)
        self.stager._gate = Gate(self.stager._copies, devices=self.device)
        self.device.is_pinned = lambda _: True

    def train(self) -> None:
        self.device.launch(lambda raw: raw.add_(1), self.model.mean)
        self.optimizer.step()

    def stage(self):
        return self.stager.stage(
            {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        )

    def found(self, future):
        """Return the weight, the momentum, the buffer and the step counter that were staged."""
        self.device.wake()
        state = future.result(WAIT_S)
        kept = state["optimizer"]["state"][0]
        tensors = (state["model"]["w"], kept["momentum"], state["model"]["mean"], kept["step"])
        return [t.flatten()[0].item() for t in tensors]


@pytest.fixture
def staging():
    made = []

    def start(order="training first"):
        made.append(Staging(order))
        return made[-1]

    yield start
    for one in made:
        one.device.wake()
        one.stager.close()


@pytest.mark.parametrize("order", ORDERS)
def test_what_is_staged_is_the_state_as_it_was(staging, order):
    """The step after it is queued at once, and done after the copies."""
    one = staging(order)
    for number in (1, 2, 3):
        one.device.sleep()
        one.train()
        future = one.stage()
        one.train()
        assert not future.done()

        step = 2 * number - 1
        assert [step, 2 * step, step, step] == one.found(future)
        one.device.finish()


@pytest.mark.parametrize("wait", ["mark", "hold", "land"])
def test_without_this_wait_wrong_values_are_staged(staging, monkeypatch, wait):
    seen = []
    for order in ORDERS:
        one = staging(order)
        with monkeypatch.context() as patched:
            patched.setattr(StreamCopier, wait, lambda _: None)
            one.device.sleep()
            one.train()
            future = one.stage()
            one.train()
            one.device.wake()
            if wait != "land":
                one.device.finish()
            seen.append([1, 2, 1, 1] != one.found(future))
        one.device.finish()

    assert any(seen)


def test_a_device_that_fails_fails_the_future_and_the_next_is_staged(staging):
    one = staging()
    one.train()
    one.device.fail_copy = (one.device.copies_count + 1, torch.OutOfMemoryError("full"))
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        one.found(one.stage())
    one.train()

    assert [2, 4, 2, 2] == one.found(one.stage())


def test_a_device_that_is_reset_is_named_from_then_on(staging):
    one = staging()
    one.train()
    one.device.sleep()
    future = one.stage()
    one.device.lose("CUDA error: unspecified launch failure")
    with pytest.raises(RuntimeError, match="launch failure"):
        future.result(WAIT_S)
    with pytest.raises(PreconditionError, match="does not answer any more"):
        one.stage()


def test_nothing_is_staged_later_once_a_step_was_captured(staging):
    """A replay calls no hook, so no gate would hold it up."""
    one = staging()
    one.train()
    one.device.captures = True
    one.optimizer.step()
    one.device.captures = False
    one.device.finish()
    one.device.sleep()
    future = one.stage()
    one.stager._gate.uninstall()
    one.train()

    assert not one.stager._copies.busy
    assert [2, 4, 1, 2] == one.found(future)


def test_a_state_is_not_staged_inside_a_capture(staging):
    one = staging()
    one.train()
    one.device.finish()
    one.device.captures = True
    with pytest.raises(PreconditionError, match="captured"):
        one.stage()

    assert not one.device.training.todo


def test_who_stages_does_not_wait_for_the_rest_of_a_copy_that_fails_to_begin(staging):
    """P4: the device may be far behind, and training's thread is not made to stand aside."""
    one = staging()
    one.train()
    one.device.sleep()
    one.device.fail_copy = (one.device.copies_count + 1, torch.OutOfMemoryError("full"))
    one.stager._copies.may_defer = False
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        one.stage()
    assert not one.stager._copies.wait(0.0), "what had begun is under way"
    assert not one.device.stands_aside()
    one.device.wake()
    one.train()

    assert [2, 4, 2, 2] == one.found(one.stage())


def test_memory_that_cannot_be_pinned_is_taken_as_it_comes(monkeypatch, caplog):
    empty = torch.empty

    def refuse(*arguments, pin_memory=False, **more):
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*arguments, **more)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", refuse)
    (view,) = Memory().views([torch.ones(3)])

    assert view.shape == (3,)
    assert "not pinned" in caplog.text
