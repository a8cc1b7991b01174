"""The kinds of state: how a value of each is surveyed, taken at a save, and put back.

One registry for what Holdfast knows and for what users register. Of the types of a value that are
registered the most specific one wins, by its method resolution order. Plain values and tensors are
no kind: ``capture`` walks through them to whatever they hold.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from holdfast.errors import CheckpointError, InvalidRequestError
from holdfast.format.blob import SavedModule, SavedOptimizer
from holdfast.format.tree import LIKE_PLAIN, PLAIN, Json
from holdfast.state import State, modules, optimizers
from holdfast.state.dataloaders import ResumableLoader
from holdfast.state.inner_optimizers import check_inner
from holdfast.state.loader_makes import is_stateful_loader
from holdfast.state.positions import Resumable
from holdfast.state.sections import Section, section_of
from holdfast.state.survey import Survey

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Surveying:
    """A survey in the making.

    ``rank`` is this one. ``replicated``: all ranks are known to hold the same. ``deferred`` tells
    which parameters only an optimizer's step writes, ``found_module`` is called for every module.
    """

    survey: Survey
    rank: int
    replicated: bool
    deferred: Callable[[str, torch.Tensor], bool]
    found_module: Callable[[str, nn.Module], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Taking:
    """The live part of a save in the making: trees by path. ``encode`` makes one of a value."""

    survey: Survey
    encode: Callable[[object, str], Json]
    loaders: Mapping[int, Resumable]
    groups: dict[str, Json]
    loose: dict[str, Json]
    objects: dict[str, Json]


class Restoring(Protocol):
    """A restore in the making, as ``loading`` makes it: reads nothing before all was asked for."""

    @property
    def loaders(self) -> Mapping[int, Resumable]:
        """The captured data loaders by identity."""
        ...

    @property
    def ranks_changed(self) -> bool:
        """Whether another number of ranks has saved."""
        ...

    def want_module(self, path: str, module: nn.Module, section: Section | None) -> None:
        """Have the tensors and extra states of a module, or a section's, put back in place."""
        ...

    def want_optimizer(self, path: str, optimizer: Optimizer) -> None:
        """Have state and groups of an optimizer put back."""
        ...

    def want_object(self, path: str, value: Any, put: Callable[[Any], None]) -> None:
        """Have ``put`` called with the tree that was saved for ``value``."""
        ...

    def want_parts(self, path: str, value: Any, put: Callable[[Any, list[Any]], None]) -> None:
        """Have ``put`` called with that tree and with those of all ranks that fall to this one.

        Rank ``s`` of those that saved falls to rank ``s`` modulo the number of ranks now.
        """
        ...

    def check_agreed(self, path: str) -> None:
        """Refuse a data loader of which ranks had used unequally much, if there are others now."""
        ...


class Kind(ABC):
    """What is done with the values of one kind.

    ``turn``: modules are surveyed and loaded before optimizers, and these before the others.
    ``saved``: how the text describes it; None: by a tree alone.
    """

    turn: ClassVar[int]
    saved: ClassVar[type[SavedModule | SavedOptimizer] | None] = None

    def survey(self, at: Surveying, path: str, value: Any) -> None:  # noqa: B027 - a kind may have none
        """Name the tensors of ``value`` that last from save to save."""

    def live(self, at: Taking, path: str, value: Any) -> None:  # noqa: B027 - a kind may have none
        """Take the rest of ``value``, as it is now."""

    @abstractmethod
    def load(self, at: Restoring, path: str, value: Any) -> None:
        """Have ``value`` put back as it was saved."""


class _Module(Kind):
    """A module whose state is its tables; extra states are taken for all modules at once."""

    turn = 0
    saved = SavedModule

    def survey(self, at: Surveying, path: str, value: Any) -> None:
        section = section_of(value)
        root = value.module if isinstance(value, Section) else value
        modules.survey_module(
            at.survey,
            path,
            root,
            replicated=at.replicated,
            deferred=at.deferred,
            rename=section.name if section else str,
            alone=(at.rank,) if section else (),
        )
        at.found_module(path, root)

    def load(self, at: Restoring, path: str, value: Any) -> None:
        root = value.module if isinstance(value, Section) else value
        at.want_module(path, root, section_of(value))


class _Optimizer(Kind):
    """An optimizer whose state is by parameter."""

    turn = 1
    saved = SavedOptimizer

    def survey(self, at: Surveying, path: str, value: Any) -> None:
        strict = optimizers.is_strict(value)
        optimizers.survey_optimizer(at.survey, path, value, replicated=at.replicated, strict=strict)

    def live(self, at: Taking, path: str, value: Any) -> None:
        at.groups[path] = at.encode(optimizers.live_groups(value), f"{path}.groups")
        if path in at.survey.loose:
            held = optimizers.loose_state(value, at.survey.fqn_of)
            at.loose[path] = at.encode(held, f"{path}.state")

    def load(self, at: Restoring, path: str, value: Any) -> None:
        at.want_optimizer(path, value)


class _Tree(Kind):
    """An object that gives its state as a tree: by ``state_dict`` and ``load_state_dict``."""

    turn = 2

    def live(self, at: Taking, path: str, value: Any) -> None:
        tree = self.take(value, at.loaders)
        # The path itself is the object's name, and a tensor needs one of its own.
        name = f"{path}.tensor" if isinstance(tree, torch.Tensor) else path
        at.objects[path] = at.encode(tree, name)

    def load(self, at: Restoring, path: str, value: Any) -> None:
        at.want_object(path, value, lambda tree: self.put(value, tree, at.loaders))

    def take(self, value: Any, loaders: Mapping[int, Resumable]) -> object:
        """Return the state of ``value``."""
        del loaders
        return value.state_dict()

    def put(self, value: Any, tree: Any, loaders: Mapping[int, Resumable]) -> None:
        """Give ``value`` the state that ``take`` returned; the tree is its own from then on."""
        del loaders
        value.load_state_dict(tree)


class _Object(_Tree):
    """One that may also take over the state of ranks that are no more: by ``load_parts``."""

    def survey(self, at: Surveying, path: str, value: Any) -> None:
        del path
        at.survey.takes_over |= callable(getattr(value, "load_parts", None))

    def load(self, at: Restoring, path: str, value: Any) -> None:
        load_parts = getattr(value, "load_parts", None)
        if callable(load_parts) and at.ranks_changed:
            at.want_parts(path, value, load_parts)
        else:
            super().load(at, path, value)


class _State(_Tree):
    """A ``holdfast.State``."""

    def take(self, value: Any, loaders: Mapping[int, Resumable]) -> object:
        del loaders
        value.sync()
        return value.save()

    def put(self, value: Any, tree: Any, loaders: Mapping[int, Resumable]) -> None:
        del loaders
        value.load(tree)


class _Loader(_Tree):
    """A data loader that says where it is, through what ``capture`` has put beside it."""

    def load(self, at: Restoring, path: str, value: Any) -> None:
        at.check_agreed(path)
        super().load(at, path, value)

    def take(self, value: Any, loaders: Mapping[int, Resumable]) -> object:
        return loaders[id(value)].save_state()

    def put(self, value: Any, tree: Any, loaders: Mapping[int, Resumable]) -> None:
        loaders[id(value)].load_state(tree)


@dataclass(frozen=True, slots=True)
class _Registered(_Tree):
    """A type of the user's, by the two functions that came with it."""

    take_from: Callable[[Any], object]
    put_into: Callable[[Any, Any], None]

    def take(self, value: Any, loaders: Mapping[int, Resumable]) -> object:
        del loaders
        return self.take_from(value)

    def put(self, value: Any, tree: Any, loaders: Mapping[int, Resumable]) -> None:
        del loaders
        self.put_into(value, tree)


_MODULE, _OPTIMIZER, _OBJECT = _Module(), _Optimizer(), _Object()
_STATE, _LOADER = _State(), _Loader()


def _module(_path: str, value: Any) -> Kind:
    return _OBJECT if modules.has_own_saving(value) else _MODULE


def _section(path: str, value: Any) -> Kind:
    if modules.has_own_saving(value.module):
        name = type(value.module).__name__
        raise InvalidRequestError(
            f"section {path!r} is a {name}, which saves itself in its own way: its tensors have no "
            f"names of the model",
            key=path,
        )
    value.check_fits(path, [n[len(path) :].lstrip(".") for n in modules.names(path, value.module)])
    return _MODULE


def _optimizer(path: str, value: Any) -> Kind:
    check_inner(path, value)
    return _OBJECT if optimizers.has_own_saving(value) else _OPTIMIZER


def _data_loader(path: str, value: Any) -> Kind:
    if is_stateful_loader(value):
        return _LOADER
    raise InvalidRequestError(
        f"state {path!r} is a plain DataLoader, which cannot tell its position: wrap it as "
        f"holdfast.ResumableLoader(loader), or use torchdata's StatefulDataLoader",
        key=path,
    )


_BUILT_IN: dict[type, Callable[[str, Any], Kind]] = {
    nn.Module: _module,
    Section: _section,
    Optimizer: _optimizer,
    State: lambda _path, _value: _STATE,
    ResumableLoader: lambda _path, _value: _LOADER,
    DataLoader: _data_loader,
}
"""In this order: what is a module and a State too is a module."""

_registered: dict[type, Kind] = {}


def register_handler(
    type: type[T],  # noqa: A002 - the name is fixed
    save: Callable[[T], object],
    load: Callable[[T, Any], None],
) -> None:
    """Save and restore every object of ``type``, anywhere in a state, with these functions.

    Register a class once per process, before the Checkpointer is made. A handler also applies to
    subclasses without a handler of their own: the most specific class wins.

    Args:
        type: A class of yours; not a plain type (``dict``, ``int``, NumPy's …) and not a tensor.
        save: Returns a tree of tensors and plain values. It is called at each save, on the training
            thread. Tensors are copied before ``save()`` of the Checkpointer returns. If it raises,
            only that save fails; the error names the object's place in the state.
        load: Called as ``load(obj, tree)`` with the tree that ``save`` returned, which then belongs
            to ``obj``; changes ``obj`` in place.

    Raises:
        InvalidRequestError: ``type`` has a handler already, or cannot have one.
    """
    if not isinstance(type, _TYPE):
        raise InvalidRequestError(f"{type!r} is not a class: pass the class of your objects")
    plain = type in PLAIN or type in (object, torch.Size) or type.__module__ == "numpy"
    if plain or issubclass(type, torch.Tensor):
        raise InvalidRequestError(
            f"Holdfast saves {type.__qualname__} itself: register only classes of your own"
        )
    if type in _registered or type in _BUILT_IN:
        raise InvalidRequestError(
            f"{type.__qualname__} has a handler already: register each class once, or a subclass"
        )
    _registered[type] = _Registered(save, load)


def handlers_count() -> int:
    """Return how many classes have a handler: with each, values may be of another kind."""
    return len(_registered)


_TYPE = type


def kind_of(path: str, value: object) -> Kind | None:
    """Return how ``value`` is saved; None if no kind of state fits it.

    Raises:
        InvalidRequestError: it is of a kind that cannot be saved (yet); names ``path``.
    """
    mro = type(value).__mro__
    own = next((cls for cls in mro if cls in _registered), None)
    known = next((cls for cls in _BUILT_IN if isinstance(value, cls)), None)
    if own is not None and (known is None or mro.index(own) < mro.index(known)):
        return _registered[own]
    if known is not None:
        return _BUILT_IN[known](path, value)
    if is_stateful_loader(value):
        return _LOADER
    methods = (getattr(value, name, None) for name in ("state_dict", "load_state_dict"))
    return _OBJECT if all(map(callable, methods)) else None


def check_nearly_plain(path: str, value: object) -> None:
    """Refuse what is neither of a kind nor like plain data, and say how it could be saved.

    Raises:
        InvalidRequestError: names ``path`` and the class.
    """
    if not isinstance(value, (*LIKE_PLAIN, Enum)):
        cls = type(value)
        raise InvalidRequestError(
            f"state {path!r} holds a {cls.__module__}.{cls.__qualname__}, which only pickle could "
            f"express; keep plain data and tensors there, or a state_dict(), or say how that class "
            f"is saved: holdfast.register_handler(type, save, load)",
            key=path,
        )


@contextmanager
def named(doing: str, path: str) -> Iterator[None]:
    """Have whatever the user's own code raises say of which value it is."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, CheckpointError):
            error.add_note(f"while {doing} state {path!r}")
        raise
