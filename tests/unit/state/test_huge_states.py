"""States of more than 2^31 elements that nobody has: reserved, planned and refused by numbers."""

from __future__ import annotations

import math

import pytest
import torch
from tests.unit.state import worlds
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from holdfast.errors import InvalidRequestError
from holdfast.format.boxes import Box
from holdfast.format.header import parse_header
from holdfast.state.capture import Capture

WIDE = (70_000, 70_000)
RANKS_COUNT = 8_192
ROWS = -(-WIDE[0] // RANKS_COUNT)


@pytest.mark.parametrize("shape", [(2**31 + 5,), WIDE], ids=str)
def test_what_a_model_on_the_meta_device_takes_is_known(shape):
    model = nn.ParameterList([torch.empty(shape, device="meta")])
    state = {"m": model, "o": torch.optim.AdamW(model.parameters())}

    estimate = Capture(state, rank=0, world_size=1).estimate()

    bytes_count = 3 * 4 * math.prod(shape)
    assert bytes_count <= estimate.whole_bytes <= bytes_count + (1 << 20)
    assert estimate.own_bytes == estimate.whole_bytes


def test_a_rank_of_thousands_plans_its_rows_of_a_tensor_beyond_32_bits(world):
    rank = WIDE[0] // ROWS  # the last that has any, and not all
    world(rank, RANKS_COUNT)
    mesh = init_device_mesh("cpu", (RANKS_COUNT,), mesh_dim_names=("huge",))
    first = rank * ROWS
    rows = torch.ones(WIDE[0] - first, WIDE[1], dtype=torch.bfloat16)
    tensor = DTensor.from_local(
        rows, mesh, [Shard(0)], run_check=False, shape=WIDE, stride=(WIDE[1], 1)
    )
    capture = Capture({"m": nn.ParameterList([tensor])}, rank=rank, world_size=RANKS_COUNT)

    plan = worlds.plan_of(capture)

    data = plan.template.fill(step=1, generation=1, parent=None)
    [entry] = [e for e in parse_header(data, plan.length_bytes).entries if e.spec.fqn == "m.0"]
    assert Box((first, 0), tuple(rows.shape)) == entry.spec.box
    assert (WIDE, rows.nbytes) == (entry.spec.shape, entry.end - entry.begin)
    assert capture.estimate().whole_bytes > 2 * math.prod(WIDE)


def test_a_tensor_on_meta_that_does_not_fit_is_refused_before_it_is_given_memory(tmp_path):
    """Defect: 4 TiB were asked for first, and what was refused was not said."""
    saved = {"m": nn.Linear(3, 4, bias=False)}
    target = {"m": nn.Linear(1 << 20, 1 << 20, bias=False, device="meta")}

    with pytest.raises(InvalidRequestError, match=r"'m\.weight' is \(1048576, 1048576\) .* now"):
        worlds.there_and_back(tmp_path, saved, target)
