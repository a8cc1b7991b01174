"""Variables of a script as a value of its state: counters, hidden states, positions in files.

Knows the rest of a state only as far as it has ``state_dict`` and ``load_state_dict``.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Mapping
from types import CellType, FunctionType, SimpleNamespace
from typing import Any, cast

from holdfast.errors import InvalidRequestError


class Tracked(SimpleNamespace):
    """Values by name; each may be given another value at any time."""

    def state_dict(self) -> dict[str, object]:
        """Return the values; of a file its position, with what was written flushed."""
        return taken(self, vars(self))

    def load_state_dict(self, tree: Mapping[str, object]) -> None:
        """Take the values back; see ``put``."""
        put(self, vars(self), tree)


class Variables:
    """The variables of a closure, as attributes: those that functions in it have in common."""

    _table: dict[str, CellType]

    def __init__(self, cells: Mapping[str, CellType]) -> None:
        vars(self).update(_table=dict(cells))

    def __getattr__(self, name: str) -> object:
        try:
            return cast("object", self._table[name].cell_contents)
        except (KeyError, ValueError) as cause:  # not there, or without a value
            raise AttributeError(name) from cause

    def __setattr__(self, name: str, value: object) -> None:
        self._table[name].cell_contents = value


class TrackedAttributes:
    """Some attributes of an object of the user's, which stays the user's.

    Of ``Variables`` too: those of a function.
    """

    def __init__(self, owner: object, names: tuple[str, ...]) -> None:
        self.owner = owner
        self.names = names

    @property
    def variables(self) -> tuple[str, ...]:
        """Which of the names are those of variables."""
        return self.names if isinstance(self.owner, Variables) else ()

    def state_dict(self) -> dict[str, object]:
        """Return their values; of a file its position, with what was written flushed."""
        return taken(self.owner, self.names)

    def load_state_dict(self, tree: Mapping[str, object]) -> None:
        """Give the object its attributes back; see ``put``."""
        put(self.owner, self.names, tree)


def track(owner: object = None, /, *names: str, **values: object) -> Any:
    """Return an object for the state that holds variables of a script.

    ``kept = holdfast.track(step=0, hidden=hidden)`` is a namespace: use ``kept.step`` in the place
    of ``step``. ``holdfast.track(trainer, "epoch", "best")`` holds attributes of an object, and
    ``holdfast.track(step, "count")`` variables that the function ``step`` has of the function that
    it is in (``nonlocal count``). Values are plain data, tensors, or open files: of these the
    position is saved, and a restore goes back to it and cuts off what was written behind it.

    Under ``holdfast run --auto`` what is returned is saved by itself.

    Raises:
        InvalidRequestError: an object without names, or both forms at once, or a name that the
            object does not have, or that has no value yet, or one that a namespace needs itself.
    """
    if owner is None:
        taken_names = values.keys() & {"state_dict", "load_state_dict"}
        if names or taken_names or not values:
            what = f"{', '.join(taken_names)} is taken" if taken_names else "there are no values"
            raise InvalidRequestError(f"holdfast.track(name=value, ...): {what}")
        return Tracked(**values)
    cells = _cells_of(owner)
    if cells and names and not values and not any(hasattr(owner, name) for name in names):
        return _variables(owner, cells, names)
    missing = [name for name in names if not hasattr(owner, name)]
    if values or missing or not names:
        what = f"it has no {', '.join(missing)}" if missing else "name some of its attributes"
        raise InvalidRequestError(f"holdfast.track({type(owner).__name__}, 'name', ...): {what}")
    return TrackedAttributes(owner, names)


def _cells_of(owner: object) -> dict[str, CellType]:
    """Return the variables of a closure, and of those that it wraps; the outer ones first."""
    cells: dict[str, CellType] = {}
    while owner is not None:
        function = getattr(owner, "__func__", owner)
        if isinstance(function, FunctionType):
            found = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            cells = {**dict(found), **cells}
        owner = getattr(owner, "__wrapped__", None) or getattr(owner, "func", None)
    return cells


def _variables(
    owner: object, cells: Mapping[str, CellType], names: tuple[str, ...]
) -> TrackedAttributes:
    called = getattr(owner, "__qualname__", type(owner).__name__)
    variables = Variables(cells)
    for name in names:
        if name not in cells:
            raise InvalidRequestError(
                f"holdfast.track({called}, {name!r}): it has no {name}; its variables are "
                f"{', '.join(sorted(cells))}"
            )
        if not hasattr(variables, name):
            raise InvalidRequestError(
                f"holdfast.track({called}, {name!r}): {name} has no value yet; set it before"
            )
    return TrackedAttributes(variables, names)


def taken(owner: object, names: Iterable[str]) -> dict[str, object]:
    """Return the values of these attributes, as they are saved."""
    return {name: _taken(getattr(owner, name)) for name in names}


def put(owner: object, names: Iterable[str], tree: Mapping[str, object]) -> None:
    """Give ``owner`` the saved values.

    Raises:
        InvalidRequestError: other names were saved, or a file is shorter than it was; the values
            are as they were before.
    """
    names = list(names)
    if set(names) != tree.keys():
        raise InvalidRequestError(
            f"tracked are {', '.join(sorted(names))}, but {', '.join(sorted(tree))} were saved"
        )
    files = {name: file for name in names if isinstance(file := getattr(owner, name), io.IOBase)}
    for name, file in files.items():
        _check_length(name, file, tree[name])
    for name in names:
        if name in files:
            _go_back(files[name], tree[name])
        else:
            setattr(owner, name, tree[name])


def _taken(value: object) -> object:
    if not isinstance(value, io.IOBase):
        return value
    if value.writable():
        value.flush()
    return value.tell()


def _check_length(name: str, file: io.IOBase, position: object) -> None:
    if type(position) is not int or position < 0:
        raise InvalidRequestError(f"{name!r} is an open file here, and was none when it was saved")
    at = file.tell()
    end = file.seek(0, os.SEEK_END)
    file.seek(at)
    if end < position:
        raise InvalidRequestError(
            f"file {name!r} ends at {end}, but had got to {position} when it was saved: open it "
            f'with "a" or "r+", which keeps what is there'
        )


def _go_back(file: io.IOBase, position: Any) -> None:
    file.seek(position)
    if file.writable():
        file.truncate()
