"""The progress of Lightning's loops as plain data: taken at a save, and put back."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.errors import ManifestError

_FLAGS = ("_restarting", "_loaded_from_state_dict", "_resuming_from_checkpoint")


def taken(trainer: Any) -> dict[str, Any]:
    """Return how far the training loops are, and what they have of their last batch."""
    loop = trainer.fit_loop
    return {
        "loops": loop.state_dict(),
        "is_first_batch": trainer._logger_connector._first_loop_iter,  # noqa: SLF001
        "should_stop": trainer.should_stop,
    }


def check(saved: object) -> dict[str, Any]:
    """Return ``saved`` if it is the progress of such loops.

    Raises:
        ManifestError: it is none.
    """
    names = {"loops", "is_first_batch", "should_stop"}
    if not isinstance(saved, dict) or not names <= saved.keys():
        raise ManifestError("the checkpoint was not saved by a Trainer of Lightning")
    return saved


def announce(trainer: Any, saved: Mapping[str, Any]) -> None:
    """Have the loops know where they will go on: epoch and step are right for all hooks."""
    trainer.fit_loop.load_state_dict(copy.deepcopy(dict(saved["loops"])))


def put(trainer: Any, saved: Mapping[str, Any]) -> None:
    """Have the loops be at the saved place as if they had come there by themselves."""
    announce(trainer, saved)
    forget_restart(trainer)
    trainer._logger_connector._first_loop_iter = saved["is_first_batch"]  # noqa: SLF001
    trainer.should_stop = saved["should_stop"]


def forget_restart(trainer: Any) -> None:
    """Have the loops do what they do in a fresh run: Lightning skips the hooks of an epoch."""
    for loop in _all(trainer.fit_loop):
        for flag in _FLAGS:
            if hasattr(loop, flag):
                setattr(loop, flag, False)


def _all(loop: Any) -> Iterator[Any]:
    yield loop
    for value in vars(loop).values():
        if hasattr(value, "_restarting"):
            yield from _all(value)
