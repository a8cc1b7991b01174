"""Optimizers of torch that leave the steps to another one inside them, for some of the parameters.

``ZeroRedundancyOptimizer`` deals the parameters out to the ranks of a group: what is kept of one
lies on the rank that steps it, alone. ``ShardedOptimizer`` steps what is here of ``ShardedTensor``.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from holdfast.errors import InvalidRequestError

_ZERO = "ZeroRedundancyOptimizer"
_INNER = {_ZERO: "optim", "ShardedOptimizer": "_optim"}
"""Of each class: where it keeps the optimizer that steps."""


def check_inner(path: str, optimizer: Any) -> None:
    """Refuse an optimizer called ``path`` of which nobody can tell when it steps.

    Raises:
        InvalidRequestError: names it.
    """
    if _outer(optimizer) == _ZERO and optimizer._overlap_with_ddp:  # noqa: SLF001
        raise InvalidRequestError(
            f"{path!r} is a {_ZERO} that steps while gradients are computed: make it with "
            f"overlap_with_ddp=False",
            key=path,
        )


def stepping(optimizer: Optimizer) -> Optimizer:
    """Return what steps the parameters that this rank steps, and has their state: mostly itself."""
    outer = _outer(optimizer)
    inner: Optimizer = getattr(optimizer, _INNER[outer]) if outer else optimizer
    return inner


def announcing(optimizer: Optimizer) -> Optimizer:
    """Return that whose steps torch's hooks tell of: what steps, or what a wrapper has inside.

    A wrapper, such as Accelerate's, has the groups of another one as its own, and no hook.
    """
    steps = stepping(optimizer)
    inside = getattr(steps, "optimizer", None)
    if isinstance(inside, Optimizer) and inside.param_groups is steps.param_groups:
        return inside
    return steps


def dealt_out(optimizer: Any) -> tuple[int, ...]:
    """Return to which ranks the parameters are dealt out; empty: this rank steps all of them."""
    if _outer(optimizer) != _ZERO:
        return ()
    return tuple(sorted(dist.get_process_group_ranks(optimizer.process_group)))


def _outer(optimizer: Optimizer) -> str:
    names = (cls.__name__ for cls in type(optimizer).__mro__)
    return next((name for name in names if name in _INNER), "")
