"""Saves and resumes what a ``Trainer`` of Hugging Face's transformers trains, by one callback.

``Trainer(..., callbacks=[HoldfastCallback("my-job")])``: each step is saved when the next batch is
asked for, and ``trainer.train()`` goes on after the newest one that is safe.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from typing import Any

from transformers import Trainer, TrainerCallback

from holdfast.checkpointer import OnFailure
from holdfast.integrations.followed import Saving
from holdfast.integrations.transformers.following import follow
from holdfast.policy import Parity, Policy, Replicas, Retention

__all__ = ["HoldfastCallback", "callback_of", "follow"]


class HoldfastCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Has its Trainer's ``train`` saved and resumed, as ``job``.

    The Trainer's own checkpoints are not needed: ``save_strategy="no"`` saves their time. Where
    Holdfast has none, ``resume_from_checkpoint`` does what it always did. A second ``train`` of the
    same callback is a run of its own, ``job/training_2``.

    Args:
        job: Name of the job; a restart finds its checkpoints by it.
        save: When to save to memory; each step unless it is given.
        persist: Which saves also go to the object store.
        keep: Which checkpoints the object store keeps.
        replicas: Number of copies on other nodes, or ``Replicas``, or ``Parity``.
        on_failure: As for ``Checkpointer``.
        fresh: Start over at step 0, once per launch.
        also: What else belongs to the state, by name, such as an average of the weights.
    """

    def __init__(
        self,
        job: str,
        *,
        save: Policy | None = None,
        persist: Policy | None = None,
        keep: Retention | None = None,
        replicas: int | Replicas | Parity = 1,
        on_failure: OnFailure = "degrade",
        fresh: bool | str = False,
        also: Mapping[str, object] | None = None,
    ) -> None:
        more = {f"also_{name}": value for name, value in (also or {}).items()}
        self._saving = Saving(
            job=job,
            save=save,
            persist=persist,
            keep=keep,
            replicas=replicas,
            on_failure=on_failure,
            fresh=fresh,
            also=lambda _: more,
        )
        self._trainings = 0
        _install()

    def next_saving(self) -> Saving:
        """Return how the next training is saved."""
        self._trainings += 1
        return self._saving.of_training(self._trainings)


def callback_of(trainer: Any) -> HoldfastCallback | None:
    """Return the callback of a Trainer that has one."""
    found = (one for one in trainer.callback_handler.callbacks if isinstance(one, HoldfastCallback))
    return next(found, None)


def _install() -> None:
    """Have ``Trainer.train`` look for the callback: once per process."""
    original = Trainer.train
    if hasattr(original, "looks_for_holdfast"):
        return

    @wraps(original)
    def train(trainer: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        callback = callback_of(trainer)
        if callback is None:
            return original(trainer, resume_from_checkpoint, *args, **kwargs)
        saving = callback.next_saving()
        return follow(trainer, saving, original, resume_from_checkpoint, *args, **kwargs)

    train.looks_for_holdfast = True  # type: ignore[attr-defined]
    Trainer.train = train
