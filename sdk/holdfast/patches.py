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

        What a class inherits is deleted again, so that it inherits it as before. Where someone has
        put their own around it since, as ``torch.compile`` does, it stays inside theirs.
        """
        own = vars(owner).get(name, _ABSENT)
        ours = make(getattr(owner, name))
        setattr(owner, name, ours)
        self._undo.callback(_put_back, owner, name, own, ours)

    def then(self, undo: Callable[[], object]) -> None:
        """Have ``undo`` called too."""
        self._undo.callback(undo)

    def undo(self) -> None:
        """Put everything back, last first."""
        self._undo.close()


def _put_back(owner: Any, name: str, own: Any, ours: Any) -> None:
    if vars(owner).get(name) is not ours:
        return
    if own is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, own)
