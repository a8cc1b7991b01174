"""What a survey compares to notice a change."""

from __future__ import annotations

import torch
from torch import nn

from holdfast.state.survey import Home, Identity, Survey


def test_a_script_that_lets_memory_of_a_device_go_gets_it_back():
    """Bit for bit; defect A8: sizes are compared there, and no second tensor is kept."""
    weight = nn.Parameter(torch.zeros(3, device="meta"))
    survey = Survey()
    survey.add("w", weight, home=Home.SHARED, deferred=False)
    identity = Identity(survey)

    assert identity.places == []
    assert identity.holds()
    weight.data = torch.zeros(4, device="meta")
    assert not identity.holds()
