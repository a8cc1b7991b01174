"""Squared norms on their way from a backward to the averages: summed over ranks, never waited for.

What one update has measured is read when the next one begins. Until then the sum over ranks, and
the copy from a GPU, have long ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from holdfast.elastic.noise_scale import Norms


@dataclass(slots=True, kw_only=True)
class Measured:
    """Squared norms of one update by parameter group, shape ``(groups,)``, in double precision.

    Summed over ranks ``local`` is the mean over the gradients, ``total`` that of their mean. See
    ``Norms`` for the rest.
    """

    local: torch.Tensor
    total: torch.Tensor
    count: float
    scale: float
    biased: bool = False


class Underway:
    """Numbers of one update that are being summed up.

    Args:
        measured: What this rank has measured.
        loss_scale: What the loss was multiplied by, on its device; None: nothing.
        group: Ranks to sum over; None: this one is alone.
    """

    def __init__(
        self, measured: Measured, loss_scale: torch.Tensor | None, group: dist.ProcessGroup | None
    ) -> None:
        self._measured = measured
        numbers = torch.cat((measured.local, measured.total))
        if loss_scale is not None:
            numbers.div_(loss_scale.to(numbers.device, torch.float64).square())
        self._numbers = numbers
        self._copied: Any = None
        self._work = dist.all_reduce(numbers, group=group, async_op=True) if group else None
        if numbers.is_cuda:
            self._copy_to_host()

    def _copy_to_host(self) -> None:
        """Queue the copy; the stream waits for the sum, this thread for nothing."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        host = torch.empty(self._numbers.shape, dtype=torch.float64, pin_memory=True)
        host.copy_(self._numbers, non_blocking=True)
        make: Any = torch.cuda.Event
        self._copied = make()
        self._copied.record()
        self._numbers = host

    def norms(self) -> Norms:
        """Return the numbers, once they are here."""
        if self._work is not None:
            self._work.wait()
        if self._copied is not None:
            self._copied.synchronize()
        numbers = self._numbers.tolist()
        groups_count = len(numbers) // 2
        return Norms(
            local=tuple(numbers[:groups_count]),
            total=tuple(numbers[groups_count:]),
            count=self._measured.count,
            scale=self._measured.scale,
            biased=self._measured.biased,
        )


def multiply(buffer: torch.Tensor, factor: float) -> None:
    """Multiply in place; by 0 nothing is left, also of a NaN."""
    if factor == 0:
        buffer.zero_()
    elif factor != 1:
        buffer.mul_(factor)
