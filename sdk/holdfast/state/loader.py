"""Data loaders that continue where they were, without moving the random stream.

Making an iterator draws from the global generator (base seed, shuffle seed). A *live* iterator,
made before the save and not exhausted, was paid for by the original run already, so making it
again after a restore must not show. ``LoaderClock`` holds that rule for all loaders of a capture;
a loader that was not live draws from the restored stream like the original did.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, cast

import torch
from torch.utils.data import DataLoader

from holdfast.errors import InvalidRequestError, PreconditionError
from holdfast.state import rng


class LoaderClock:
    """Knows whether a batch was drawn since the restore, and which stream the restore set."""

    def __init__(self) -> None:
        self.restored: Callable[[], None] | None = None
        self._loaders: list[Resumable] = []

    def watch(self, loader: Resumable) -> None:
        """Count the batches of ``loader`` too."""
        self._loaders.append(loader)

    def arm(self, restored: Callable[[], None]) -> None:
        """From now on ``restored()`` sets the stream again, until the first batch."""
        self.restored = restored

    def after_resume(self, before: rng.Stream) -> None:
        """Set the stream that the trainer must see after a live iterator was made again."""
        if self.restored is None or any(loader.has_drawn() for loader in self._loaders):
            rng.put(before)
        else:
            self.restored()


class Resumable(Protocol):
    """A loader as a capture sees it."""

    def bind(self, clock: LoaderClock) -> None:
        """Take part in the clock's rule."""

    def has_drawn(self) -> bool:
        """Tell whether it yielded a batch since ``load_state``."""

    def save_state(self) -> object:
        """Return plain data and tensors, without touching the random stream."""

    def load_state(self, state: object) -> None:
        """Continue from ``state`` with the next iterator."""


class ResumableLoader:
    """A torch ``DataLoader`` that can be captured: it counts its batches and replays them.

    On resume the iterator is made again under the stream recorded when it was first made, and the
    batches already used are drawn and thrown away: right for any sampler, map-style or iterable,
    with or without workers, at the cost of loading those batches once more. One iterator at a
    time: a new one ends the one before.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self._clock: LoaderClock | None = None
        self._current: weakref.ref[_Counted] | None = None
        self._resume: dict[str, Any] | None = None
        self._drawn = False

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        resume, self._resume = self._resume, None
        if resume is None:
            counted = _Counted(self, made=_marks(self.loader))
        else:
            before = rng.take()
            counted = self._replay(resume)
            if self._clock is not None:
                self._clock.after_resume(before)
            else:
                rng.put(before)
        self._current = weakref.ref(counted)
        return counted

    def state_dict(self) -> dict[str, object]:
        """Return where the live iterator is, if there is one, and the generators' states."""
        counted = self._current() if self._current is not None else None
        state: dict[str, object] = {"now": _marks(self.loader, stream=False), "live": False}
        if self._resume is not None:
            return self._resume
        if counted is not None and not counted.exhausted:
            state |= {
                "live": True,
                "made": counted.made,
                "first": counted.first,
                "count": counted.count,
            }
        return state

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue from ``state``: the next iterator yields what the saved one had left."""
        self._current = None
        self._drawn = False
        self._resume = dict(state) if state["live"] else None
        _put_marks(self.loader, cast("dict[str, Any]", state["now"]))

    def bind(self, clock: LoaderClock) -> None:
        """See ``Resumable``."""
        self._clock = clock
        clock.watch(self)

    def has_drawn(self) -> bool:
        """See ``Resumable``."""
        return self._drawn

    def save_state(self) -> object:
        """See ``Resumable``."""
        return self.state_dict()

    def load_state(self, state: object) -> None:
        """See ``Resumable``."""
        self.load_state_dict(cast("dict[str, object]", state))

    def note_batch(self) -> None:
        """Remember that a batch was yielded; called by the iterator."""
        self._drawn = True

    def _replay(self, resume: dict[str, Any]) -> _Counted:
        _put_marks(self.loader, resume["made"])
        counted = _Counted(self, made=resume["made"])
        counted.skip(resume["count"], resume["first"])
        _put_marks(self.loader, resume["now"])
        return counted


class _Counted:
    """The iterator of a ``ResumableLoader``: counts, and remembers when it began."""

    def __init__(self, owner: ResumableLoader, *, made: dict[str, Any]) -> None:
        self.made = made
        self.first: rng.Stream | None = None
        self.count = 0
        self.exhausted = False
        self._owner = owner
        self._inner = iter(owner.loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.first is None:
            self.first = rng.take()
        batch = self._next()
        self._owner.note_batch()
        return batch

    def skip(self, count: int, first: rng.Stream | None) -> None:
        """Draw and drop ``count`` batches; ``first`` is the stream before the first one."""
        self.first = first
        if first is not None:
            # Without workers the sampler draws its seed at the first batch, not before.
            rng.put(first)
        for done in range(count):
            try:
                self._next()
            except StopIteration as cause:
                raise PreconditionError(
                    f"data loader ended after {done} of the {count} batches used before the "
                    f"checkpoint: its data have changed"
                ) from cause

    def _next(self) -> Any:
        try:
            batch = next(self._inner)
        except StopIteration:
            self.exhausted = True
            raise
        self.count += 1
        return batch


def _samplers(loader: DataLoader[Any]) -> list[Any]:
    found = [loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    found.append(getattr(found[-1], "sampler", None))
    return [value for value in found if value is not None]


def _marks(loader: DataLoader[Any], *, stream: bool = True) -> dict[str, Any]:
    """Return the stream and what samplers keep beside it: own generators, epochs."""
    samplers = _samplers(loader)
    generators = [getattr(sampler, "generator", None) for sampler in samplers]
    return {
        "stream": rng.take() if stream else None,
        "generators": [
            g.get_state() if isinstance(g, torch.Generator) else None for g in generators
        ],
        "epochs": [
            sampler.epoch if hasattr(sampler, "set_epoch") else None for sampler in samplers
        ],
    }


def _put_marks(loader: DataLoader[Any], marks: dict[str, Any]) -> None:
    for sampler, state, epoch in zip(
        _samplers(loader), marks["generators"], marks["epochs"], strict=True
    ):
        if state is not None and isinstance(sampler.generator, torch.Generator):
            sampler.generator.set_state(state)
        if epoch is not None and hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
    if marks["stream"] is not None:
        rng.put(marks["stream"])


class StatefulLoader:
    """A torchdata ``StatefulDataLoader``, by a subclass made for that one object.

    The class of the instance is changed, not the class itself; ``release`` changes it back. An
    iterator that was left before its end counts as live, as it does for torchdata.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._clock: LoaderClock | None = None
        self._live = False
        self._pending = False
        self._baseline = 0
        self._plain = type(loader)

    def bind(self, clock: LoaderClock) -> None:
        """See ``Resumable``; from here on ``iter(loader)`` goes through this object."""
        self._clock = clock
        clock.watch(self)
        if "holdfast_entry" in vars(self._loader):
            raise InvalidRequestError("a data loader is captured by one checkpointer at a time")
        self._loader.holdfast_entry = self
        self._loader.__class__ = type(
            self._plain.__name__, (self._plain,), {"__iter__": _iterate, "__slots__": ()}
        )

    def release(self) -> None:
        """Give the loader its own class back."""
        if vars(self._loader).pop("holdfast_entry", None) is not None:
            self._loader.__class__ = self._plain

    def has_drawn(self) -> bool:
        """See ``Resumable``."""
        iterator = self._loader._iterator  # noqa: SLF001 - torchdata shows it nowhere else
        return iterator is not None and self._yielded(iterator) != self._baseline

    def save_state(self) -> object:
        """See ``Resumable``; ``state_dict()`` of a loader never used would make an iterator."""
        iterator = self._loader._iterator  # noqa: SLF001
        if self._pending:
            return {"live": self._live, "state": self._loader.next_iter_state}
        if iterator is None:
            return {"live": False, "state": None}
        return {
            "live": not iterator._finished,  # noqa: SLF001
            "state": self._loader.state_dict(),
        }

    def load_state(self, state: object) -> None:
        """See ``Resumable``."""
        saved = cast("dict[str, Any]", state)
        self._loader.load_state_dict({})
        self._pending = saved["state"] is not None
        if self._pending:
            self._loader.load_state_dict(saved["state"])
        self._live = bool(saved["live"])
        self._baseline = 0

    def iterate(self) -> Iterator[Any]:
        """Return the loader's next iterator, by the rule of this module."""
        if not self._pending:
            iterator = self._plain.__iter__(self._loader)
        elif self._live:
            before = rng.take()
            iterator = self._plain.__iter__(self._loader)
            if self._clock is not None:
                self._baseline = self._yielded(iterator)
                self._clock.after_resume(before)
        else:
            # The saved one was at its end: take over what it knew, then begin the next.
            with rng.kept():
                self._loader._iterator = self._loader._get_iterator()  # noqa: SLF001
            iterator = self._plain.__iter__(self._loader)
        self._pending = False
        self._baseline = self._yielded(iterator)
        return cast("Iterator[Any]", iterator)

    @staticmethod
    def _yielded(iterator: Any) -> int:
        return int(iterator._num_yielded)  # noqa: SLF001


def _iterate(loader: Any) -> Iterator[Any]:
    entry: StatefulLoader = loader.holdfast_entry
    return entry.iterate()


def is_stateful_loader(value: object) -> bool:
    """Tell whether ``value`` is torchdata's, without importing torchdata."""
    return any(
        cls.__name__ == "StatefulDataLoader" and cls.__module__.startswith("torchdata.")
        for cls in type(value).__mro__
    )
