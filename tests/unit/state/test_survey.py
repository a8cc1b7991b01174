"""What a survey compares to notice a change."""

from __future__ import annotations

import sys
import threading
import time

import pytest
import torch
from tests.unit.state import worlds
from torch import nn

from holdfast.state import tensor_looks
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
    identity = _identity(state)
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


def _read_as(tensor, dtype):
    tensor.data = tensor.data.view(dtype)


_CHANGES = {
    "turned": lambda tensor: tensor.t_(),
    "smaller": lambda tensor: tensor.resize_(2, 4),
    "one more axis": lambda tensor: tensor.unsqueeze_(0),
    "other values of the same bits": lambda tensor: _read_as(tensor, torch.int32),
    "other strides": lambda tensor: tensor.as_strided_((3, 4), (1, 3)),
}


@pytest.fixture(params=["guards of torch", "public names"])
def looking(request, monkeypatch):
    """Both ways to ask how tensors are kept."""
    if request.param == "public names":
        monkeypatch.setattr(tensor_looks, "TensorGuards", None)
    else:
        assert tensor_looks.TensorGuards is not None


@pytest.mark.usefixtures("looking")
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("name", _CHANGES)
def test_a_tensor_that_has_changed_at_its_place_is_seen_whichever_it_is(name, at):
    module = nn.Module()
    for number in range(3):
        module.register_buffer(f"b{number}", torch.zeros(3, 4))
    identity = _identity({"m": module})
    places = identity.places
    assert identity.holds()
    assert identity.places is places

    _CHANGES[name](module.get_buffer(f"b{at}"))

    assert not identity.holds() or identity.places is not places


@pytest.mark.usefixtures("looking")
@pytest.mark.parametrize("change", ["conjugated", "negated", "elsewhere"])
def test_a_complex_tensor_that_is_read_otherwise_is_seen(change):
    module = nn.Module()
    module.register_buffer("turned", torch.zeros(2, dtype=torch.complex64))
    identity = _identity({"m": module})
    places = identity.places
    made = {"conjugated": torch.conj, "negated": torch._neg_view, "elsewhere": torch.clone}
    module.turned.data = made[change](module.turned)

    assert not identity.holds() or identity.places is not places


@pytest.mark.usefixtures("looking")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_a_parameter_that_is_trained_no_more_is_seen_in_any_mode(mode):
    """Who else writes it does so in forward, so it is no longer copied later."""
    model = nn.Linear(2, 2)
    with mode():
        identity = _identity({"m": model, "o": torch.optim.SGD(model.parameters())})
    with mode():
        assert identity.holds()
    model.bias.requires_grad_(requires_grad=False)
    with mode():
        assert not identity.holds()


def test_a_parameter_that_no_module_of_the_state_has_is_watched_too():
    """So is one of which the state has another tensor, such as what is here of a DTensor."""
    other = nn.Linear(2, 2)
    identity = _identity({"o": torch.optim.SGD(other.parameters())})
    assert identity.holds()
    other.bias.requires_grad_(requires_grad=False)

    assert not identity.holds()


@pytest.mark.usefixtures("looking")
def test_what_is_asked_in_another_mode_has_not_changed():
    """Nor has a plan that was made outside of autocast, or of inference."""
    model = nn.Linear(2, 2)
    identity = _identity({"m": model, "o": torch.optim.SGD(model.parameters())})

    for mode in (torch.autocast("cpu"), torch.inference_mode(), torch.no_grad()):
        with mode:
            assert identity.holds()
    assert identity.holds()


@pytest.mark.usefixtures("looking")
def test_nothing_is_looked_at_anew_while_nothing_has_changed():
    """Else each save makes a second tensor of each, which takes ten times as long."""
    model = nn.Linear(2, 2)
    identity = _identity({"m": model, "o": torch.optim.SGD(model.parameters())})
    places = identity.places
    with torch.no_grad():
        assert identity.holds()

    assert identity.places is places


def test_an_empty_tensor_of_another_shape_is_seen():
    module = nn.Module()
    module.register_buffer("rows", torch.zeros(0, 4))
    identity = _identity({"m": module})

    module.rows.resize_(0, 5)

    assert not identity.holds()


def _identity(state):
    return Identity(Capture(state, rank=0, world_size=1).survey())


class _Walked(nn.Module):
    """Counts how often its modules are walked."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.walks = 0

    def named_modules(self, *args, **kwargs):
        self.walks += 1
        return super().named_modules(*args, **kwargs)


@pytest.mark.parametrize("anew", [Capture.forget, Capture.survey])
def test_a_state_that_was_checked_is_walked_again_once_it_is_forgotten(anew):
    """A restore asks five times, and with many tensors each walk takes as long as the load."""
    model = _Walked()
    capture = Capture({"m": model}, rank=0, world_size=1)
    checked = model.walks

    assert capture.estimate().own_bytes > 0
    assert capture.boxes is None
    assert not capture.names_needs
    assert model.walks == checked

    model.inner.weight = nn.Parameter(torch.zeros(3, 3))
    few = capture.estimate().own_bytes
    anew(capture)

    assert capture.estimate().own_bytes > few


def _rename_a_tensor(model, _optimizer):
    model.rename = model._parameters.pop("last")


def _rename_a_module(model, _optimizer):
    model._modules["again"] = model._modules.pop("inner")


def _move_a_tensor(model, _optimizer):
    """All tensors and all their names stand in the order they had."""
    moved = model.one._parameters.pop("a")
    held = dict(model.two._parameters)
    model.two._parameters.clear()
    model.two._parameters.update({"a": moved, **held})


def _keep_a_buffer(model, _optimizer):
    model.register_buffer("scratch", model.scratch)


def _keep_a_buffer_no_more(model, _optimizer):
    model.register_buffer("mean", model.mean, persistent=False)


def _move_between_groups(_model, optimizer):
    one, two = optimizer.param_groups
    two["params"].insert(0, one["params"].pop())


def _hand_state_on(model, optimizer):
    optimizer.state[model.last] = optimizer.state.pop(model.inner.weight)


def _move_state(model, optimizer):
    kept = optimizer.state
    kept[model.two.b]["momentum_buffer"] = kept[model.one.a].pop("momentum_buffer")


def _rename_state(_model, optimizer):
    for kept in filter(None, optimizer.state.values()):
        kept["velocity"] = kept.pop("momentum_buffer")


_SAME_OBJECTS = [
    _rename_a_tensor, _rename_a_module, _move_a_tensor, _keep_a_buffer, _keep_a_buffer_no_more,
    _move_between_groups, _hand_state_on, _move_state, _rename_state,
]  # fmt: skip


@pytest.mark.parametrize("change", _SAME_OBJECTS, ids=lambda change: change.__name__.strip("_"))
def test_the_same_objects_in_the_same_order_under_other_names_are_a_change(change):
    """Else they are saved under the names that they had, and loaded under these without a word."""
    model = nn.Module()
    model.one, model.two = (nn.ParameterDict({key: torch.zeros(2, 2)}) for key in "ab")
    model.inner = nn.Linear(2, 2, bias=False)
    model.last = nn.Parameter(torch.zeros(2, 2))
    model.register_buffer("mean", torch.zeros(2))
    model.register_buffer("scratch", torch.zeros(2), persistent=False)
    weights = [model.one.a, model.inner.weight]
    groups = [{"params": weights}, {"params": [model.two.b, model.last]}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    optimizer.state[model.two.b] = {}
    for weight in weights:
        weight.grad = torch.ones(2, 2)
    optimizer.step()
    identity = _identity({"m": model, "o": optimizer})

    assert identity.holds()
    change(model, optimizer)
    assert not identity.holds()


def test_a_name_that_was_written_again_is_the_same_name():
    """Wrappers take tensors out of their tables and put them back, under a text made anew."""
    model = nn.Linear(2, 2)
    identity = _identity({"m": model})
    bias = model._parameters.pop("bias")
    model._parameters[b"bias".decode()] = bias

    assert identity.holds()
