"""DDP that adapts: the same wrapper, with its optimizer's learning rates following the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from holdfast.elastic.adaptation import Adaptation
from holdfast.elastic.ddp_gradients import DdpGradients
from holdfast.elastic.scaling_rules import ScalingRule


class AdaptiveDataParallel(DistributedDataParallel):
    """Data parallel training of ``module``, whose learning rate follows the batch size.

    It is a ``DistributedDataParallel``: state and names are the same. With an
    ``AdaptiveDataLoader`` it gathers the micro-batches of an update; ``optimizer.step()`` and
    ``zero_grad()`` may be called for each of them. Its progress and its averages are its extra
    state, which goes with it into a checkpoint.

    Args:
        module: The model.
        optimizer: What steps it, or several.
        lr_scheduler: One that is stepped with the optimizer, so that it counts updates and not
            micro-batches.
        mp_scaler: The ``GradScaler``, if there is one.
        scaling_rule: None is AdaScale, and AdamScale for Adam and AdamW.
        kwargs: Those of ``DistributedDataParallel``.

    Raises:
        InvalidRequestError: ``optimizer`` is none, or belongs to another adaptive model.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        lr_scheduler: Any = None,
        mp_scaler: Any = None,
        scaling_rule: ScalingRule | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(module, **kwargs)
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        self.adaptation = Adaptation(
            optimizers, scaling_rule=scaling_rule, lr_scheduler=lr_scheduler, mp_scaler=mp_scaler
        )
        self._gradients = DdpGradients(
            self, self.adaptation.optimizers, self.adaptation.divisors, self.adaptation.loss_scale
        )
        self.adaptation.bind(self._gradients)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return what the model makes of a micro-batch."""
        averages = True
        if torch.is_grad_enabled():
            averages = self._gradients.syncs(self.adaptation.before_forward())
        forward: Any = super().forward
        with nullcontext() if averages else self.no_sync():
            return forward(*inputs, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set gradients to zero, unless earlier micro-batches of the update have left them."""
        if self.adaptation.zeroes():
            super().zero_grad(set_to_none)

    @property
    def updates(self) -> int:
        """How many updates were made: optimizer steps, as ``Checkpointer.step`` counts them."""
        return self.adaptation.updates

    @property
    def progress(self) -> float:
        """How many updates at the initial batch size they were worth."""
        return self.adaptation.progress

    @property
    def gain(self) -> float:
        """How many updates at the initial batch size one like the last is worth."""
        return self.adaptation.gain

    def get_extra_state(self) -> dict[str, object]:
        """Return progress and averages, for ``state_dict``."""
        return self.adaptation.state_dict()

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what was saved."""
        self.adaptation.load_state_dict(state)
