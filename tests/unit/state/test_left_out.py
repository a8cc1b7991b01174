"""States that look whole and are not: what training changes and no save holds is named."""

from __future__ import annotations

import pytest
import torch
from tests.unit.state import worlds
from torch import nn

from holdfast.errors import InvalidRequestError
from holdfast.state.capture import Capture
from holdfast.state.left_out import check_follows, unsaved_parameters


def optimizer_of(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.1)


def left_out(state) -> list[str]:
    return worlds.plan_of(Capture(state, rank=0, world_size=1)).left_out


def test_parameters_of_a_module_that_was_forgotten_are_named():
    """A script with two networks that puts one of them into the state."""
    model, forgotten = nn.Linear(2, 3), nn.Linear(5, 4)
    [text] = left_out({"model": model, "optimizer": optimizer_of(model, forgotten)})

    assert "'optimizer' has 2 parameters that are not in the state" in text
    assert "(4, 5)" in text


def test_parameters_that_the_model_has_replaced_are_named():
    """An optimizer that is older than what was done to the model, before anything was captured."""
    model = nn.Linear(2, 3)
    optimizer = optimizer_of(model)
    model.weight = nn.Parameter(torch.ones(3, 2))

    assert "1 parameters" in left_out({"model": model, "optimizer": optimizer})[0]


class App:
    """Saves itself in its own way."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self):
        return {"net": self.model.state_dict()}

    def load_state_dict(self, state):
        self.model.load_state_dict(state["net"])


@pytest.mark.parametrize(
    "held",
    [
        lambda model: model,
        lambda model: {"a": [model]},
        lambda model: model.state_dict(),
        lambda model: dict(model.named_parameters()),
        lambda model: nn.ParameterList(nn.Parameter(p.data) for p in model.parameters()),
        App,
    ],
    ids=["module", "nested", "state_dict", "parameters", "same memory", "own saving"],
)
def test_parameters_whose_memory_is_saved_are_not(held):
    model = nn.Linear(2, 3)

    assert left_out({"any": held(model), "optimizer": optimizer_of(model)}) == []


def copies():
    model = nn.Linear(2, 3)
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}


@pytest.mark.parametrize("name", ["optimizer", "scheduler"])
def test_a_copy_of_an_optimizer_or_scheduler_is_refused_at_any_depth(name):
    copy = copies()[name]
    said = rf"'s.deep.1' is the state_dict\(\) of an? {name}"
    with pytest.raises(InvalidRequestError, match=said):
        check_follows({"s": {"deep": [0, copy]}})


def test_plain_data_and_the_objects_themselves_follow():
    model = nn.Linear(2, 3)
    check_follows(
        {"s": {"model": model, "optimizer": optimizer_of(model), "state": {"n": 1}, 3: ()}}
    )


def test_a_copy_beside_the_objects_is_meant():
    """What a script goes back to: the optimizer and the scheduler of the best step."""
    optimizer = optimizer_of(nn.Linear(2, 3))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)

    check_follows({"best": copies(), "trained": [optimizer, {"by": scheduler}]})
    with pytest.raises(InvalidRequestError, match="of a scheduler"):
        check_follows({"best": copies(), "optimizer": optimizer})


def test_frozen_parameters_are_not_missed_until_they_are_trained():
    """LoRA: the state has what is trained, the optimizer was given all."""
    base, lora = nn.Linear(5, 4).requires_grad_(False), nn.Linear(2, 3)
    state = {"lora": lora, "optimizer": optimizer_of(base, lora)}

    assert left_out(state) == []
    base.weight.requires_grad_(True)
    assert "1 parameters" in left_out(state)[0]


class Packed(nn.Linear):
    """Saves itself in its own way, by copies."""

    def state_dict(self, **kwargs):
        return {"packed": torch.cat([p.detach().flatten() for p in self.parameters()])}


def test_a_module_that_saves_itself_by_copies_holds_its_parameters():
    model = Packed(2, 3)

    assert left_out({"model": model, "optimizer": optimizer_of(model)}) == []


def test_a_parameter_without_elements_is_not_missed():
    nothing = nn.ParameterList([nn.Parameter(torch.empty(0, 4))])
    model = nn.Linear(2, 3)

    assert left_out({"model": model, "optimizer": optimizer_of(model, nothing)}) == []


class Masters(torch.optim.SGD):
    """Trains parameters of its own, in full precision, and saves them itself."""

    def state_dict(self):
        trained = [p.detach() for group in self.param_groups for p in group["params"]]
        return {**super().state_dict(), "masters": [p.clone() for p in trained]}


def test_parameters_of_an_optimizer_that_saves_itself_are_not_missed():
    masters = [nn.Parameter(p.detach().double()) for p in nn.Linear(2, 3).parameters()]

    assert left_out({"model": nn.Linear(2, 3), "optimizer": Masters(masters, lr=0.1)}) == []


def test_parameters_that_have_no_memory_are_not_missed_where_their_module_is_there():
    model = nn.Linear(2, 3, device="meta")
    state = {"model": model, "optimizer": optimizer_of(model)}
    survey = Capture(state, rank=0, world_size=1).survey()

    assert unsaved_parameters(survey, state, []) == []
