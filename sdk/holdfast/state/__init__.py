"""What belongs to a training run's state, how it is named, taken and put back.

``capture`` walks the user's mapping; ``modules``, ``optimizers``, ``loader`` and ``rng`` know one
kind of value each. This module itself imports no torch: ``holdfast.State`` is cheap.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

__all__ = ["State"]


class State(ABC):
    """Base class of users' objects that are saved and restored with the rest (F15).

    Invariants: ``name`` is unique among the State objects of a mapping. ``save`` returns plain data
    and tensors, which are copied before ``save()`` of the Checkpointer returns.
    """

    name: str

    @abstractmethod
    def save(self) -> object:
        """Return plain data and tensors; the object keeps them and may change them later."""

    @abstractmethod
    def load(self, tree: object) -> None:
        """Take back what ``save`` returned; the tree is the object's own from then on."""

    def sync(self) -> None:  # noqa: B027 - optional: nothing to do is right for most
        """Bring pending work into the object; called before ``save``."""
