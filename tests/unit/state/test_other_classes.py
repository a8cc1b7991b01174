"""An optimizer or scheduler of another class takes what was saved, as in torch, and says so."""

from __future__ import annotations

import pytest
import torch
from tests.unit.state import worlds
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, StepLR


def made(optimizer=AdamW, scheduler=lambda of: StepLR(of, 2)):
    model = torch.nn.Linear(2, 3)
    made = optimizer(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": made, "scheduler": scheduler(made)}


def told(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if "another class" in r.getMessage()]


def test_another_scheduler_is_named_with_the_settings_that_differ(tmp_path, caplog):
    target = made(scheduler=lambda of: CosineAnnealingLR(of, 5))
    worlds.there_and_back(tmp_path, made(), target)

    [text] = told(caplog)
    assert "'scheduler' is of class CosineAnnealingLR" in text
    assert "'T_max', 'eta_min' exist only in the script" in text
    assert "'step_size', 'gamma' exist only in the checkpoint" in text


def test_another_optimizer_is_named_with_the_settings_that_it_lacks(tmp_path, caplog):
    worlds.there_and_back(tmp_path, made(), made(optimizer=SGD))

    [text] = told(caplog)
    assert "'optimizer' is of class SGD" in text
    assert "'momentum', 'dampening', 'nesterov' exist only in the script" in text


def with_private():
    """The scheduler of another version of torch, which has something more for itself."""
    held = made()
    held["scheduler"]._in_one_version = True
    return held


@pytest.mark.parametrize(
    ("there", "here"),
    [
        (made, made),
        (with_private, made),
        (made, with_private),
        (made, lambda: made(optimizer=Adam)),
        (lambda: made(scheduler=lambda of: LambdaLR(of, lambda n: 0.9**n)),) * 2,
    ],
    ids=["same", "private then", "private now", "same state", "functions"],
)
def test_what_has_the_same_settings_is_not_named(tmp_path, caplog, there, here):
    worlds.there_and_back(tmp_path, there(), here())

    assert told(caplog) == []


class Listed(StepLR):
    """A scheduler whose state is no mapping of settings."""

    def state_dict(self):
        return [self.last_epoch]

    def load_state_dict(self, state_dict):
        (self.last_epoch,) = state_dict if isinstance(state_dict, list) else (-7,)


@pytest.mark.parametrize("there", [Listed, StepLR])
def test_a_scheduler_with_a_state_of_its_own_is_given_what_was_saved(tmp_path, caplog, there):
    """Settings that have no names are compared with none."""
    saved = made(scheduler=lambda of: there(of, 2))
    target = made(scheduler=lambda of: Listed(of, 2))
    saved["scheduler"].last_epoch = 5

    worlds.there_and_back(tmp_path, saved, target)

    assert target["scheduler"].last_epoch == (5 if there is Listed else -7)
    assert not told(caplog)
