"""Real ranks save a module whose parameter torch has cut into shards; anybody loads it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.servers.nursery import NURSERY
from torch import nn

import holdfast

HERE = Path(__file__).parent
WAIT_S = 240

pytestmark = pytest.mark.timeout(300)


def test_a_plain_module_takes_what_ranks_with_shards_have_saved(tmp_path):
    """The ranks have loaded it before, cut along the other dim, and gone on to the same bits."""
    environ = {
        "PYTHONPATH": str(HERE.parents[2] / "sdk"), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"
    }  # fmt: skip
    arguments = [[str(tmp_path), str(rank)] for rank in range(4)]
    NURSERY.together(HERE / "shards.py", arguments, env=environ, folder=tmp_path, timeout_s=WAIT_S)
    module = nn.Module()
    module.table = nn.Parameter(torch.zeros(6, 10))
    optimizer = torch.optim.AdamW(module.parameters())
    holdfast.load(tmp_path / "again", {"model": module, "optimizer": optimizer})

    expected = torch.load(tmp_path / "expected.pt")
    kept = optimizer.state[module.table]
    assert torch.equal(expected[""], module.table)
    assert torch.equal(expected["exp_avg"], kept["exp_avg"])
    assert torch.equal(expected["exp_avg_sq"], kept["exp_avg_sq"])
    assert kept["step"] == 3.0
