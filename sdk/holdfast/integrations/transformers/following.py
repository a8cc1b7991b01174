"""Follows one ``Trainer.train``: has it resume by its own means, and saves its steps.

A Trainer resumes from a folder. It is given one with ``trainer_state.json`` only, so that it knows
its step, and loads nothing itself. What it would load is put in its place at the first batch.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from holdfast.errors import InvalidRequestError
from holdfast.integrations.followed import Followed, Saving
from holdfast.integrations.transformers import trainer_state
from holdfast.integrations.transformers.batches import Batches, Pass
from holdfast.integrations.transformers.history import History
from holdfast.patches import Patches

_LOADS = ("_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_scaler",
          "_load_rng_state")  # fmt: skip


def follow(
    trainer: Any, saving: Saving, train: Callable[..., Any], resume: object, *args: Any, **kw: Any
) -> Any:
    """Return what ``train(trainer, resume, ...)`` does, resumed and saved.

    Raises:
        CheckpointError: as ``Followed`` does, and what is said by ``Saving.refuse``.
    """
    if why := _why_not(trainer):
        saving.refuse(InvalidRequestError(why))
        return train(trainer, resume, *args, **kw)
    try:
        followed = Followed(saving)
    except InvalidRequestError as error:
        saving.refuse(error)
        return train(trainer, resume, *args, **kw)
    patches = Patches()
    with followed, ExitStack() as stack:
        stack.callback(patches.undo)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-"))
        run = TrainerRun(trainer, followed, patches)
        if run.resumes(Path(folder)):
            resume = folder
        return train(trainer, resume, *args, **kw)


def _why_not(trainer: Any) -> str:
    if getattr(trainer, "is_deepspeed_enabled", False):
        return "the Trainer uses DeepSpeed: see holdfast.integrations.deepspeed"
    if trainer.args.auto_find_batch_size:
        return "auto_find_batch_size begins anew after a failure: find the size first, and name it"
    return ""


class TrainerRun:
    """One run of a Trainer; ``patches`` put all of it back."""

    def __init__(self, trainer: Any, followed: Followed, patches: Patches) -> None:
        self._trainer = trainer
        self._followed = followed
        self._patches = patches
        self._history = History()
        self._saved: dict[str, Any] | None = None
        self._batches: Batches | None = None
        self._epoch = 0
        self._is_off = False
        patches.replace(trainer, "get_train_dataloader", self._getting)
        patches.replace(trainer, "_init_training_state", self._placing)
        patches.replace(sys.modules["transformers.trainer"], "skip_first_batches", self._skipping)

    def resumes(self, folder: Path) -> bool:
        """Tell whether there is a checkpoint; if so, prepare the Trainer to resume from it.

        Raises:
            CheckpointError: it does not fit this Trainer.
        """
        if self._followed.decided is None:
            return False
        trainer, replace = self._trainer, self._patches.replace
        self._saved = saved = trainer_state.check(trainer, self._followed.decided.value("trainer"))
        trainer_state.write(trainer, saved, folder)
        self._history = History(saved["history_bytes"][1])
        for name in _LOADS:
            replace(trainer, name, lambda _: lambda *_args, **_kwargs: None)
        replace(trainer.args, "ignore_data_skip", lambda _: False)
        replace(trainer.args, "eval_on_start", lambda _: False)  # that was done before
        return True

    def _placing(self, original: Any) -> Any:
        def place(*args: Any, **kwargs: Any) -> Any:
            place = original(*args, **kwargs)
            if self._saved is not None:
                place = self._saved["epoch"], self._saved["given"]
            self._epoch = place[0]
            return place

        return place

    def _skipping(self, original: Any) -> Any:
        def skip(loader: Any, count: int = 0) -> Any:
            if not isinstance(loader, Batches):
                return original(loader, count)
            return loader if self._saved else loader.skip(count)

        return skip

    def _getting(self, original: Any) -> Any:
        def get() -> Any:
            loader = original()
            if self._batches is not None or self._is_off:
                return loader  # of a callback's own, perhaps
            try:
                self._batches = Batches(loader, self._asked)
            except InvalidRequestError as error:
                self._give_up(error)
                return loader
            return self._batches

        return get

    def _give_up(self, error: InvalidRequestError) -> None:
        """Let it train without saves, if it has not gone on from a checkpoint."""
        if self._saved is not None:
            raise error
        self._followed.saving.refuse(error)
        self._is_off = True

    def _asked(self, batches: Pass) -> None:
        """Load before the first batch, and save a step that is done before the next one."""
        given = 0
        if not self._followed.is_loaded and not self._is_off:
            given = self._begin(batches)
        batches.begin(given)
        step = self._trainer.state.global_step
        if not self._is_off and self._followed.is_new(step):
            self._take(batches)
            self._is_off = not self._followed.save(step, self._movers())

    def _begin(self, batches: Pass) -> int:
        """Load; return how many batches of its first pass were given before."""
        self._take(batches)
        try:
            restored = self._followed.load(self._parts(), self._movers())
        except InvalidRequestError as error:
            self._give_up(error)
            return 0
        if not restored:
            self._followed.step = self._trainer.state.global_step
            return 0
        saved: Any = self._followed.state["trainer"]
        trainer_state.put(self._trainer, saved, self._history.values(saved["history_bytes"][0]))
        return int(saved["given"])

    def _movers(self) -> list[object]:
        return [self._trainer.optimizer, self._trainer.lr_scheduler]

    def _parts(self) -> dict[str, object]:
        trainer = self._trainer
        assert self._batches is not None
        optimizer = trainer.optimizer
        scaler = getattr(trainer.accelerator, "scaler", None)
        return {
            "model": trainer.model_wrapped,
            "optimizer": getattr(optimizer, "optimizer", optimizer),
            "scheduler": trainer.lr_scheduler,
            **({"scaler": scaler} if scaler is not None else {}),
            "loader": self._batches.counted,
            "loss_sum": trainer_state.loss_sum(trainer),
        }

    def _take(self, batches: Pass) -> None:
        """Have the state hold the progress of the Trainer as it is now."""
        self._history.follow(self._trainer.state.log_history)
        self._followed.state["history"] = self._history.tensor
        self._followed.state["trainer"] = {
            **trainer_state.taken(self._trainer),
            "epoch": self._epoch + batches.batches.passes - 1,
            "given": batches.given,
            "history_bytes": [self._history.length, len(self._history.tensor)],
        }
