"""The second and later saves of a state do no planning: they work from the plan of the first."""

import copy

import pytest
import torch
from tests.unit.state.worlds import becoming
from tests.unit.training.savers import saver_of
from torch import nn
from torch.distributed.fsdp import fully_shard

from holdfast.core.session import SessionView
from holdfast.snapshot import plan
from holdfast.state import survey
from holdfast.state.capture import Capture
from holdfast.training import save_performer

WORLD = 4
PLANNING = {
    "plan": (save_performer, "make_plan"),
    "survey": (Capture, "survey"),
    "boxes": (survey, "local_box"),
    "hash": (plan, "hash_of"),
    "layout": (plan, "header_template"),
}
MODELS = {"ddp": nn.parallel.DistributedDataParallel, "fsdp2": fully_shard}


@pytest.fixture
def planned(monkeypatch):
    """How often each of the functions that make a plan has been called."""
    counts = dict.fromkeys(PLANNING, 0)

    def counted(name, work):
        def call(*args, **kwargs):
            counts[name] += 1
            return work(*args, **kwargs)

        return call

    for name, (owner, attribute) in PLANNING.items():
        monkeypatch.setattr(owner, attribute, counted(name, getattr(owner, attribute)))
    return counts


def train(optimizer):
    """Do a step that changes every parameter and makes their state, once."""
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@pytest.mark.parametrize("kind", MODELS)
def test_only_the_first_save_plans_until_the_state_is_another(tmp_path, planned, kind):
    """F36: what the first save works out once, the others find; they look at identities alone."""
    with becoming() as become:
        become(0, WORLD)
        model = MODELS[kind](nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
        optimizer = torch.optim.AdamW(model.parameters())
        train(optimizer)
        state = {"model": model, "optimizer": optimizer, "notes": {"n": 0}}
        with saver_of(tmp_path, state, WORLD) as saver:
            first = dict(planned)
            leases = tuple(saver.lease(slot=f"s{number}") for number in range(4))
            saver.on_view(SessionView(version="1", leases=leases))
            for step in range(2, 6):
                train(optimizer)
                state["notes"]["n"] = step
                saver.save(step).wait("staged", timeout_s=20)

            assert first["plan"] == 1
            assert min(first.values()) >= 1
            assert first == planned

            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            saver.save(6)

            assert planned["plan"] == 2
            assert all(planned[name] > first[name] for name in PLANNING)
