"""What averages gradients over ranks, as the rest sees it: DDP, or FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from holdfast.elastic.measured import Measured
from holdfast.elastic.running import Running

LossScale = Callable[[], torch.Tensor | None]
"""Returns what the loss is multiplied by now, on its device; None: nothing."""


class Gradients(Protocol):
    """The gradients of one model. Only the training thread calls."""

    @property
    def replicas(self) -> int:
        """How many ranks average their gradients."""
        ...

    @property
    def groups_count(self) -> int:
        """For how many parameter groups norms are measured: all of them, or one for all."""
        ...

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks to sum norms over; None: this one is alone."""
        ...

    @property
    def reduced(self) -> bool:
        """Whether the gradients of a whole update were averaged since the last ``take``."""
        ...

    @property
    def sync_s(self) -> float:
        """How long the last backward has waited for other ranks, in seconds."""
        ...

    def begin(self, now: Running) -> None:
        """Begin with a micro-batch, before its forward."""
        ...

    def take(self) -> Measured | None:
        """Return the norms of the update whose gradients were averaged last; None: not measured."""
        ...

    def state_dict(self) -> dict[str, object]:
        """Return what the next update is compared with, if that is this one."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what was saved."""
        ...
