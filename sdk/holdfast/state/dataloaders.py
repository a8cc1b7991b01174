"""Data loaders that can be captured: any of torch, wrapped, and those of torchdata."""

from __future__ import annotations

import copyreg
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, cast

from torch.utils.data import DataLoader

from holdfast.errors import InvalidRequestError
from holdfast.state.positions import LoaderClock, Position


class ResumableLoader:
    """A torch ``DataLoader`` that can be captured: it counts its batches and replays them.

    On resume the iterator is made again as it was first made, and the batches already used are
    drawn and thrown away, at the cost of loading those batches once more. One iterator at a time:
    a new one ends the one before.

    Args:
        loader: The loader; its parts are looked at now, so wrap it before it is used.
        counted: Say so if the training loop draws ``len(loader)`` batches and never asks for one
            more: ``for _ in range(len(loader)): batch = next(iterator)``.

    Raises:
        InvalidRequestError: a set-up that could not be brought back, such as persistent workers.
    """

    def __init__(self, loader: DataLoader[Any], *, counted: bool = False) -> None:
        self.loader = loader
        self._position = Position(loader, lambda: iter(loader), counted=counted)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return self._position.begin()

    def state_dict(self) -> dict[str, object]:
        """Return where the live iterator is, if there is one, and what the loader remembers."""
        return self._position.save()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue from ``state``: the next iterator yields what the saved one had left."""
        self._position.load(state)

    def bind(self, clock: LoaderClock) -> None:
        """See ``Resumable``."""
        self._position.clock = clock

    def save_state(self) -> object:
        """See ``Resumable``."""
        return self.state_dict()

    def load_state(self, state: object) -> None:
        """See ``Resumable``."""
        self.load_state_dict(cast("dict[str, object]", state))


class StatefulLoader:
    """A torchdata ``StatefulDataLoader``, by a subclass made for that one object.

    The class of the instance is changed, not the class itself; ``release`` changes it back.
    """

    def __init__(self, loader: Any, *, path: str) -> None:
        self._loader = loader
        is_ours = "holdfast_entry" in vars(loader)  # left by an entry that nobody has any more
        self._plain = plain = _plain(loader) if is_ours else type(loader)
        self._position = Position(
            loader, lambda: plain.__iter__(loader), what=f"data loader {path!r}"
        )

    def bind(self, clock: LoaderClock) -> None:
        """See ``Resumable``; from here on ``iter(loader)`` goes through this object."""
        self._position.clock = clock
        if _entry(self._loader) is not None:
            raise InvalidRequestError(
                "another Checkpointer has this data loader in its state: give each its own loader"
            )
        self._loader.holdfast_entry = weakref.ref(self)
        ours = {"__iter__": _iterate, "__reduce_ex__": _reduced, "__slots__": ()}
        self._loader.__class__ = type(self._plain.__name__, (self._plain,), ours)

    def release(self) -> None:
        """Give the loader its own class back."""
        if vars(self._loader).pop("holdfast_entry", None) is not None:
            self._loader.__class__ = self._plain

    def save_state(self) -> object:
        """See ``Resumable``; of a loader never used nothing is made."""
        return self._position.save()

    def load_state(self, state: object) -> None:
        """See ``Resumable``."""
        self._loader.load_state_dict({})
        self._position.load(cast("dict[str, Any]", state))

    def iterate(self) -> Iterator[Any]:
        """Return the loader's next iterator, by the rule of this module."""
        return self._position.begin()


def _iterate(loader: Any) -> Iterator[Any]:
    entry = _entry(loader)
    return _plain(loader).__iter__(loader) if entry is None else entry.iterate()


def _reduced(loader: Any, protocol: Any) -> tuple[Any, ...]:
    """Return what a copy or a pickle is made of: a plain loader, which nobody captures.

    With our class and entry to iterate over it would be to iterate over the captured one.
    """
    make, arguments, *rest = _plain(loader).__reduce_ex__(loader, protocol)
    plain = tuple(_plain(loader) if each is type(loader) else each for each in arguments)
    if rest and isinstance(rest[0], dict):
        rest[0] = {name: part for name, part in rest[0].items() if name != "holdfast_entry"}
    if make is copyreg.__newobj__:  # type: ignore[attr-defined]  # pickle has it for our class only
        make = _made
    return (make, plain, *rest)


def _made(cls: type[Any], *arguments: Any) -> Any:
    return cls.__new__(cls, *arguments)


def _plain(loader: Any) -> Any:
    """Return the class that a loader had before."""
    return type(loader).__bases__[0]


def _entry(loader: Any) -> StatefulLoader | None:
    """Return who captures a loader: a reference back would keep its workers until a collection."""
    found = vars(loader).get("holdfast_entry")
    return found() if found is not None else None
