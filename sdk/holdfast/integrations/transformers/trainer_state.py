"""What a Trainer knows of its progress, as plain data: taken at a save, and put back."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_callback import ExportableState, TrainerState

from holdfast.errors import InvalidRequestError, ManifestError

FILE_NAME = "trainer_state.json"
_OF_THIS_RUN = frozenset(
    {"is_local_process_zero", "is_world_process_zero", "max_steps", "num_train_epochs"}
)
"""What the Trainer finds out anew in each run, from its arguments and its rank."""
_APART = frozenset({"log_history", "stateful_callbacks"})
_SUMS = ("_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step",
         "_initial_num_input_tokens_seen", "current_flos")  # fmt: skip


def taken(trainer: Any) -> dict[str, Any]:
    """Return the progress of ``trainer``, without the history of logged values."""
    state = trainer.state
    return {
        "state": {
            field.name: getattr(state, field.name)
            for field in dataclasses.fields(state)
            if field.name not in _APART
        },
        "callbacks": [[type(one).__name__, one.state()] for one in _exportable(trainer)],
        "sums": {name: getattr(trainer, name) for name in _SUMS if hasattr(trainer, name)},
        "make": _make(trainer),
    }


def loss_sum(trainer: Any) -> torch.Tensor:
    """Return the sum of losses since the last log, which the Trainer changes in place."""
    found = getattr(trainer, "_tr_loss", None)
    return found if isinstance(found, torch.Tensor) else torch.zeros(())


def put(trainer: Any, saved: Mapping[str, Any], history: list[Any]) -> None:
    """Give ``trainer`` the saved progress; its callbacks are those that were there.

    Raises:
        InvalidRequestError: other callbacks have a state now.
    """
    for name, value in saved["state"].items():
        if name not in _OF_THIS_RUN:
            setattr(trainer.state, name, value)
    trainer.state.log_history = history
    for name, value in saved["sums"].items():
        setattr(trainer, name, value)
    here = _exportable(trainer)
    if [type(one).__name__ for one in here] != [name for name, _ in saved["callbacks"]]:
        raise InvalidRequestError(
            f"callbacks with a state were {', '.join(name for name, _ in saved['callbacks'])} when "
            f"it was saved, and are {', '.join(type(one).__name__ for one in here)} now: use those"
        )
    for one, (_, state) in zip(here, saved["callbacks"], strict=True):
        for name, value in {**state["args"], **state["attributes"]}.items():
            setattr(one, name, value)


def write(trainer: Any, saved: Mapping[str, Any], folder: Path) -> None:
    """Write the file by which ``trainer`` resumes, as far as it needs it before it trains."""
    state = TrainerState(**saved["state"], log_history=[], stateful_callbacks=_exportable(trainer))
    (folder / FILE_NAME).write_text(json.dumps(dataclasses.asdict(state)), encoding="utf-8")


def check(trainer: Any, saved: object) -> dict[str, Any]:
    """Return ``saved`` if it is the progress of such a Trainer.

    Raises:
        ManifestError: it is none.
        InvalidRequestError: batches are of another size here, so that their order is another one.
    """
    names = {"state", "callbacks", "sums", "make", "epoch", "given", "history_bytes"}
    if not isinstance(saved, dict) or not names <= saved.keys():
        raise ManifestError("the checkpoint was not saved by a Trainer of transformers")
    for name, value in _make(trainer).items():
        if saved["make"].get(name) != value:
            raise InvalidRequestError(
                f"the training was saved with {name}={saved['make'].get(name)} and has {value} "
                f"now, so its batches are others: use {name}={saved['make'].get(name)}, or start "
                f"over with fresh, or as another job"
            )
    return saved


def _make(trainer: Any) -> dict[str, int]:
    arguments = trainer.args
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    return {name: getattr(arguments, name) for name in names}


def _exportable(trainer: Any) -> list[Any]:
    every = [*trainer.callback_handler.callbacks, trainer.control]
    return [one for one in every if isinstance(one, ExportableState)]
