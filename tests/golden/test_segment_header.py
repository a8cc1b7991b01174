"""The header bytes of a small plan: a change here is a change of the format, or of a name."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from holdfast.snapshot.plan import make_plan
from holdfast.state.capture import Capture

GOLDEN = Path(__file__).with_name("segment_header.txt")


def test_the_header_of_a_small_plan_is_what_it_was():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 3)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "n": 1, "t": torch.zeros(2, dtype=torch.bool)}
    capture = Capture(state, rank=0, world_size=1, rng=False)
    plan = make_plan(capture, job="job", run="r1", generation=1, rank=0, world_size=1)
    data = plan.template.fill(step=12, generation=3, parent=(10, 2))
    text = repr(data[:8]) + "\n" + data[8:].decode().rstrip().replace('},"', '},\n"') + "\n"

    assert GOLDEN.read_text(encoding="utf-8") == text
