"""One training that a framework's trainer drives: what is common to all of them.

It is decided before the trainer has made its objects, so that the trainer knows its step from the
begin; loaded right before its first batch, so that nothing that it does before matters; and saved
whenever it asks for the next batch, when all that follows a step is done.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from holdfast.checkpointer import Checkpointer, Decided, OnFailure
from holdfast.errors import CheckpointError, InvalidRequestError, PreconditionError
from holdfast.policy import AnyOf, EverySteps, OnPreemption, Parity, Policy, Replicas, Retention

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """How a training is saved: as the arguments of ``Checkpointer`` of the same names.

    ``save`` is each step unless it is given. ``also`` is given what a trainer has, and returns what
    is saved beside it; ``look`` is given the whole state before each save. ``say``: unless it is
    None, a training that cannot be saved goes on, and this is told why; ``tell`` where it begins.
    """

    job: str
    save: Policy | None = None
    persist: Policy | None = None
    keep: Retention | None = None
    replicas: int | Replicas | Parity = 1
    on_failure: OnFailure = "degrade"
    fresh: bool | str = False
    role: str = ""
    also: Callable[[Mapping[str, object]], Mapping[str, object]] = lambda _: {}
    look: Callable[[Mapping[str, object]], None] = lambda _: None
    say: Callable[[str], None] | None = None
    tell: Callable[[str], None] = log.info

    def of_training(self, number: int) -> Saving:
        """Return how the ``number``-th training of this process is saved, from 1."""
        return self if number == 1 else replace(self, role=self.role or f"training_{number}")

    def refuse(self, error: InvalidRequestError) -> None:
        """Say that a training is not saved, or raise why."""
        if self.say is None:
            raise error
        self.say(f"nothing is saved, the script runs on alone: {error.message}")


class Followed:
    """A training with its ``Checkpointer``, which is made and decided here.

    ``step`` is the newest that is done, ``is_loaded`` tells whether ``load`` was called.

    *Movers* are the optimizers and schedulers of the trainer. Some callbacks exchange them on the
    way, and nobody could put that back before the first batch: from there on nothing is saved.

    Raises:
        CheckpointError: as ``Checkpointer`` and ``decide`` do.
    """

    def __init__(self, saving: Saving) -> None:
        self.saving = saving
        self.state: dict[str, object] = {}
        self.is_loaded = False
        self._movers: list[tuple[object, int]] = []
        self._checkpointer = Checkpointer(
            saving.job,
            self.state,
            save=saving.save or AnyOf(EverySteps(1), OnPreemption()),
            persist=saving.persist,
            keep=saving.keep,
            replicas=saving.replicas,
            on_failure=saving.on_failure,
            fresh=saving.fresh,
            role=saving.role,
        )
        self.decided: Decided | None = self._checkpointer.decide()
        self.step = self.decided.step if self.decided else 0
        self._job = f"{saving.job}/{saving.role}" if saving.role else saving.job
        if self.decided:
            saving.tell(f"job {self._job}: goes on after step {self.step}, by its trainer")
            self._compare_ranks(self.decided)

    def _compare_ranks(self, decided: Decided) -> None:
        before, now = decided.value("ranks"), _ranks()
        if before != now:
            (self.saving.say or log.warning)(
                f"job {self._job}: saved by {before} ranks, and now there are {now}: training goes "
                f"on behind as many batches of each rank: in this epoch samples may be used twice "
                f"or not at all"
            )

    def load(self, parts: Mapping[str, object], movers: Iterable[object]) -> bool:
        """Load what was decided into ``parts``; tell whether anything was.

        Raises:
            CheckpointError: as ``Checkpointer.restore`` does.
        """
        self._movers = _look(movers)
        self.state.update({**parts, **self.saving.also(parts), "ranks": _ranks()})
        self.is_loaded = True
        restored = self._checkpointer.restore()
        if restored is None:
            self.saving.tell(f"job {self._job}: saves {', '.join(parts)} of its trainer")
        return restored is not None

    def is_new(self, step: int) -> bool:
        """Tell whether ``step`` is one that was not done before."""
        return step > self.step

    def save(self, step: int, movers: Iterable[object]) -> bool:
        """Save ``step`` if that is due; tell whether more can be saved.

        Raises:
            SystemExit: as ``Checkpointer.step`` does.
            CheckpointError: with ``on_failure="raise"``.
        """
        self.step = step
        self.saving.look(self.state)
        if _look(movers) == self._movers:
            self._checkpointer.step(step)
            return True
        why = (
            f"job {self._job}: something has exchanged the trainer's schedulers or optimizers, or "
            f"their groups of parameters, after the first batch: nothing is saved from step {step} "
            f"on, and a restart goes on before it"
        )
        if self.saving.on_failure == "raise":
            raise InvalidRequestError(why)
        (self.saving.say or log.error)(why)
        self.end()
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        del kind, trace
        self.end(error)

    def end(self, error: BaseException | None = None) -> None:
        """End the session, after ``error`` at once; what is not safe is logged.

        Raises:
            PreconditionError: the training has ended well without the checkpoint that was decided.
            CheckpointError: the newest save is not safe, with ``on_failure="raise"``.
        """
        try:
            self._checkpointer.__exit__(type(error) if error else None, error, None)
        except CheckpointError as unsafe:
            if self.saving.on_failure == "raise":
                raise
            log.error("job %s: %s", self._job, unsafe)  # noqa: TRY400 - the message says it
        if error is None and self.decided and not self.is_loaded:
            raise PreconditionError(
                f"job {self._job} was saved at step {self.decided.step}, and the training "
                f"ended before it asked for a batch: nothing was loaded; let it train further, or "
                f"start over with fresh",
                job=self._job,
            )


def _look(movers: Iterable[object]) -> list[tuple[object, int]]:
    """Return which objects these are, held so that no other takes a place, and their groups."""
    return [(one, len(getattr(one, "param_groups", ()))) for one in movers]


def _ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))
