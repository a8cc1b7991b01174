"""Squared norms of DDP's gradients: of this rank's before they are summed up, of the mean after.

A communication hook does what DDP does by itself, and looks at each bucket before and after. It
reads what lies there anyway, in a pass over the gradients each, and waits for no result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from holdfast.elastic import running
from holdfast.elastic.adam_divisors import AdamDivisors
from holdfast.elastic.alone import AloneNorms, divided
from holdfast.elastic.gradient_layout import BucketViews, GradientLayout, layout_key
from holdfast.elastic.gradients import LossScale
from holdfast.elastic.measured import Measured, multiply
from holdfast.elastic.running import Running
from holdfast.elastic.sync_clock import SyncClock

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket


class DdpGradients:
    """The norms of one wrapper's gradients.

    Args:
        ddp: The wrapper, with no communication hook yet.
        optimizers: Whose groups are told apart.
        divisors: What gradients are divided by first; None: nothing.
        loss_scale: Tells what the loss is multiplied by.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizers: list[Optimizer],
        divisors: AdamDivisors | None,
        loss_scale: LossScale,
    ) -> None:
        self._ddp = ddp
        self._optimizers = optimizers
        self._divisors = divisors
        self._loss_scale = loss_scale
        self._group: dist.ProcessGroup = ddp.process_group
        self._ranks = dist.get_world_size(self._group)
        self._alone = AloneNorms() if self._ranks == 1 else None
        self._views: dict[int, BucketViews] = {}
        self._layout: GradientLayout | None = None
        self._learn: list[torch.Tensor] = [p for p in ddp.parameters() if p.requires_grad]
        self._local = self._total = torch.zeros(0)
        self._of: Running | None = None
        self._measures = False
        self._complete = False
        self._clock = SyncClock()
        # Not the method: torch wants annotations to be classes, and ours are texts.
        ddp.register_comm_hook(None, lambda _, bucket: self._hook(bucket))

    @property
    def replicas(self) -> int:
        """How many ranks average their gradients."""
        return self._ranks

    @property
    def groups_count(self) -> int:
        """How many parameter groups there are."""
        return sum(len(optimizer.param_groups) for optimizer in self._optimizers)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks to sum norms over; None: this one is alone."""
        return None if self._alone else self._group

    def begin(self, now: Running) -> None:
        """Weigh what micro-batches before have left; only where they are not equally large."""
        growth = now.growth
        if growth != 1.0:
            left = [p.grad for p in self._learn if p.grad is not None]
            torch._foreach_mul_(left, growth)
            if self._alone is not None:
                self._alone.grow(growth)

    def syncs(self, now: Running | None) -> bool:
        """Tell whether the gradients of a micro-batch go through the hook.

        Alone they all do: it is how one is told from those before it.
        """
        return now is None or now.micro.last or self._alone is not None

    @property
    def reduced(self) -> bool:
        """Whether the gradients of a whole update were averaged since the last ``take``."""
        return self._complete

    @property
    def sync_s(self) -> float:
        """How long the last backward has waited for other ranks, in seconds."""
        return 0.0 if self._alone else self._clock.seconds()

    def take(self) -> Measured | None:
        """Return the norms of the update whose gradients were averaged last; None: not measured."""
        complete, self._complete = self._complete, False
        if not (complete and self._measures and self._layout is not None):
            return None
        scale = self._of.scale if self._of else 1.0
        if self._alone is not None:
            return self._alone.take(scale)
        count = self._of.batching.gradients_count if self._of else float(self._ranks)
        # Of this rank's gradient that much has gone into the mean.
        part = (self._of.portion if self._of else 1.0) / self._ranks
        # Summed over ranks both are means: each rank has the whole total.
        return Measured(
            local=self._layout.sums(self._local) / (self._ranks * part**2),
            total=self._layout.sums(self._total) / self._ranks,
            count=count,
            scale=scale,
        )

    def state_dict(self) -> dict[str, object]:
        """Return what the next update is compared with, if that is this one."""
        return self._alone.state_dict() if self._alone else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what was saved."""
        if self._alone is not None:
            self._alone.load_state_dict(state)

    def _hook(self, bucket: GradBucket) -> Future[torch.Tensor]:
        buffer = bucket.buffer()
        if bucket.index() == 0:
            self._begin(running.current(), buffer)
        views = self._views_of(bucket, buffer) if self._measures else None
        divisors = self._divisors.of(views) if self._divisors and views else None
        if self._alone is not None:
            self._look_alone(self._alone, views, divisors, buffer)
            if bucket.is_last():
                self._end_alone(self._alone)
            done: Future[torch.Tensor] = Future()
            done.set_result(buffer)
            return done
        multiply(buffer, (self._of.factor if self._of else 1.0) / self._ranks)
        return self._averaged(buffer, views, divisors, last=bucket.is_last())

    def _averaged(
        self,
        buffer: torch.Tensor,
        views: BucketViews | None,
        divisors: list[torch.Tensor] | None,
        *,
        last: bool,
    ) -> Future[torch.Tensor]:
        """Return the sum over ranks, once it is there; look before and after."""
        if views is not None:
            views.put_norms(divided(views.gradients, divisors), self._local)
        if last:
            self._clock.begin(cuda=buffer.is_cuda)
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        assert work is not None, "it was asked for"

        def look(summed: Future[list[torch.Tensor]]) -> torch.Tensor:
            if views is not None:
                views.put_norms(divided(views.gradients, divisors), self._total)
            self._clock.end()
            self._complete = self._complete or last
            return summed.value()[0]

        return cast("Future[torch.Tensor]", work.get_future().then(look))

    def _look_alone(
        self,
        alone: AloneNorms,
        views: BucketViews | None,
        divisors: list[torch.Tensor] | None,
        buffer: torch.Tensor,
    ) -> None:
        """Look at what a micro-batch of this rank has left, and make the mean of the last one."""
        if views is not None:
            alone.look(views, divisors)
        if self._of is not None and self._of.micro.last:
            multiply(buffer, self._of.factor)
        if views is not None and (self._of is None or self._of.micro.last):
            alone.look_at_mean(views, divisors)

    def _end_alone(self, alone: AloneNorms) -> None:
        if self._measures and self._layout is not None:
            alone.end(self._layout)
        self._complete = self._of is None or self._of.micro.last

    def _begin(self, now: Running | None, like: torch.Tensor) -> None:
        """Begin with the gradients of a micro-batch."""
        self._of, self._complete = now, False
        self._measures = now is None or (now.whole and not now.micro.spare)
        if self._layout is None or self._layout.key != layout_key(self._optimizers):
            self._learn = [p for p in self._ddp.parameters() if p.requires_grad]
            self._layout = GradientLayout(self._optimizers, self._learn)
            self._forget_views()
        count = self._layout.views_count
        if self._alone is not None:
            if self._measures:
                at = (now.micro.index, now.micro.count) if now else (0, 1)
                size = now.batching.size if now else 0
                loss_scale = self._loss_scale()
                self._alone.begin(self._layout, like, at=at, size=size, loss_scale=loss_scale)
        elif len(self._local) != count or self._local.device != like.device:
            self._local, self._total = (
                torch.zeros(count, dtype=torch.float64, device=like.device) for _ in range(2)
            )
        else:  # what no bucket writes any more must not stay
            self._local.zero_()
            self._total.zero_()

    def _views_of(self, bucket: GradBucket, buffer: torch.Tensor) -> BucketViews:
        """Return the views of a bucket; torch makes other buckets once after the first backward."""
        views = self._views.get(bucket.index())
        if views is None or views.buffer is not buffer:
            if views is not None:
                self._forget_views()
            assert self._layout is not None
            views = BucketViews(self._layout, buffer, bucket.parameters())
            self._views[bucket.index()] = views
        return views

    def _forget_views(self) -> None:
        self._views.clear()
        if self._alone is not None:
            self._alone.forget_views()
        if self._divisors is not None:
            self._divisors.forget_views()
