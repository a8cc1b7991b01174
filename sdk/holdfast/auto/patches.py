"""Attributes of classes and modules that are replaced, and put back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

_ABSENT = object()


class Patches:
    """What was replaced, in order. Not safe to use from several threads."""

    def __init__(self) -> None:
        self._undo = ExitStack()

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Set ``owner.name`` to ``make(what it was)`` until ``undo``.

        What a class inherits is deleted again, so that it inherits it as before.
        """
        own = vars(owner).get(name, _ABSENT)
        setattr(owner, name, make(getattr(owner, name)))
        if own is _ABSENT:
            self._undo.callback(delattr, owner, name)
        else:
            self._undo.callback(setattr, owner, name, own)

    def then(self, undo: Callable[[], object]) -> None:
        """Have ``undo`` called too."""
        self._undo.callback(undo)

    def undo(self) -> None:
        """Put everything back, last first."""
        self._undo.close()
