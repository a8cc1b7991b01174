"""Where tensors lie in a segment: what most likely stays as it is fills whole parts."""

from __future__ import annotations

import torch
from tests.unit.state import worlds
from torch import nn

from holdfast.format.segment import ITEM_BYTES
from holdfast.state.capture import Capture


class Adapted(nn.Module):
    """A linear layer that does not learn, with a low-rank addition that does."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = nn.Linear(size, size, bias=False, dtype=dtype).requires_grad_(
            requires_grad=False
        )
        self.down = nn.Linear(size, 1, bias=False)
        self.up = nn.Linear(1, size, bias=False)


def adapted(layers: int = 3, *, size: int = 8, dtype: torch.dtype = torch.float32):
    """Return a model of such layers and what AdamW keeps of what learns in it, as a state."""
    model = nn.Sequential(*(Adapted(size, dtype) for _ in range(layers)))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    return model, optimizer, {"m": model, "o": optimizer, "t": torch.zeros(2)}


def test_what_does_not_learn_lies_in_one_piece_behind_what_does():
    """G16: in each group of item sizes; changed parts are next to the header's, which changes."""
    _, _, state = adapted(dtype=torch.bfloat16)
    plan = worlds.plan_of(Capture(state, rank=0, world_size=1))
    places = [
        (-ITEM_BYTES[entry.spec.dtype], ".base." in entry.spec.fqn)
        for entry in plan.template.entries
    ]

    assert 3 == sum(idle for _, idle in places)
    assert sorted(places) == places


def floats(state):
    """Return the names of a plan's tensors of 4 bytes, in the order of the segment."""
    plan = worlds.plan_of(Capture(state, rank=0, world_size=1))
    return [e.spec.fqn for e in plan.template.entries if e.spec.dtype == "F32"]


def test_of_one_dtype_it_lies_behind_tensors_of_the_mapping_too():
    _, _, state = adapted()
    names = floats(state)

    assert "rank.0.t" in names
    assert ["m.0.base.weight", "m.1.base.weight", "m.2.base.weight"] == names[-3:]


def test_a_plan_where_all_learns_is_laid_out_as_ever():
    """Its hash names the slots that an older version left."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    expected = ["m.0.weight", "m.0.bias", "m.1.weight", "m.1.bias", "rank.0.t"]
    assert expected == floats({"m": model, "t": torch.zeros(2)})
