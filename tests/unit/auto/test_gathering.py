"""Modules, optimizers and the rest are noted as they are built, and named alike in each run."""

from __future__ import annotations

import copy
import gc
import io

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from holdfast.auto.gathering import KINDS, Gathering, attributes_of
from holdfast.patches import Patches


@pytest.fixture
def gathering():
    patches = Patches()
    yield Gathering(patches)
    patches.undo()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)


def test_the_outermost_modules_are_named_by_their_class(gathering):
    first, second = Net(), Net()
    compiled = torch.compile(Net(), backend="eager")
    assert gathering.state() == {"Net": first, "Net_2": second, "Net_3": compiled}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_module_is_there_only_if_what_it_was_made_of_is_not(gathering):
    net = Net()
    scripted, buffer = torch.jit.script(net), io.BytesIO()
    torch.jit.save(scripted, buffer)
    buffer.seek(0)
    alone = torch.jit.load(buffer)
    assert gathering.state() == {"Net": net, "RecursiveScriptModule": alone}
    assert scripted.inner.weight is net.inner.weight


def test_tensors_of_an_optimizer_that_no_module_has_go_under_its_name(gathering):
    net, loose = Net(), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([*net.parameters(), loose], lr=0.1)
    assert gathering.state() == {"Net": net, "SGD": optimizer, "SGD_tensors": [loose]}


def test_attributes_of_modules_that_change_are_seen(gathering):
    net = Net()
    net.inner.rate, net.seen, net.mean = 1.0, [], torch.zeros(1)
    before = attributes_of([net])
    assert attributes_of([net]) == before
    net.inner.rate = 0.5
    net.seen.append(1)
    net.mean.add_(1)
    net.eval()
    after = attributes_of([net])
    changed = {name for (name, number), value in after.items() if before[name, number] != value}
    assert changed == {"Linear.rate", "Net.seen", "Net.mean"}


def test_what_has_no_tensors_is_left_out(gathering):
    kept = nn.CrossEntropyLoss(), nn.Sequential(nn.ReLU(), nn.Dropout())
    assert gathering.state() == {}
    del kept


def test_a_copy_is_a_module_of_its_own(gathering):
    net = Net()
    average = copy.deepcopy(net)
    assert gathering.state() == {"Net": net, "Net_2": average}


def test_what_is_gone_is_forgotten(gathering):
    net = Net()
    net.inner = nn.BatchNorm1d(2)  # the linear one goes
    cycle = Net()
    cycle.me = [cycle]
    del cycle
    assert gathering.state() == {"Net": net}
    del net
    gc.collect()
    assert gathering.state() == {}


SCHEDULERS = [
    lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    lr_scheduler.ReduceLROnPlateau,
    lambda optimizer: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(optimizer)]),
    lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.StepLR(optimizer, 2)], [2]
    ),
    lambda optimizer: torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.1),
]


@pytest.mark.parametrize("make", SCHEDULERS)
def test_schedulers_of_every_kind_are_noted(gathering, make):
    net = Net()
    scheduler = make(torch.optim.SGD(net.parameters(), lr=0.1))
    assert any(value is scheduler for value in gathering.state().values())


def test_scalers_and_loaders_are_noted(gathering):
    scaler = torch.amp.GradScaler("cpu")
    first, second = DataLoader([1]), DataLoader([2], shuffle=True)
    assert gathering.state() == {"GradScaler": scaler}
    assert gathering.loaders() == [first, second]


def test_undone_it_leaves_each_class_as_it_was():
    before = [(kind.__init__, "__init__" in vars(kind)) for kind in KINDS]
    patches = Patches()
    gathering = Gathering(patches)
    assert nn.Module.__init__ is not before[0][0]
    patches.undo()
    assert [(kind.__init__, "__init__" in vars(kind)) for kind in KINDS] == before
    Net()
    assert gathering.state() == {}


def test_what_others_put_around_it_since_stays_and_nothing_is_noted(monkeypatch):
    monkeypatch.setattr(nn.Module, "__init__", nn.Module.__init__)
    patches = Patches()
    gathering = Gathering(patches)
    ours, begun = nn.Module.__init__, []

    def theirs(made, *args, **kwargs):
        begun.append(made)
        ours(made, *args, **kwargs)

    nn.Module.__init__ = theirs
    patches.undo()
    kept = nn.Linear(1, 1)
    assert begun == [kept]
    assert gathering.state() == {}
    assert gathering.count == 0
