"""One iteration over a data loader, as a script under ``--auto`` is given it.

As torch's own iterator it outlives an error in a batch, and has a length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from holdfast.auto.gathering import Loader


class Source(Protocol):
    """Where the batches of a pass come from."""

    def __next__(self) -> Any:
        """Return the next batch."""
        ...


class Pass:
    """Asks ``begin`` for a source of batches at the first one, not before: so does a script.

    ``ended`` tells whether the last batch was given.
    """

    def __init__(self, loader: Loader, begin: Callable[[Pass], Source]) -> None:
        self.loader = loader
        self.given = 0
        self.ended = False
        self._begin = begin
        self._source: Source | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self.loader)

    def __next__(self) -> Any:
        try:
            if self._source is None:
                self._source = self._begin(self)
            batch = next(self._source)
        except StopIteration:
            self.ended = True
            raise
        self.given += 1
        return batch


class OneBatch:
    """The batches of an iterator but for all after the first one."""

    def __init__(self, inner: Iterator[Any]) -> None:
        self._inner: Iterator[Any] | None = inner

    def __next__(self) -> Any:
        inner, self._inner = self._inner, None
        if inner is None:
            raise StopIteration
        return next(inner)


class Guarded:
    """The batches of an iterator; ``before`` is called before each."""

    def __init__(self, inner: Iterator[Any], before: Callable[[], None]) -> None:
        self._inner = inner
        self._before = before

    def __next__(self) -> Any:
        self._before()
        return next(self._inner)
