"""Learning rates multiplied for one step, and as they were afterwards.

Between steps a schedule, a log and a checkpoint see what the user has chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.optim import Optimizer


@contextmanager
def scaled(optimizer: Optimizer, factors: Sequence[float]) -> Iterator[None]:
    """Have the learning rate of each group be ``factors`` times what it is, inside.

    One that is a tensor stays that tensor: compiled and captured steps hold it.
    """
    groups = [
        (group, factor)
        for group, factor in zip(optimizer.param_groups, factors, strict=True)
        if factor != 1.0 and "lr" in group
    ]
    before = [
        group["lr"].clone() if isinstance(group["lr"], torch.Tensor) else group["lr"]
        for group, _ in groups
    ]
    for group, factor in groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].mul_(factor)
        else:
            group["lr"] *= factor
    try:
        yield
    finally:
        for (group, _), rate in zip(groups, before, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate
