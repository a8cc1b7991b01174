"""What Adam divides gradients by, so that their noise is measured as its steps feel it.

Source: Pollux OSDI 2021, section 3 (pre-conditioned gradients). The first steps, of which the
second moment says little, are left as they are, as in its published code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Adam, AdamW, Optimizer

from holdfast.elastic.gradient_layout import BucketViews, views_of

STEPS_MIN = 5
"""Before so many steps a second moment is of too few gradients."""


def is_adam(optimizers: Sequence[Optimizer]) -> bool:
    """Tell whether all of them divide gradients as Adam does."""
    return all(isinstance(optimizer, (Adam, AdamW)) for optimizer in optimizers)


class _Moments:
    """The second moments of one bucket, in the order of its views, with numbers of their groups."""

    def __init__(self, views: BucketViews, optimizers: Sequence[Optimizer]) -> None:
        state: dict[int, Any] = {id(p): s for one in optimizers for p, s in one.state.items()}
        self.first: object = None
        self.tensors: list[torch.Tensor] = []
        self.betas: list[float] = []
        self.epsilons: list[float] = []
        self.complete = True
        for parameter, group in views.placed:
            moment = state.get(id(parameter), {}).get("exp_avg_sq")
            if moment is None:
                self.complete = False  # one that has had no gradient yet
                return
            self.first = self.first if self.tensors else moment
            cut = views_of(moment)
            self.tensors += cut
            self.betas += [float(group["betas"][1])] * len(cut)
            self.epsilons += [float(group["eps"])] * len(cut)


class AdamDivisors:
    """The roots of Adam's second moments, debiased, bucket by bucket.

    ``steps`` of the moments are counted here once they are known: to read them may wait for a GPU.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._steps: int | None = None
        self._known: dict[BucketViews, _Moments] = {}
        for optimizer in optimizers:
            optimizer.register_load_state_dict_post_hook(lambda _: self.forget())

    def forget(self) -> None:
        """Look at the optimizers anew: their state was replaced."""
        self._steps = None
        self._known.clear()

    def forget_views(self) -> None:
        """Let go of buckets that are no more."""
        self._known.clear()

    def stepped(self) -> None:
        """Note that the optimizers make a step."""
        if self._steps is not None:
            self._steps += 1

    @property
    def steps(self) -> int:
        """How many steps the moments are of."""
        if self._steps is None:
            states = (s for one in self._optimizers for s in one.state.values())
            self._steps = next((int(state["step"]) for state in states if "step" in state), 0)
        return self._steps

    def of(self, views: BucketViews) -> list[torch.Tensor] | None:
        """Return what the views of a bucket are divided by; None: they are left as they are."""
        if self.steps < STEPS_MIN:
            return None
        moments = self._known.get(views)
        if moments is None or not moments.complete:
            moments = self._known[views] = _Moments(views, self._optimizers)
        if not (moments.complete and moments.tensors):
            return None
        unbias = [1 - beta**self.steps for beta in moments.betas]
        divisors = torch._foreach_div(moments.tensors, unbias)  # noqa: SLF001 - its public name
        torch._foreach_sqrt_(divisors)
        torch._foreach_add_(divisors, moments.epsilons)
        return list(divisors)

    def reset(self) -> None:
        """Have the optimizers forget their moments and count their steps anew."""
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                for value in state.values():
                    if isinstance(value, torch.Tensor):
                        value.zero_()
        self._steps = 0
