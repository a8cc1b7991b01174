"""Follows a script through its passes over data loaders: resumes it, and saves its steps.

A *pass* is one iteration over a data loader; without gradients it is an *evaluation*. The *main*
loader is the one whose pass began first of those that went on at a step. Steps are saved when it
is asked for its next batch: there the iteration is over, its schedulers and averages are done. The
last step of a pass is saved at the begin of the next one, for the same reason.

A resumed script begins at its first line. It *catches up*: each pass that was done before is given
one batch, so that what the script computes after a pass has something to compute with, and
``torch.save`` writes nothing. Where the checkpoint was taken, all of the state is loaded, and what
counts batches around the pass is moved on.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, cast
from weakref import ref

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from holdfast.auto.accelerated import Accelerated
from holdfast.auto.carried import carried_names, how_to_keep
from holdfast.auto.counters import Counters, counters_of
from holdfast.auto.files import Files
from holdfast.auto.gathering import Gathering, Loader, attributes_of, kept_tensors, streams_of
from holdfast.auto.passes import Guarded, OneBatch, Pass, Source
from holdfast.auto.place import KEY, PassPlace
from holdfast.checkpointer import Checkpointer
from holdfast.copying.cuda import CUDA
from holdfast.errors import InvalidRequestError, PreconditionError
from holdfast.patches import Patches
from holdfast.policy import AnyOf, EverySteps, OnPreemption
from holdfast.said import is_first_to_say
from holdfast.state.passes import PassedLoader
from holdfast.state.tracked import TrackedAttributes
from holdfast.untraced import untraced

STEPS_UNSAVED_MAX = 50
"""Steps of optimizers without one that counts, after which the log says why."""

LOOKS_MAX = 3
"""At the begins of passes, at what is around them; then a pass is looked at in its middle."""

UNKNOWN = -1
"""In place of the number of a loader that is not saved."""

log = logging.getLogger(__name__)


class Phase(Enum):
    """How far the script is."""

    BUILDING = "building"
    CATCHING_UP = "catching up"
    TRAINING = "training"
    HANDED_OVER = "handed over to a trainer"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Look:
    """What is around a pass at one moment: what counts its batches, what modules hold."""

    asked: ref[Pass]
    given: int
    counters: Counters
    values: list[int]
    attributes: dict[tuple[str, int], object]


class Driver:
    """Drives one job of this process; passes on other threads and in forks are left alone."""

    def __init__(
        self, job: str, gathering: Gathering, patches: Patches, *, steps_by: str, fresh: bool
    ) -> None:
        self._job = job
        self._gathering = gathering
        self._patches = patches
        self._steps_by = steps_by
        self._fresh = fresh
        self._pid = os.getpid()
        self._thread = threading.get_ident()
        self._phase = Phase.BUILDING
        self._checkpointer: Checkpointer | None = None
        self._target: PassPlace | None = None
        self._state: dict[str, object] = {}
        self._place = PassPlace(UNKNOWN, 0, 0).value()
        self._loaders: dict[int, PassedLoader] = {}
        self._counts: list[int] = []
        self._active: list[tuple[ref[Pass], int]] = []
        self._main = UNKNOWN
        self._step = 0
        self._due = False
        self._stepped: set[int] = set()
        self._steps_unsaved = 0
        self._said: set[str] = set()
        self._trainers = 0
        self._look: Look | None = None
        self._looks = 0
        self._is_looked_at = False
        self._counted = True
        self._captured = ""
        self._made_count = 0
        self._original: Any = DataLoader.__iter__
        self._accelerated = Accelerated(gathering, patches, self._begin_pass)
        self._files = Files(
            patches,
            counts=lambda: self._phase is Phase.BUILDING,
            is_muted=lambda: self._phase is Phase.CATCHING_UP,
            tell=lambda: self.say("torch.save writes nothing while the script catches up"),
        )

    def watch(self) -> None:
        """Have passes and steps come here from now on."""
        self._patches.replace(DataLoader, "__iter__", self._passes)
        self._patches.then(register_optimizer_step_post_hook(self._has_stepped).remove)

    def close(self) -> None:
        """End the session; what was saved stays.

        Raises:
            CheckpointError: the newest save is not safe.
        """
        self._phase = Phase.OFF
        if self._checkpointer is not None:
            self._checkpointer.close()

    def hand_over(self, what: str) -> bool:
        """Leave a training to ``what``, which has loops of its own; tell whether it is saved."""
        if not self._is_ours() or self._phase is Phase.OFF:
            return False
        if self._phase not in (Phase.BUILDING, Phase.HANDED_OVER):
            self.say(f"{what} comes after training loops of the script and is not saved")
            return False
        self._phase = Phase.HANDED_OVER
        return True

    @contextmanager
    def left_alone(self) -> Iterator[None]:
        """Leave all passes inside to somebody else, such as an evaluation of a Trainer."""
        self._trainers += 1
        try:
            yield
        finally:
            self._trainers -= 1

    # ------------------------------------------------------------------------------- passes

    def _passes(self, original: Any) -> Any:
        self._original = original

        def begin(loader: Loader) -> Iterator[Any]:
            found = None if self._accelerated.has(loader) else self._begin_pass(loader)
            return original(loader) if found is None else found

        return begin

    def _begin_pass(self, loader: Loader) -> Iterator[Any] | None:
        """Return a pass over what a script draws from; None: leave it alone."""
        handed = self._trainers or self._phase in (Phase.OFF, Phase.HANDED_OVER)
        is_ours = self._is_ours() and not handed
        return Pass(loader, self._source) if is_ours else None

    def _iterate(self, loader: Loader) -> Iterator[Any]:
        """Return an iterator as it is without us."""
        found = self._accelerated.iterate(loader)
        return cast("Iterator[Any]", self._original(loader)) if found is None else found

    def _is_ours(self) -> bool:
        return os.getpid() == self._pid and threading.get_ident() == self._thread

    def _source(self, asked: Pass) -> Source:
        """Return what gives the batches of a pass that is asked for its first one."""
        loader = asked.loader
        begins = torch.is_grad_enabled() and self._gathering.optimizers()
        if self._phase is Phase.BUILDING and self._is_ours() and begins:
            self._begin()
        if self._phase in (Phase.BUILDING, Phase.OFF) or not self._is_ours():
            return cast("Source", self._iterate(loader))
        if torch.is_grad_enabled():
            passed = self._loaders.get(id(loader))
            if passed is not None:
                return self._training(asked, passed)
            self.say(
                "a data loader was made after the first pass, or refused: while it is trained on, "
                "no step is saved; make all data loaders before the training loop"
            )
            self._active.append((ref(asked), UNKNOWN))
        batches = self._iterate(loader)
        return OneBatch(batches) if self._target else batches

    def _training(self, asked: Pass, passed: PassedLoader) -> Source:
        number = list(self._loaders).index(id(asked.loader))
        self._counts[number] += 1
        count = self._counts[number]
        if self._target and not self._target.is_in(number, count):
            self._active.append((ref(asked), number))
            return OneBatch(self._iterate(asked.loader))
        if self._target:
            self._load(asked, self._target)
        begins_next = number == self._main and not self._going()
        self._active.append((ref(asked), number))
        batches = iter(passed)
        if begins_next:
            self._boundary(asked, number, passed)

        def before() -> None:
            if not asked.given and not self._is_looked_at and self._looks < LOOKS_MAX:
                self._look_at(asked)
            elif asked.given:
                self._boundary(asked, number, passed)

        return Guarded(batches, before)

    def _going(self) -> list[int]:
        """Return the loaders of all passes that go on, the one that began first first."""
        alive = [(one, number, one()) for one, number in self._active]
        self._active = [
            (one, n) for one, n, asked in alive if asked is not None and not asked.ended
        ]
        return [number for _, number in self._active]

    def _boundary(self, asked: Pass, number: int, passed: PassedLoader) -> None:
        """Save the step that is done, if one is, between two batches of the main loader.

        After the last batch of a pass what the script does with its values is still to come.
        """
        if not self._due or self._phase is Phase.OFF or number != self._main:
            return
        if not self._is_ours():
            self._stop("another thread asks for the batches; nothing is saved from now on")
            return
        if passed.is_used_up():
            return
        assert self._checkpointer is not None
        self._due = False
        self._steps_unsaved = 0
        if not self._is_looked_at and asked.given:
            self._look_again(asked)
            if not self._is_looked_at:
                return
        if self._has_late_parts():
            return
        place = PassPlace(
            number=number,
            count=self._counts[number],
            given=asked.given,
            counted=self._counted,
            loads=self._files.loads,
            loaded=self._files.loaded,
            ranks=_ranks(),
        )
        self._place.update(place.value())
        self._checkpointer.step(self._step)

    def _look_at(self, asked: Pass) -> None:
        """Look at what is around a pass, to see later what has moved."""
        self._looks += 1
        counters = counters_of(asked)
        attributes = attributes_of(self._state.values())
        self._look = Look(ref(asked), asked.given, counters, counters.values(), attributes)

    def _look_again(self, asked: Pass) -> None:
        """See what has moved; nothing is saved inside a pass before that."""
        look = self._look
        if look is None or look.asked() is not asked:
            self._look_at(asked)
            return
        self._look, self._is_looked_at = None, True
        self._counted = look.counters.follow(look.values, asked.given - look.given)
        self._tell_carried(look, attributes_of(self._state.values()))

    def _stop(self, why: str) -> None:
        self._phase = Phase.OFF
        self.say(why)

    # -------------------------------------------------------------------------- begin, resume

    def _begin(self) -> None:
        """Make a checkpointer of what there is; leave the script alone if that cannot be."""
        if self._captured:
            self._stop(f"nothing is saved, the script runs on alone: {self._captured}")
            return
        loaders = {}
        for loader in self._gathering.loaders():
            if type(loader).__iter__ is not DataLoader.__iter__:
                self.say(f"{type(loader).__name__} iterates in a way of its own and is not saved")
                continue
            try:
                loaders[id(loader)] = PassedLoader([loader], partial(self._iterate, loader))
            except InvalidRequestError as error:
                self.say(error.message)
        self._loaders, self._counts = loaders, [0] * len(loaders)
        self._state, self._made_count = self._gathering.state(), self._gathering.count
        names = [name for name, value in self._state.items() if isinstance(value, Optimizer)]
        if self._steps_by and self._steps_by not in names:
            raise InvalidRequestError(
                f"--auto-steps-by {self._steps_by}: the optimizers are {', '.join(names)}"
            )
        scripted = [n for n, v in self._state.items() if isinstance(v, torch.jit.ScriptModule)]
        if scripted:
            self._stop(
                f"nothing is saved, the script runs on alone: {', '.join(scripted)} is a "
                f"TorchScript module; train the module that it was made of"
            )
            return
        numbered = {f"loader_{n}": loader for n, loader in enumerate(loaders.values(), 1)}
        try:
            self._checkpointer = Checkpointer(
                self._job,
                {**self._state, **numbered, KEY: self._place},
                save=AnyOf(EverySteps(1), OnPreemption()),
                fresh=self._fresh,
            )
        except InvalidRequestError as error:
            self._stop(f"nothing is saved, the script runs on alone: {error.message}")
            return
        decided = self._checkpointer.decide()
        if decided is None:
            self._checkpointer.restore()
            self._phase = Phase.TRAINING
            self.tell(f"job {self._job}: saves {', '.join([*self._state, *numbered])}")
            return
        self._target = PassPlace.of(decided.value(KEY))
        self._phase = Phase.CATCHING_UP
        self._check_files(self._target)
        if self._target.ranks != _ranks():
            self.tell(
                f"saved by {self._target.ranks} ranks, and now there are {_ranks()}: training goes "
                f"on with what is left of the epoch, but not with the same bits"
            )
        self._main = self._target.number
        atexit.register(self._tell_end)
        self.tell(f"job {self._job}: goes on after step {decided.step}, {self._target}")

    def _check_files(self, target: PassPlace) -> None:
        """Refuse a script that has skipped what it did before, and would skip it once more."""
        itself = "it seems to resume by itself, and both cannot; remove its files, or run it"
        if target.loads != self._files.loads:
            raise PreconditionError(
                f"job {self._job}: the script called torch.load {self._files.loads} times before "
                f"its first pass, and {target.loads} times when it was saved: {itself} without "
                f"--auto"
            )
        if target.loaded != self._files.loaded:
            raise PreconditionError(
                f"job {self._job}: the files that the script called torch.load with before its "
                f"first pass hold something else than when it was saved: {itself} without --auto"
            )

    def _load(self, asked: Pass, target: PassPlace) -> None:
        """Have all of the state be what it was at the checkpoint, and what counts around it."""
        assert self._checkpointer is not None
        restored = self._checkpointer.restore()
        if restored is None:
            raise PreconditionError(f"job {self._job}: what was to be restored is gone")
        for value in self._state.values():
            if isinstance(value, nn.Module):
                value.zero_grad(set_to_none=True)
        left = counters_of(asked).move_on(target.given) if target.counted and target.given else []
        if left:
            self.say(f"{', '.join(left)} around the batches begins at 0 again")
        asked.given = target.given
        self._step = restored.step
        self._target = None
        self._stepped.clear()
        self._phase = Phase.TRAINING
        if self._captured:
            self._stop(f"nothing is saved from now on: {self._captured}")

    def _tell_end(self) -> None:
        if self._phase is Phase.CATCHING_UP and os.getpid() == self._pid:
            log.error(
                "holdfast --auto: the script has ended before it came to where the checkpoint was "
                "taken, %s: nothing was loaded, and what it has printed means nothing; run it as "
                "it was, or start over with --fresh",
                self._target,
            )

    # ---------------------------------------------------------------------------------- steps

    @untraced
    def _has_stepped(self, optimizer: Optimizer, *_: object) -> None:
        """Count a step when each optimizer has stepped, or the one that was named."""
        if CUDA.capturing():
            self._has_captured(optimizer)
            return
        if self._phase in (Phase.OFF, Phase.CATCHING_UP) or os.getpid() != self._pid:
            return
        if self._phase is Phase.HANDED_OVER:
            if not self._trainers:
                self.say("what is trained beside a Trainer's own training is not saved")
            return
        known = {id(value): n for n, value in self._state.items() if isinstance(value, Optimizer)}
        self._steps_unsaved += 1
        if id(optimizer) in known:
            self._stepped.add(id(optimizer))
            self._count(known[id(optimizer)], known.keys())
        if self._steps_unsaved == STEPS_UNSAVED_MAX:
            self._tell_unsaved([name for n, name in known.items() if n not in self._stepped])

    def _has_captured(self, optimizer: Optimizer) -> None:
        """Save nothing any more: no hook tells of the steps that a graph replays."""
        if self._phase in (Phase.OFF, Phase.HANDED_OVER) or os.getpid() != self._pid:
            return
        self._captured = (
            f"the step of {type(optimizer).__name__} was captured in a CUDA graph, and nobody is "
            f"told of its replays; make a holdfast.Checkpointer and call its step()"
        )
        if self._phase is Phase.TRAINING:
            self._stop(f"nothing is saved from now on: {self._captured}")

    def _count(self, name: str, known: Collection[int]) -> None:
        """Count a step, if one is done now that the optimizer ``name`` has stepped."""
        if name != self._steps_by and (self._steps_by or self._stepped != known):
            return
        self._step += 1
        self._stepped.clear()
        going = self._going()
        if going and self._main not in going:
            self._main = going[0]
        self._due = self._main != UNKNOWN

    def _has_late_parts(self) -> bool:
        """Save nothing any more if something was made that a restart would not bring back."""
        if self._made_count == self._gathering.count:
            return False
        late = self._gathering.made_since(self._made_count)
        self._made_count = self._gathering.count
        if late:
            names = ", ".join(sorted({type(value).__name__ for value in late}))
            self._stop(
                f"made after the first pass over a data loader: {names}; nothing is saved from now "
                f"on; make all modules, optimizers and schedulers before the training loop"
            )
        return bool(late)

    # ------------------------------------------------------------------------------ telling

    def _tell_carried(self, look: Look, attributes: dict[tuple[str, int], object]) -> None:
        """Say what of the script itself a restart does not bring back."""
        kept = {id(value) for value in kept_tensors(self._state.values())}
        loaders = [passed.loader for passed in self._loaders.values()]
        streams = {id(one) for loader in loaders for one in streams_of(loader)}
        tracked = [v for v in self._state.values() if isinstance(v, TrackedAttributes)]
        names = carried_names(
            lambda value: id(value) in kept or id(value) in streams,
            {name for one in tracked for name in one.names},
            {name for one in tracked for name in one.variables},
        )
        names += sorted(
            {k[0] for k, value in attributes.items() if look.attributes.get(k) != value}
        )
        names += sorted({*look.counters.others, *([] if self._counted else ["enumerate, islice"])})
        if names:
            self.say(
                f"{', '.join(names)}: the training loop carries these from batch to batch, and a "
                f"restart begins with their first values{how_to_keep(names)}"
            )

    def _tell_unsaved(self, waiting: list[str]) -> None:
        if waiting:
            self.say(
                f"no step was counted, since {', '.join(waiting)} did not step: say which "
                f"optimizer counts with --auto-steps-by"
            )
        else:
            self.say(
                "no step was saved, since no pass over a data loader is going on: loop over a "
                "DataLoader, or make a holdfast.Checkpointer and call its step()"
            )

    def say(self, text: str) -> None:
        """Warn once, on one rank of those that would say the same."""
        if text not in self._said and is_first_to_say(text):
            log.warning("holdfast --auto: %s", text)
        self._said.add(text)

    def tell(self, text: str) -> None:
        """Tell people, on rank 0."""
        if os.environ.get("RANK", "0") == "0":
            log.warning("holdfast --auto: %s", text)


def _ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))
