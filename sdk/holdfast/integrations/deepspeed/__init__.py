"""Storage for DeepSpeed: ``save_checkpoint`` writes Holdfast checkpoints, in the background.

Scripts stay as they are but for one call. A checkpoint of any ZeRO stage from 1 to 3 loads with any
other and on any number of ranks: what ZeRO cuts is stored as ranges of each parameter. Nothing in a
store is pickled or unpickled (P9).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.errors import InvalidRequestError

if TYPE_CHECKING:
    from holdfast.integrations.deepspeed.engine import OnFailure

__all__ = ["install", "wait"]


def install(engine: Any = None, *, on_failure: OnFailure = "warn") -> None:
    """Have DeepSpeed save with Holdfast: one engine, or all that are initialized from now on.

    Whether ``deepspeed`` was imported before does not matter. Checkpoints that DeepSpeed has
    written itself are not read: they are pickles.

    Args:
        engine: What ``deepspeed.initialize`` has returned; then the call is collective. None: all
            engines that it makes from now on.
        on_failure: What ``save_checkpoint`` does if the save before has failed: ``"warn"`` goes on
            (the log has said it), ``"raise"`` raises what it failed of, on all ranks.

    Raises:
        InvalidRequestError: the engine has something that is not supported, named; for engines to
            come ``initialize`` raises it.
    """
    from holdfast.integrations.deepspeed import installing  # noqa: PLC0415 - imports deepspeed

    if on_failure not in ("warn", "raise"):
        raise InvalidRequestError(f"on_failure is 'warn' or 'raise', not {on_failure!r}")
    if engine is None:
        installing.install_for_all(on_failure)
    else:
        installing.attach(engine, on_failure)


def wait(engine: Any) -> None:
    """Return once the last ``save_checkpoint`` of ``engine`` is a checkpoint, on disk and whole.

    Raises:
        OutcomeUnknownError: it is still not done after half an hour.
        CheckpointError: it has failed; on all ranks.
    """
    engine.checkpoint_engine.wait()
