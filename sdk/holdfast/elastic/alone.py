"""Norms where one rank is alone: its micro-batches are compared, or its updates with one another.

One copy of the gradients is kept for that: of what micro-batches before this one have summed up,
or, with one micro-batch in an update, of the last update's gradients. The latter outlives a
restart, or the averages would not be the same bit for bit; it is kept in 16 bits, of which the
rounding is a millionth of what is measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from holdfast.elastic.gradient_layout import BucketViews, GradientLayout
from holdfast.elastic.measured import Measured

PAIR_DTYPE = torch.bfloat16


class AloneNorms:
    """What one rank measures by itself.

    Call ``begin`` for each micro-batch, ``look`` for each of its buckets, then ``end``; ``take``
    once the update is complete.
    """

    def __init__(self) -> None:
        self._kept: torch.Tensor | None = None
        self._views: dict[BucketViews, list[torch.Tensor]] = {}
        self._is_pair = False
        self._valid = False
        self._size = 0
        self._loss_scale: torch.Tensor | None = None
        self._norms: dict[str, torch.Tensor] = {}
        self._sums: dict[str, torch.Tensor] = {}
        self._index = 0
        self._count = 1

    def relayout(self) -> None:
        """Drop what is kept: parameters were added or taken away."""
        self._kept = None
        self._views.clear()
        self._valid = False

    def forget_views(self) -> None:
        """Let go of buckets that are no more."""
        self._views.clear()

    def begin(
        self,
        layout: GradientLayout,
        like: torch.Tensor,
        *,
        at: tuple[int, int],
        size: int,
        loss_scale: torch.Tensor | None,
    ) -> None:
        """Begin with a micro-batch.

        Args:
            layout: Where gradients are.
            like: Of their dtype, and on their device.
            at: Index and count of the micro-batches of the update.
            size: Samples of the update; those of another size are not compared.
            loss_scale: What the loss is multiplied by, None: nothing.
        """
        self._index, self._count = at
        pair = self._count == 1
        kept = self._kept
        if kept is None or kept.numel() != layout.elements_count or self._is_pair != pair:
            self.relayout()
            dtype = PAIR_DTYPE if pair else like.dtype
            kept = torch.zeros(layout.elements_count, dtype=dtype, device=like.device)
            self._is_pair = pair
        self._kept = kept.to(like.device)
        if size != self._size:
            self._size, self._valid = size, False
        if pair and loss_scale is not None:
            self._follow(loss_scale.to(like.device, torch.float32))
        if not self._index:
            self._sums.clear()
        names = ("before", "between", "total") if pair else ("micro", "total")
        if any(n not in self._norms or len(self._norms[n]) != layout.views_count for n in names):
            self._norms = {
                n: torch.zeros(layout.views_count, dtype=torch.float64, device=like.device)
                for n in names
            }

    def _follow(self, loss_scale: torch.Tensor) -> None:
        """Have the last update's gradients be of this loss scale: it changes by powers of two."""
        if self._valid and self._loss_scale is not None and self._kept is not None:
            self._kept.mul_(loss_scale / self._loss_scale.to(loss_scale.device))
        self._loss_scale = loss_scale.clone()

    def grow(self, growth: float) -> None:
        """Have what is kept of earlier micro-batches follow their gradients, which were weighed."""
        if self._kept is not None and not self._is_pair:
            self._kept.mul_(growth)

    def look(self, views: BucketViews, divisors: list[torch.Tensor] | None) -> None:
        """Look at one bucket, as this micro-batch leaves it."""
        assert self._kept is not None, "begin() was called"
        kept = self._views.get(views)
        if kept is None:
            kept = self._views[views] = views.of_kept(self._kept)
        if not kept:
            return
        if self._is_pair:
            if self._valid:
                between = list(torch._foreach_sub(kept, views.gradients))  # noqa: SLF001
                views.put_norms(divided(kept, divisors), self._norms["before"])
                views.put_norms(divided(between, divisors), self._norms["between"])
        elif self._index:
            torch._foreach_sub_(kept, views.gradients)
            views.put_norms(divided(kept, divisors), self._norms["micro"])
        else:
            views.put_norms(divided(views.gradients, divisors), self._norms["micro"])
        if self._is_pair or self._index < self._count - 1:
            torch._foreach_copy_(kept, views.gradients)

    def look_at_mean(self, views: BucketViews, divisors: list[torch.Tensor] | None) -> None:
        """Look at one bucket once it holds the mean over the update."""
        views.put_norms(divided(views.gradients, divisors), self._norms["total"])

    def end(self, layout: GradientLayout) -> None:
        """End a micro-batch."""
        names = ["total"] if self._index == self._count - 1 else []
        names += ["before", "between"] if self._is_pair and self._valid else []
        for name in names:
            self._sums[name] = layout.sums(self._norms[name])
        if not self._is_pair:
            micro = layout.sums(self._norms["micro"])
            self._sums["micro"] = self._sums["micro"] + micro if self._index else micro

    def take(self, scale: float) -> Measured | None:
        """Return the norms of an update at ``scale``; None: there was nothing to compare with."""
        if not self._is_pair:
            local = self._sums["micro"] / self._count
            return Measured(local=local, total=self._sums["total"], count=self._count, scale=scale)
        valid, self._valid = self._valid, True
        if not valid:
            return None
        local = (self._sums["before"] + self._sums["total"]) / 2
        # The mean of two gradients, less what they differ by: no large numbers are subtracted.
        total = local - self._sums["between"] / 4
        return Measured(local=local, total=total, count=2, scale=2 * scale, biased=True)

    def state_dict(self) -> dict[str, object]:
        """Return the last update's gradients, if they are what is kept."""
        if not (self._is_pair and self._valid):
            return {}
        return {"gradients": self._kept, "loss_scale": self._loss_scale, "size": self._size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with saved gradients; of other parameters they are dropped in ``begin``."""
        self.relayout()
        if "gradients" in state:
            self._kept, self._loss_scale = state["gradients"], state["loss_scale"]
            self._size = int(state["size"])
            self._is_pair = self._valid = True


def divided(tensors: list[torch.Tensor], divisors: list[torch.Tensor] | None) -> list[torch.Tensor]:
    """Return the tensors divided by as many divisors; None: as they are."""
    if divisors is None:
        return tensors
    return list(torch._foreach_div(tensors, divisors))  # noqa: SLF001
