"""Modules on the meta device: a restore gives their tensors memory; they stay the same objects."""

from __future__ import annotations

import weakref

import pytest
import torch
from tests.unit.state import worlds
from tests.unit.state.test_meshes import WORLD, built
from torch import nn
from torch.distributed.tensor import DTensor

from holdfast.errors import CheckpointError, InvalidRequestError, NotReadyError
from holdfast.state.capture import Capture


class Model(nn.Module):
    """Tied weights, a frozen parameter, a buffer, and one that no checkpoint has."""

    def __init__(self, table: torch.Tensor | None = None) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4, bias=False)
        self.head = nn.Linear(3, 4)
        self.head.weight = self.embed.weight
        self.head.bias.requires_grad_(False)
        self.register_buffer("mean", torch.arange(5.0))
        self.register_buffer("table", table, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embed(x) + self.head(x)


def state_of(model: nn.Module) -> dict[str, object]:
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}


def trained(seed: int = 1) -> dict[str, object]:
    torch.manual_seed(seed)
    state = state_of(Model())
    step(state)
    return state


def step(state) -> None:
    state["model"](torch.ones(2, 3)).square().sum().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def on_meta(table: torch.Tensor | None = None) -> dict[str, object]:
    with torch.device("meta"):
        model = Model(table)
    return state_of(model)


def load(folder, saved, target, **how):
    with worlds.save_all(folder, [Capture(saved, rank=0, world_size=1)]) as segments:
        return Capture(target, rank=0, world_size=1).load(segments, step=1, **how)


def test_hooks_of_a_parameter_on_meta_are_called_after_the_restore(tmp_path):
    """Whoever steps in the backward pass would else not step at all."""
    saved, state = trained(), on_meta()
    weight, called = state["model"].embed.weight, []
    weight.register_hook(lambda _: called.append("gradient"))
    weight.register_post_accumulate_grad_hook(lambda _: called.append("accumulated"))

    load(tmp_path, saved, state)
    step(state)

    assert called == ["gradient", "accumulated"]


def test_a_module_on_meta_is_filled_and_its_parameters_stay_the_same_objects(tmp_path):
    saved, state = trained(), on_meta()
    model, optimizer = state["model"], state["optimizer"]
    model.mean.note = "mine"
    before = [*map(id, model.parameters()), *map(id, model.buffers())]

    load(tmp_path, saved, state)

    assert before == [*map(id, model.parameters()), *map(id, model.buffers())]
    assert model.head.weight is model.embed.weight
    assert type(model.embed.weight) is nn.Parameter
    assert [p.requires_grad for p in model.parameters()] == [True, False]
    assert model.mean.note == "mine"
    for state_now in (saved, state):
        step(state_now)
    for name, tensor in saved["model"].state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    assert all(p in optimizer.state for p in model.parameters() if p.requires_grad)


def test_sharded_parameters_on_meta_are_filled_on_the_device_of_their_mesh(tmp_path, world):
    captures = []
    for rank in range(WORLD):
        world(rank)
        state = built("fsdp")
        for at, p in enumerate(state["model"].parameters()):
            p.detach().to_local().fill_(at + 1)
        captures.append(Capture(state, rank=rank, world_size=WORLD))
    with worlds.save_all(tmp_path, captures) as segments:
        world(1)
        with torch.device("meta"):
            blank = built("fsdp")
        blank["optimizer"].state.clear()
        parameters = [*blank["model"].parameters()]
        assert all(p.is_meta for p in parameters)

        Capture(blank, rank=1, world_size=WORLD).load(segments, step=1)

    assert all(a is b for a, b in zip(parameters, blank["model"].parameters(), strict=True))
    for at, p in enumerate(parameters):
        assert isinstance(p, DTensor)
        assert p.device.type == "cpu"
        assert (p.to_local() == at + 1).all()
        moment = blank["optimizer"].state[p]["exp_avg"]
        assert moment.device.type == "cpu"
        assert moment.shape == p.shape


def test_a_refused_restore_leaves_a_module_on_meta(tmp_path):
    state = on_meta()
    state["more"] = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match="more"):
        load(tmp_path, trained(), state)
    assert all(p.is_meta for p in state["model"].parameters())


def test_a_buffer_that_no_checkpoint_has_is_named(tmp_path):
    state = on_meta(table=torch.empty(2, device="meta"))
    with pytest.raises(
        InvalidRequestError, match=r"'model.table' is on the meta device and is not"
    ):
        load(tmp_path, trained(), state)
    assert state["model"].mean.is_meta


def test_a_parameter_without_values_that_the_checkpoint_lacks_is_named(tmp_path):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    saved = {"model": nn.Sequential(nn.Linear(3, 4))}
    with pytest.raises(NotReadyError, match=r"'model.1.weight' is on the meta device"):
        load(tmp_path, saved, {"model": model}, strict=False)


def test_all_that_a_checkpoint_lacks_of_a_module_on_meta_is_named_at_once(tmp_path):
    """Nothing is to be left without values: that is refused, on whatever device they are."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    saved = {"model": nn.Sequential(nn.Linear(3, 4))}
    missing = r"'model\.1\.weight'.*'model\.1\.bias'.* exist only in the script"
    with pytest.raises(NotReadyError, match=missing):
        load(tmp_path, saved, {"model": model})


def test_a_tensor_that_something_refers_to_weakly_is_refused(tmp_path):
    """It would keep the tensor without memory: torch does not put another in its place."""
    state = on_meta()
    kept = weakref.ref(state["model"].head.bias)
    with pytest.raises(InvalidRequestError, match=r"'model.head.bias' is on the meta.*to_empty"):
        load(tmp_path, trained(), state)
    assert kept().is_meta


class Own(nn.Linear):
    """Saves itself in its own way."""

    def state_dict(self, *args, **kwargs):
        return super().state_dict(*args, **kwargs)


def test_a_module_that_loads_itself_is_refused_on_meta(tmp_path):
    saved = {"model": Own(2, 2)}
    with pytest.raises(
        InvalidRequestError, match=r"'model.weight' is on the meta device.*to_empty"
    ):
        load(tmp_path, saved, {"model": Own(2, 2, device="meta")})
