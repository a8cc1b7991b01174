"""Scripts that train by the Trainer of a framework: it is followed, in place of the script's loops.

Transformers and Lightning are looked for when the script imports them, and not before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial, wraps
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import nn

from holdfast.auto.gathering import Gathering, attributes_of, look_of
from holdfast.auto.imports import await_modules
from holdfast.errors import InvalidRequestError
from holdfast.integrations.followed import Saving
from holdfast.patches import Patches
from holdfast.state.tracked import TrackedAttributes

_LIBRARIES = ("transformers.", "accelerate.", "lightning.", "pytorch_lightning.", "trl.", "peft.")
LOOKS = (1, 2)
"""Saves at which it is looked at what objects of the script hold."""


class Script(Protocol):
    """What is known of the script: ``Driver`` as it is seen here."""

    def hand_over(self, what: str) -> bool:
        """Leave a training to ``what``; tell whether it is to be saved."""
        ...

    def left_alone(self) -> AbstractContextManager[None]:
        """Leave all passes inside to somebody else."""
        ...

    def say(self, text: str) -> None:
        """Warn once."""
        ...

    def tell(self, text: str) -> None:
        """Tell people, on rank 0."""
        ...


class Trainers:
    """Follows each ``Trainer.train`` and ``Trainer.fit`` of a script; each has a run of its own."""

    def __init__(
        self, job: str, gathering: Gathering, script: Script, patches: Patches, *, fresh: bool
    ) -> None:
        self._job = job
        self._gathering = gathering
        self._script = script
        self._patches = patches
        self._fresh = fresh
        self._trainings = 0
        lightning = ("lightning.pytorch", "pytorch_lightning")
        wanted = {f"{name}.trainer.trainer": self._has_lightning for name in lightning}
        await_modules({**wanted, "transformers.trainer": self._has_transformers}, patches)

    def _has_transformers(self, module: ModuleType) -> None:
        self._patches.replace(module.Trainer, "train", self._training)
        for name in ("evaluate", "predict"):
            self._patches.replace(module.Trainer, name, self._evaluating)

    def _has_lightning(self, module: ModuleType) -> None:
        self._patches.replace(module.Trainer, "fit", self._fitting)
        for name in ("validate", "test", "predict"):
            self._patches.replace(module.Trainer, name, self._evaluating)

    def _evaluating(self, original: Any) -> Any:
        @wraps(original)
        def evaluate(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            with self._script.left_alone():
                return original(trainer, *args, **kwargs)

        return evaluate

    def _training(self, original: Any) -> Any:
        @wraps(original)
        def train(trainer: Any, resume: object = None, *args: Any, **kwargs: Any) -> Any:
            from holdfast.integrations import transformers  # noqa: PLC0415 - the script has it

            callbacks = trainer.callback_handler.callbacks
            resume = kwargs.pop("resume_from_checkpoint", resume)
            if not self._script.hand_over("Trainer.train"):
                return original(trainer, resume, *args, **kwargs)
            with self._script.left_alone():
                if transformers.callback_of(trainer) is not None:
                    return original(trainer, resume, *args, **kwargs)
                saving = self._saving([trainer, *callbacks])
                return transformers.follow(trainer, saving, original, resume, *args, **kwargs)

        return train

    def _fitting(self, original: Any) -> Any:
        @wraps(original)
        def fit(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            from holdfast.integrations import lightning  # noqa: PLC0415 - the script has it

            if not self._script.hand_over("Trainer.fit"):
                return original(trainer, *args, **kwargs)
            follows = None
            if not lightning.has_callback(trainer):
                follows = lightning.Follows(lambda: self._saving(self._owners(trainer)))
                trainer.callbacks.append(follows)
            try:
                with self._script.left_alone():
                    return original(trainer, *args, **kwargs)
            finally:
                if follows in trainer.callbacks:
                    trainer.callbacks.remove(follows)

        return fit

    def _owners(self, trainer: Any) -> list[object]:
        """Return what of a Trainer of Lightning has hooks; tell which of them does nothing here."""
        owners = [trainer.lightning_module, trainer.datamodule, *trainer.callbacks]
        for owner in owners:
            hook = getattr(type(owner), "on_save_checkpoint", None)
            if hook is not None and not hook.__module__.startswith(_LIBRARIES):
                self._script.say(
                    f"{type(owner).__name__}.on_save_checkpoint is not called: keep what it adds "
                    f"in a buffer, a callback's state_dict or holdfast.track"
                )
        return [one for one in owners if one is not None]

    def _saving(self, owners: Iterable[object]) -> Saving:
        """Return how the next training is saved; ``owners``: trainer and callbacks."""
        self._trainings += 1
        own = [one for one in owners if not type(one).__module__.startswith(_LIBRARIES)]
        watch = _Watch(self._gathering, own, self._script.say)
        return Saving(
            job=self._job,
            fresh=self._fresh,
            also=partial(_beside, self._gathering),
            say=self._script.say,
            tell=self._script.tell,
            look=watch.look,
        ).of_training(self._trainings)


def _beside(gathering: Gathering, parts: Mapping[str, object]) -> Mapping[str, object]:
    """Return what the script has built that is no part of the trainer and lies in none."""
    roots = [value for value in parts.values() if isinstance(value, nn.Module)]
    known = {id(value) for value in parts.values()}
    known.update(id(module) for root in roots for module in root.modules())
    found = {
        f"script_{name}": value
        for name, value in gathering.state().items()
        if id(value) not in known and id(getattr(value, "optimizer", None)) not in known
    }
    scripted = [n for n, value in found.items() if isinstance(value, torch.jit.ScriptModule)]
    if scripted:
        raise InvalidRequestError(f"{', '.join(scripted)} is a TorchScript module")
    return found


class _Watch:
    """Tells by name what of the script's own objects changes and is not saved."""

    def __init__(
        self, gathering: Gathering, owners: list[object], say: Callable[[str], None]
    ) -> None:
        self._gathering = gathering
        self._owners = owners
        self._say = say
        self._saves = 0
        self._made = gathering.count
        self._before: dict[tuple[str, int], object] = {}

    def look(self, state: Mapping[str, object]) -> None:
        """Look at everything at two of the first saves, and at what is new at each."""
        self._saves += 1
        if self._saves == LOOKS[0]:
            self._before, self._made = self._values(state), self._gathering.count
        elif self._saves == LOOKS[1]:
            now = self._values(state)
            self._tell({key[0] for key in now if self._before.get(key) != now[key]})
        if self._made != self._gathering.count:
            late = self._gathering.made_since(self._made)
            self._made = self._gathering.count
            if late:
                names = ", ".join(sorted({type(value).__name__ for value in late}))
                self._say(f"made after the first batch: {names}; they are not saved")

    def _values(self, state: Mapping[str, object]) -> dict[tuple[str, int], object]:
        values = attributes_of(state.values())
        for number, owner in enumerate(self._owners):
            for name, value in vars(owner).items():
                if not name.startswith("_"):
                    values[f"{type(owner).__name__}.{name}", -1 - number] = look_of(value)
        return values

    def _tell(self, changed: set[str]) -> None:
        tracked = {
            name
            for value in self._gathering.state().values()
            if isinstance(value, TrackedAttributes)
            for name in value.names
        }
        names = sorted(name for name in changed if name.rpartition(".")[2] not in tracked)
        if names:
            self._say(
                f"{', '.join(names)}: these change while it trains, and a restart begins with "
                f'their first values; holdfast.track(object, "name") keeps them'
            )
