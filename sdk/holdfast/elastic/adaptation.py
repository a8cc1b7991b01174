"""One model and its optimizers: which step acts, at which learning rates, how noisy gradients are.

Optimizers, scheduler and scaler keep their classes; ``step`` and what belongs to it are replaced on
the objects, so that the script's loop stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.elastic import running
from holdfast.elastic.adam_divisors import AdamDivisors, is_adam
from holdfast.elastic.gradients import Gradients
from holdfast.elastic.learning_rates import scaled
from holdfast.elastic.measured import Underway
from holdfast.elastic.noise_scale import NoiseScale
from holdfast.elastic.running import Running
from holdfast.elastic.scaling_rules import AdamScale, AdaScale, ScalingRule, Update
from holdfast.elastic.update_gate import UpdateGate
from holdfast.errors import InvalidRequestError


class Adaptation:
    """What a model's training adapts by. Made by ``AdaptiveDataParallel``, or by ``adapt``.

    ``progress`` are the updates at the initial batch size that all updates were worth, ``updates``
    those that were made. What an update measures counts from the next one on.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        *,
        scaling_rule: ScalingRule | None,
        lr_scheduler: Any = None,
        mp_scaler: Any = None,
    ) -> None:
        check_optimizers(optimizers)
        self.optimizers = list(optimizers)
        adam = is_adam(self.optimizers)
        self.scaling_rule = scaling_rule or (AdamScale() if adam else AdaScale())
        self.divisors = AdamDivisors(self.optimizers) if adam else None
        self.noise = NoiseScale(1)
        self.progress = 0.0
        self.updates = 0
        self.gate = UpdateGate()
        self._scaler = mp_scaler
        self._gradients: Gradients | None = None
        self._underway: Underway | None = None
        self._stepped: set[int] = set()
        self._factors: list[float] = []
        self._scale = 1.0
        for optimizer in self.optimizers:
            _replace(optimizer, "step", self._step)
            _replace(optimizer, "zero_grad", self._zero_grad)
        if lr_scheduler is not None:
            _replace(lr_scheduler, "step", self._pass_on)
        if mp_scaler is not None:
            for name in ("step", "unscale_", "update"):
                _replace(mp_scaler, name, self._pass_on)

    def bind(self, gradients: Gradients) -> None:
        """Say whose gradients these are."""
        self._gradients = gradients
        self.noise.add_groups(gradients.groups_count)

    @property
    def scale(self) -> float:
        """How many initial batches the last update was of."""
        return self._scale

    @property
    def gain(self) -> float:
        """How many updates at the initial batch size one like the last is worth."""
        return self.noise.gain(self._scale)

    def settle(self) -> None:
        """Have the averages know what the last update has measured."""
        underway, self._underway = self._underway, None
        if underway is not None:
            norms = underway.norms()
            self.noise.add_groups(len(norms.local))
            self.noise.update(norms)

    def loss_scale(self) -> torch.Tensor | None:
        """Return what the loss is multiplied by, on its device; None: nothing."""
        if self._scaler is None or not self._scaler.is_enabled():
            return None
        scale = self._scaler._scale  # noqa: SLF001 - get_scale() waits for the device
        return scale if isinstance(scale, torch.Tensor) else None

    def before_forward(self) -> Running | None:
        """Note that a model with gradients sees a batch; return which."""
        now = running.current()
        first = self.gate.forward(now)
        if first and now is not None and self._gradients is not None:
            self._gradients.begin(now)
        return now

    def zeroes(self) -> bool:
        """Tell whether gradients may be set to zero now."""
        now = running.current()
        if self._gradients is not None and self._gradients.reduced:
            self.gate.reduced(now)
        return self.gate.zeroes(now)

    def _zero_grad(self, act: Callable[..., Any], _: Any, *args: Any, **kwargs: Any) -> Any:
        return act(*args, **kwargs) if self.zeroes() else None

    def _pass_on(self, act: Callable[..., Any], _: Any, *args: Any, **kwargs: Any) -> Any:
        """Do what belongs to a step if the micro-batch is the last of its update."""
        now = running.current()
        return act(*args, **kwargs) if now is None or now.micro.last else None

    def _step(
        self, act: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> Any:
        now = running.current()
        if now is not None and now.micro.count > 1 and (args or kwargs.get("closure")):
            raise InvalidRequestError(
                f"{type(optimizer).__name__}.step(closure) cannot have a batch in "
                f"{now.micro.count} micro-batches: the closure sees one of them; use an optimizer "
                f"without a closure, or gradient_accumulation=False"
            )
        if not self.gate.steps(now):
            return None
        if not self._stepped or id(optimizer) in self._stepped:
            self._begin_update(now)
        self._stepped.add(id(optimizer))
        with scaled(optimizer, self._factors_of(optimizer)):
            return act(*args, **kwargs)

    def _begin_update(self, now: Running | None) -> None:
        """Count an update; it goes by what those before it have measured."""
        self._stepped.clear()
        assert self._gradients is not None, "bind() was called"
        self.settle()
        groups_count = self._gradients.groups_count
        self.noise.add_groups(groups_count)
        scale = now.scale if now else 1.0
        running.note_sync(self._gradients.sync_s)
        running.trains(self)
        measured = self._gradients.take()
        if measured is not None:
            self._underway = Underway(measured, self.loss_scale(), self._gradients.group)
        if self.divisors is not None:
            self._follow_scale(self.divisors, scale)
            self.divisors.stepped()
        self._scale = scale
        self._factors = self.scaling_rule.factors(
            Update(
                scale=scale,
                noise=self.noise,
                progress=self.progress,
                groups_count=groups_count,
            )
        )
        self.progress += self.noise.gain(scale) * (now.share if now else 1.0)
        self.updates += 1

    def _follow_scale(self, divisors: AdamDivisors, scale: float) -> None:
        rule = self.scaling_rule
        changed = self.updates > 0 and scale != self._scale
        if changed and isinstance(rule, AdamScale) and rule.reset_moments:
            divisors.reset()

    def _factors_of(self, optimizer: Optimizer) -> list[float]:
        """Return the factors of this optimizer's groups; those of all are in a row, or all one."""
        if len(self._factors) == 1:
            return self._factors * len(optimizer.param_groups)
        at = 0
        for other in self.optimizers:
            if other is optimizer:
                break
            at += len(other.param_groups)
        return self._factors[at : at + len(optimizer.param_groups)]

    def state_dict(self) -> dict[str, object]:
        """Return progress and averages, with what the last update has measured."""
        self.settle()
        return {
            "noise": self.noise.state_dict(),
            "progress": self.progress,
            "updates": self.updates,
            "scale": self._scale,
            "gradients": self._gradients.state_dict() if self._gradients else {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what was saved."""
        self._underway = None
        self._stepped.clear()
        self.noise.load_state_dict(state["noise"])
        self.progress = float(state["progress"])
        self.updates = int(state["updates"])
        self._scale = float(state["scale"])
        if self._gradients is not None:
            self._gradients.load_state_dict(state["gradients"])
        if self.divisors is not None:
            self.divisors.forget()


def adapt(
    module: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    lr_scheduler: Any = None,
    mp_scaler: Any = None,
    scaling_rule: ScalingRule | None = None,
) -> Adaptation:
    """Have the training of a module that ``fully_shard`` has sharded adapt.

    As ``AdaptiveDataParallel`` does, of which the arguments are. Put what is returned into the
    state, beside the model. Noise is that of all parameters together, and of gradients as they are.

    Raises:
        InvalidRequestError: the module is not sharded, or over other than data-parallel ranks.
    """
    from holdfast.elastic.fsdp_gradients import FsdpGradients  # noqa: PLC0415 - who has no FSDP2

    gradients = FsdpGradients(module)
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    adaptation = Adaptation(
        optimizers, scaling_rule=scaling_rule, lr_scheduler=lr_scheduler, mp_scaler=mp_scaler
    )
    adaptation.bind(gradients)

    def before_forward(_module: nn.Module, _inputs: Any) -> None:
        if torch.is_grad_enabled() and adaptation.before_forward() is None:
            gradients.begin(None)

    module.register_forward_pre_hook(before_forward)
    return adaptation


def check_optimizers(optimizers: Sequence[object]) -> None:
    """Refuse what is no optimizer, or none at all.

    Raises:
        InvalidRequestError: says what it is.
    """
    wrong = [one for one in optimizers if not isinstance(one, Optimizer)]
    if wrong or not optimizers:
        what = f"a {type(wrong[0]).__name__}" if wrong else "nothing"
        raise InvalidRequestError(
            f"an adaptive model is stepped by a torch.optim.Optimizer, or a list of them, and got "
            f"{what}"
        )
    steps = [getattr(one, "step", None) for one in optimizers]
    if any(hasattr(step, "holdfast_adapts") for step in steps):
        raise InvalidRequestError(
            "an optimizer belongs to another adaptive model already: give each its own"
        )


def _replace(owner: Any, name: str, instead: Callable[..., Any]) -> None:
    """Have ``owner.name(...)`` call ``instead(act, owner, ...)``, ``act`` being what it was.

    As a bound method: schedulers look for the function of a method that they wrap.
    """
    act = getattr(owner, name)

    def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
        return instead(act, self, *args, **kwargs)

    replaced.__name__ = name
    replaced.holdfast_adapts = True  # type: ignore[attr-defined]
    if hasattr(act, "_wrapped_by_lr_sched"):
        replaced._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # noqa: SLF001
    setattr(owner, name, MethodType(replaced, owner))
