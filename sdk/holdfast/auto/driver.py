"""Follows a script through its passes over data loaders: resumes it, and saves its steps.

A *pass* is one iteration over a data loader; without gradients, or with all models in ``eval``, it
is an *evaluation*, which leaves the random streams as they were. The *main* loader is the one whose
pass began first of those that went on at a step. Steps are saved when it is asked for its next
batch: there the iteration is over, its schedulers and averages are done.

A resumed script begins at its first line. It *catches up*: each pass that was done before is given
one batch, so that what the script computes after a pass has something to compute with, and
``torch.save`` writes nothing. Where the checkpoint was taken, all of the state is loaded.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Collection, Iterator
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from holdfast.auto.carried import carried_names
from holdfast.auto.gathering import Gathering, Loader
from holdfast.auto.patches import Patches
from holdfast.auto.place import KEY, PassPlace
from holdfast.checkpointer import Checkpointer
from holdfast.errors import InvalidRequestError, PreconditionError
from holdfast.policy import AnyOf, EverySteps, OnPreemption
from holdfast.state import rng
from holdfast.state.dataloaders import Position, ResumableLoader

STEPS_UNSAVED_MAX = 50
"""Steps of optimizers without one that counts, after which the log says why."""

UNKNOWN = -1
"""In place of the number of a loader that is not saved."""

log = logging.getLogger(__name__)


class Phase(Enum):
    """How far the script is."""

    BUILDING = "building"
    CATCHING_UP = "catching up"
    TRAINING = "training"
    OFF = "off"


class PassedLoader(ResumableLoader):
    """A ``ResumableLoader`` around a loader whose own ``__iter__`` is the driver's."""

    def __init__(self, loader: Loader, make: Any) -> None:
        self.loader = loader
        self._position = Position(loader, make)

    def is_used_up(self) -> bool:
        """Tell whether the live iterator has given all of its batches."""
        return self._position.is_used_up()


class Driver:
    """Drives one job of this process; passes on other threads and in forks are left alone."""

    def __init__(
        self, job: str, gathering: Gathering, patches: Patches, *, steps_by: str, fresh: bool
    ) -> None:
        self._job = job
        self._gathering = gathering
        self._patches = patches
        self._muted = Patches()
        self._steps_by = steps_by
        self._fresh = fresh
        self._pid = os.getpid()
        self._thread = threading.get_ident()
        self._phase = Phase.BUILDING
        self._checkpointer: Checkpointer | None = None
        self._target: PassPlace | None = None
        self._state: dict[str, object] = {}
        self._place = PassPlace(UNKNOWN, 0, used_up=False).value()
        self._loaders: dict[int, PassedLoader] = {}
        self._counts: list[int] = []
        self._active: list[int] = []
        self._main = UNKNOWN
        self._step = 0
        self._due = False
        self._stepped: set[int] = set()
        self._steps_unsaved = 0
        self._said: set[str] = set()
        self._looked = False
        self._made_count = 0
        self._loads = 0
        self._iterate: Any = DataLoader.__iter__

    def watch(self) -> None:
        """Have passes and steps come here from now on."""
        self._patches.replace(DataLoader, "__iter__", self._passes)
        self._patches.replace(torch, "load", self._loading)
        self._patches.then(register_optimizer_step_post_hook(self._has_stepped).remove)
        self._patches.then(self._muted.undo)

    def close(self) -> None:
        """End the session; what was saved stays.

        Raises:
            CheckpointError: the newest save is not safe.
        """
        self._phase = Phase.OFF
        if self._checkpointer is not None:
            self._checkpointer.close()

    def _loading(self, original: Any) -> Any:
        def load(*args: Any, **kwargs: Any) -> Any:
            self._loads += self._phase is Phase.BUILDING
            return original(*args, **kwargs)

        return load

    # ------------------------------------------------------------------------------- passes

    def _passes(self, original: Any) -> Any:
        self._iterate = original

        def begin(loader: Loader) -> Iterator[Any]:
            elsewhere = os.getpid() != self._pid or threading.get_ident() != self._thread
            return original(loader) if elsewhere or self._is_off() else self._pass(loader)

        return begin

    def _is_off(self) -> bool:
        return self._phase is Phase.OFF

    def _pass(self, loader: Loader) -> Iterator[Any]:
        """Yield the batches of one pass; nothing is made before the first one is asked for."""
        if self._phase is Phase.BUILDING and self._gathering.optimizers():
            self._begin()
        if self._phase in (Phase.BUILDING, Phase.OFF):
            yield from self._iterate(loader)
        elif self._is_evaluation():
            yield from self._evaluation(loader)
        elif id(loader) in self._loaders:
            yield from self._training(loader)
        else:
            yield from self._unknown(loader)

    def _is_evaluation(self) -> bool:
        if not torch.is_grad_enabled():
            return True
        modules = [value for value in self._state.values() if isinstance(value, nn.Module)]
        return bool(modules) and not any(module.training for module in modules)

    def _evaluation(self, loader: Loader) -> Iterator[Any]:
        before = rng.take()
        try:
            yield from self._one_batch(loader) if self._target else self._iterate(loader)
        finally:
            rng.put(before)

    def _unknown(self, loader: Loader) -> Iterator[Any]:
        """Pass over a loader that was made too late or was refused: nothing is saved meanwhile."""
        self._say(
            "a data loader was made after the first pass, or refused: while it is trained on, no "
            "step is saved; make all data loaders before the training loop"
        )
        self._active.append(UNKNOWN)
        try:
            yield from self._one_batch(loader) if self._target else self._iterate(loader)
        finally:
            self._active.remove(UNKNOWN)

    def _training(self, loader: Loader) -> Iterator[Any]:
        passed = self._loaders[id(loader)]
        number = list(self._loaders).index(id(loader))
        self._counts[number] += 1
        self._active.append(number)
        try:
            if self._target and not self._target.is_inside(number, self._counts[number]):
                yield from self._one_batch(loader)
                if not self._target.is_after(number, self._counts[number]):
                    return
            if self._target:
                self._load()
            epoch = iter(passed)
            while True:
                self._boundary(number, passed)
                try:
                    batch = next(epoch)
                except StopIteration:
                    return
                yield batch
        finally:
            self._active.remove(number)

    def _one_batch(self, loader: Loader) -> Iterator[Any]:
        for batch in self._iterate(loader):
            yield batch
            return

    def _boundary(self, number: int, passed: PassedLoader) -> None:
        """Save the step that is done, if one is, between two batches of the main loader."""
        if not self._due or self._is_off() or number != self._main:
            return
        assert self._checkpointer is not None
        self._due = False
        if not self._looked:
            self._looked = True
            self._tell_carried()
        if self._has_late_parts():
            return
        place = PassPlace(number, self._counts[number], passed.is_used_up(), self._loads)
        self._place.update(place.value())
        self._checkpointer.step(self._step)

    # -------------------------------------------------------------------------- begin, resume

    def _begin(self) -> None:
        """Make a checkpointer of what there is; leave the script alone if that cannot be."""
        loaders = {}
        for loader in self._gathering.loaders():
            if type(loader).__iter__ is not DataLoader.__iter__:
                self._say(f"{type(loader).__name__} iterates in a way of its own and is not saved")
                continue
            try:
                loaders[id(loader)] = PassedLoader(loader, partial(self._iterate, loader))
            except InvalidRequestError as error:
                self._say(error.message)
        self._loaders, self._counts = loaders, [0] * len(loaders)
        self._state, self._made_count = self._gathering.state(), self._gathering.count
        names = [name for name, value in self._state.items() if isinstance(value, Optimizer)]
        if self._steps_by and self._steps_by not in names:
            raise InvalidRequestError(
                f"--auto-steps-by {self._steps_by}: the optimizers are {', '.join(names)}"
            )
        numbered = {f"loader_{n}": loader for n, loader in enumerate(loaders.values(), 1)}
        try:
            self._checkpointer = Checkpointer(
                self._job,
                {**self._state, **numbered, KEY: self._place},
                save=AnyOf(EverySteps(1), OnPreemption()),
                fresh=self._fresh,
            )
        except InvalidRequestError as error:
            self._phase = Phase.OFF
            self._say(f"nothing is saved, the script runs on alone: {error.message}")
            return
        decided = self._checkpointer.decide()
        if decided is None:
            self._checkpointer.restore()
            self._phase = Phase.TRAINING
            self._tell(f"job {self._job}: saves {', '.join([*self._state, *numbered])}")
            return
        self._target = PassPlace.of(decided.value(KEY))
        self._phase = Phase.CATCHING_UP
        if self._target.loads != self._loads:
            raise PreconditionError(
                f"job {self._job}: the script called torch.load {self._loads} times before its "
                f"first pass, and {self._target.loads} times when it was saved: it seems to resume "
                f"by itself, and both cannot; remove its files, or run it without --auto"
            )
        self._main = self._target.number
        self._muted.replace(torch, "save", lambda _: self._saves_nothing)
        atexit.register(self._tell_end)
        self._tell(f"job {self._job}: goes on after step {decided.step}, {self._target}")

    def _load(self) -> None:
        """Have all of the state be what it was at the checkpoint."""
        assert self._checkpointer is not None
        restored = self._checkpointer.restore()
        if restored is None:
            raise PreconditionError(f"job {self._job}: what was to be restored is gone")
        for value in self._state.values():
            if isinstance(value, nn.Module):
                value.zero_grad(set_to_none=True)
        self._step = restored.step
        self._target = None
        self._muted.undo()
        self._phase = Phase.TRAINING

    def _tell_end(self) -> None:
        if self._phase is Phase.CATCHING_UP and os.getpid() == self._pid:
            log.error(
                "holdfast --auto: the script has ended before it came to where the checkpoint was "
                "taken, %s: nothing was loaded, and what it has printed means nothing; run it as "
                "it was, or start over with --fresh",
                self._target,
            )

    def _saves_nothing(self, *_: object, **__: object) -> None:
        self._say("torch.save writes nothing while the script catches up")

    # ---------------------------------------------------------------------------------- steps

    def _has_stepped(self, optimizer: Optimizer, *_: object) -> None:
        """Count a step when each optimizer has stepped, or the one that was named."""
        if self._phase in (Phase.OFF, Phase.CATCHING_UP) or os.getpid() != self._pid:
            return
        known = {id(value): n for n, value in self._state.items() if isinstance(value, Optimizer)}
        self._steps_unsaved += 1
        if id(optimizer) in known:
            self._stepped.add(id(optimizer))
            self._count(known[id(optimizer)], known.keys())
        if self._due:
            self._steps_unsaved = 0
        elif self._steps_unsaved == STEPS_UNSAVED_MAX:
            self._tell_unsaved([name for n, name in known.items() if n not in self._stepped])

    def _count(self, name: str, known: Collection[int]) -> None:
        """Count a step, if one is done now that the optimizer ``name`` has stepped."""
        if name != self._steps_by and (self._steps_by or self._stepped != known):
            return
        self._step += 1
        self._stepped.clear()
        if self._main not in self._active:
            self._main = self._active[0] if self._active else UNKNOWN
        self._due = self._main != UNKNOWN

    def _has_late_parts(self) -> bool:
        """Save nothing any more if something was made that a restart would not bring back."""
        if self._made_count == self._gathering.count:
            return False
        late = self._gathering.made_since(self._made_count)
        self._made_count = self._gathering.count
        if late:
            self._phase = Phase.OFF
            names = ", ".join(sorted({type(value).__name__ for value in late}))
            self._say(
                f"made after the first pass over a data loader: {names}; nothing is saved from now "
                f"on; make all modules, optimizers and schedulers before the training loop"
            )
        return bool(late)

    # ------------------------------------------------------------------------------ telling

    def _tell_carried(self) -> None:
        names = carried_names()
        if names:
            self._say(
                f"{', '.join(names)}: the training loop carries these from batch to batch, and a "
                f"restart begins with their first values; to keep them, write before the loop\n"
                f"    kept = holdfast.track({', '.join(f'{name}={name}' for name in names)})\n"
                f"and use {', '.join(f'kept.{name}' for name in names)} in it"
            )

    def _tell_unsaved(self, waiting: list[str]) -> None:
        if waiting:
            self._say(
                f"no step was counted, since {', '.join(waiting)} did not step: say which "
                f"optimizer counts with --auto-steps-by"
            )
        else:
            self._say(
                "no step was saved, since no pass over a data loader is going on: loop over a "
                "DataLoader, or make a holdfast.Checkpointer and call its step()"
            )

    def _say(self, text: str) -> None:
        """Warn once."""
        if text not in self._said:
            self._said.add(text)
            log.warning("holdfast --auto: %s", text)

    def _tell(self, text: str) -> None:
        if os.environ.get("RANK", "0") == "0":
            log.warning("holdfast --auto: %s", text)
