"""Saves and resumes what a ``Trainer`` of Lightning fits, by one callback.

``Trainer(callbacks=[HoldfastCallback("my-job")])``: each step is saved when the next batch is
asked for, and ``trainer.fit`` goes on after the newest one that is safe. It is for whichever of
``lightning.pytorch`` and ``pytorch_lightning`` the script has imported.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.checkpointer import OnFailure
from holdfast.errors import InvalidRequestError
from holdfast.integrations.followed import Saving
from holdfast.integrations.lightning.following import FitRun
from holdfast.policy import Parity, Policy, Replicas, Retention

__all__ = ["FitRun", "Follows", "HoldfastCallback", "has_callback"]


def _package() -> Any:
    older = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
    return importlib.import_module("pytorch_lightning" if older else "lightning.pytorch")


_FINDERS = ("LearningRateFinder", "BatchSizeFinder")


class Follows(_package().Callback):  # type: ignore[misc]  # whichever it is
    """Has each ``fit`` saved and resumed as ``next_saving`` returns then."""

    def __init__(self, next_saving: Callable[[], Saving]) -> None:
        self._next_saving = next_saving
        self._run: FitRun | None = None

    def on_fit_start(self, trainer: Any, pl_module: object) -> None:
        """Decide where the training begins."""
        del pl_module
        finders = [one for one in trainer.callbacks if type(one).__name__ in _FINDERS]
        if any(one._early_exit for one in finders):  # noqa: SLF001 - a Tuner only looks
            return
        saving = self._next_saving()
        if finders:
            saving.refuse(
                InvalidRequestError(
                    f"{type(finders[0]).__name__} trains inside fit, before the training: look "
                    f"with a Tuner before fit"
                )
            )
            return
        self._run = FitRun(trainer, saving)

    def on_fit_end(self, trainer: object, pl_module: object) -> None:
        """End the session."""
        del trainer, pl_module
        self._end(None)

    def on_exception(self, trainer: object, pl_module: object, exception: BaseException) -> None:
        """End the session at once."""
        del trainer, pl_module
        self._end(exception)

    def _end(self, error: BaseException | None) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.end(error)


class HoldfastCallback(Follows):
    """Has ``Trainer.fit`` saved and resumed, as ``job``.

    Lightning's own checkpoints are not needed for that. A second ``fit`` with the same callback is
    a run of its own, ``job/training_2``.

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
        saving = Saving(
            job=job,
            save=save,
            persist=persist,
            keep=keep,
            replicas=replicas,
            on_failure=on_failure,
            fresh=fresh,
            also=lambda _: more,
        )
        trainings = itertools.count(1)
        super().__init__(lambda: saving.of_training(next(trainings)))


def has_callback(trainer: Any) -> bool:
    """Tell whether a Trainer has the callback."""
    return any(isinstance(one, HoldfastCallback) for one in trainer.callbacks)
