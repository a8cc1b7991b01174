"""Passes over data loaders through something around them: as a loop draws, not as they are drawn.

A framework's loop may read ahead of itself, or draw from several loaders at once. What is counted,
and drawn anew after a restore, is what the loop is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader

from holdfast.errors import InvalidRequestError
from holdfast.state.dataloaders import ResumableLoader
from holdfast.state.positions import Position


class PassedLoader(ResumableLoader):
    """A ``ResumableLoader`` whose iterators another one makes.

    Args:
        loaders: The data loaders that are drawn from, at least one.
        make: Returns a new iterator over what the loop is given.
        deals: As for ``Position``.

    Raises:
        InvalidRequestError: one of them is no data loader, or one that could not be brought back.
    """

    def __init__(
        self,
        loaders: Sequence[DataLoader[Any]],
        make: Callable[[], Iterator[Any]],
        *,
        deals: bool = True,
    ) -> None:
        for loader in loaders:
            if not isinstance(loader, DataLoader):
                raise InvalidRequestError(
                    f"the training data come from a {type(loader).__name__}, which is no "
                    f"torch.utils.data.DataLoader: its position cannot be saved"
                )
        self.loader, *beside = loaders
        self._position = Position(self.loader, make, beside=beside, deals=deals)

    def is_used_up(self) -> bool:
        """Tell whether the live iterator has given all of its batches."""
        return self._position.is_used_up()
