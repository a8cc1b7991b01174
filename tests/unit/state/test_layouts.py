"""Memory layouts: what walks raw memory after a restore finds it as it was (defect A2)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import InvalidRequestError

_SPEC = importlib.util.spec_from_file_location(
    "holdfast_test_worlds", Path(__file__).with_name("worlds.py")
)
worlds = importlib.util.module_from_spec(_SPEC)
sys.modules.setdefault("holdfast_test_worlds", worlds)
_SPEC.loader.exec_module(worlds)


class Net(nn.Module):
    """A convolution and two matrices of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.first = nn.Linear(16, 16, bias=False)
        self.second = nn.Linear(16, 16, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(self.conv(inputs).flatten(1)).tanh())


def plain(net: Net) -> None:
    net.train()


def channels_last(net: Net) -> None:
    net.to(memory_format=torch.channels_last)


def transposed(net: Net) -> None:
    net.first.weight = nn.Parameter(net.first.weight.detach().t().contiguous().t())
    assert not net.first.weight.is_contiguous()


def tied(net: Net) -> None:
    transposed(net)
    net.second.weight = net.first.weight


LAYOUTS = {f.__name__: f for f in (plain, channels_last, transposed, tied)}

# LBFGS is not among them: torch has it for contiguous parameters only.
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "momentum_fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": torch.optim.Adam,
    "adam_fused": lambda p: torch.optim.Adam(p, fused=True),
    "amsgrad_fused": lambda p: torch.optim.Adam(p, amsgrad=True, fused=True),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adagrad": torch.optim.Adagrad,
    "adagrad_fused": lambda p: torch.optim.Adagrad(p, fused=True),
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "rprop": torch.optim.Rprop,
    "asgd": torch.optim.ASGD,
    "adafactor": torch.optim.Adafactor,
}


def made(seed: int, layout, optimizer) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = Net()
    layout(net)
    return net, optimizer(net.parameters())


def train(net: Net, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(2):
        inputs = torch.randn(2, 3, 4, 4, generator=generator)

        def closure(inputs: torch.Tensor = inputs) -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(inputs).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def assert_same_end(net: nn.Module, other: nn.Module) -> None:
    pairs = zip(net.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)


def assert_same_layouts(optimizer: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    def layouts(of: torch.optim.Optimizer) -> list[object]:
        return [
            {key: value.stride() for key, value in state.items() if torch.is_tensor(value)}
            for state in of.state.values()
        ]

    assert layouts(optimizer) == layouts(other)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_every_optimizer_goes_on_in_every_layout(tmp_path, optimizer, layout):
    """G9; defect A2: fused kernels pair parameter and moments by their place in memory."""
    net, stepped = made(1, layout, optimizer)
    train(net, stepped, 1)
    fresh, other = made(2, layout, optimizer)
    worlds.there_and_back(tmp_path, {"m": net, "o": stepped}, {"m": fresh, "o": other})
    assert_same_layouts(stepped, other)
    train(net, stepped, 2)
    train(fresh, other, 2)

    assert_same_end(net, fresh)


class OwnSaving(torch.optim.AdamW):
    """Saved through its own ``state_dict``, with torch's loading."""

    def state_dict(self):
        return dict(super().state_dict())


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_an_optimizer_that_saves_itself_goes_on_too(tmp_path, layout):
    """Defect A2, the same thought: tensors of a ``state_dict()`` come back as they lay."""
    net, stepped = made(1, layout, lambda p: OwnSaving(p, fused=True))
    train(net, stepped, 1)
    fresh, other = made(2, layout, lambda p: OwnSaving(p, fused=True))
    worlds.there_and_back(tmp_path, {"m": net, "o": stepped}, {"m": fresh, "o": other})
    assert_same_layouts(stepped, other)
    train(net, stepped, 2)
    train(fresh, other, 2)

    assert_same_end(net, fresh)


def test_a_tensor_that_nothing_stands_for_keeps_its_layout(tmp_path):
    lying = {
        "last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "turned": torch.randn(3, 5).t(),
        "expanded": torch.randn(3, 1).expand(3, 4),
        "sliced": torch.randn(4, 6)[:, ::2],
    }
    loaded: dict[str, object] = {}
    worlds.there_and_back(tmp_path, {"x": lying}, loaded)

    for name, tensor in lying.items():
        assert torch.equal(tensor, loaded["x"][name])
        assert torch.empty_like(tensor).stride() == loaded["x"][name].stride()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_one_shot_load_keeps_the_layout(tmp_path, layout):
    """Defect A2 through ``holdfast.load``: streamed, not mapped."""
    net, stepped = made(1, layout, OPTIMIZERS["adamw_fused"])
    train(net, stepped, 1)
    holdfast.save(tmp_path / "c", {"m": net, "o": stepped})
    fresh, other = made(2, layout, OPTIMIZERS["adamw_fused"])
    holdfast.load(tmp_path / "c", {"m": fresh, "o": other})
    assert_same_layouts(stepped, other)
    train(net, stepped, 2)
    train(fresh, other, 2)

    assert_same_end(net, fresh)


@pytest.mark.parametrize("inside", ["module", "plain"])
def test_an_expanded_tensor_is_refused_by_name(tmp_path, inside):
    """Defect C7: it cannot be filled, and says so as everything else does."""

    def state(tensor: torch.Tensor) -> dict[str, object]:
        if inside == "plain":
            return {"x": {"deep": [tensor]}}
        module = nn.Module()
        module.register_buffer("b", tensor)
        return {"x": module}

    holdfast.save(tmp_path / "c", state(torch.arange(4.0)))

    with pytest.raises(InvalidRequestError, match=r"'x\.(b|deep\.0)' share memory"):
        holdfast.load(tmp_path / "c", state(torch.zeros(1).expand(4)))


def test_expanded_state_of_an_optimizer_makes_room_for_what_was_saved(tmp_path):
    """Defect A2: an optimizer may begin with zeros that share memory; they hold one value only."""
    weights = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    first, second = (torch.optim.SGD([weight], momentum=0.9) for weight in weights)
    first.state[weights[0]]["momentum_buffer"] = torch.arange(3.0)
    second.state[weights[1]]["momentum_buffer"] = torch.zeros(1).expand(3)
    states = [
        {"m": nn.ParameterList([weight]), "o": optimizer}
        for weight, optimizer in zip(weights, (first, second), strict=True)
    ]

    worlds.there_and_back(tmp_path, *states)

    assert second.state[weights[1]]["momentum_buffer"].tolist() == [0, 1, 2]
