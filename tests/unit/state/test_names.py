"""Names of tensors: wrappers do not show, everything else does (P7)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

from holdfast.errors import InvalidRequestError
from holdfast.state.capture import Capture

_SPEC = importlib.util.spec_from_file_location(
    "holdfast_test_worlds", Path(__file__).with_name("worlds.py")
)
worlds = importlib.util.module_from_spec(_SPEC)
sys.modules.setdefault("holdfast_test_worlds", worlds)
_SPEC.loader.exec_module(worlds)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*barrier.*"),
    pytest.mark.filterwarnings("ignore:`torch.jit"),  # torch's own import
]


def names(state: dict) -> list[str]:
    survey = Capture(state, rank=0, world_size=1).survey()
    return [captured.fqn for captured in survey.tensors] + list(survey.aliases)


class Holder(nn.Module):
    """A user's own class, with the attributes that wrappers have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.module = nn.Linear(1, 1, bias=False)
        self._orig_mod = nn.Linear(1, 1, bias=False)


def test_an_attribute_called_module_keeps_its_name():
    """P7; defect X2: readers without us load it by the names of ``state_dict()``."""
    model = Holder()

    assert [f"module.{name}" for name in model.state_dict()] == names({"module": model})


def pair() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


WRAPPERS = {
    "plain": lambda model: model,
    "compiled": torch.compile,
    "ddp": DistributedDataParallel,
    "parallel": nn.DataParallel,
    "compiled_ddp": lambda model: torch.compile(DistributedDataParallel(model)),
    "ddp_of_compiled": lambda model: DistributedDataParallel(torch.compile(model)),
    "checkpointed": checkpoint_wrapper,
    "checkpointed_inside": lambda model: nn.Sequential(*map(checkpoint_wrapper, model)),
    "sync_batchnorm": nn.SyncBatchNorm.convert_sync_batchnorm,  # DDP of it takes a GPU
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS.keys())
def test_a_wrapper_does_not_show_and_takes_what_any_other_saved(group, tmp_path, wrap):
    """Saved under one wrapper, loaded into none, and the other way round, optimizer and all."""
    wrapped, bare = wrap(pair()), pair()
    assert [f"m.{name}" for name in pair().state_dict()] == names({"m": wrapped})
    ours, theirs = (torch.optim.AdamW(m.parameters()) for m in (wrapped, bare))
    for p in wrapped.parameters():
        p.grad = torch.ones_like(p)
    ours.step()
    worlds.there_and_back(tmp_path, {"m": wrapped, "o": ours}, {"m": bare, "o": theirs})
    again = wrap(pair())
    worlds.there_and_back(tmp_path, {"m": bare}, {"m": again})

    for left, middle, right in zip(
        wrapped.parameters(), bare.parameters(), again.parameters(), strict=True
    ):
        assert torch.equal(left, middle)
        assert torch.equal(left, right)
        assert torch.equal(ours.state[left]["exp_avg"], theirs.state[middle]["exp_avg"])


def test_an_average_is_named_as_its_model():
    averaged = torch.optim.swa_utils.AveragedModel(nn.Linear(1, 1))

    assert {"ema.weight", "ema.bias", "ema.n_averaged"} == set(names({"ema": averaged}))


def test_two_tensors_of_one_name_are_refused():
    """P7: a key may have a dot in it, as names have."""
    with pytest.raises(InvalidRequestError, match=r"the same name 'm\.0\.weight'"):
        names({"m": nn.Sequential(nn.Linear(1, 1)), "m.0": nn.Linear(1, 1)})
