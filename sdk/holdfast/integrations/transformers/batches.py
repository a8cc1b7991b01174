"""The training data as a Trainer sees them: each batch is asked for here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from holdfast.state.passes import PassedLoader

Ask = Callable[["Pass"], None]


class Batches:
    """The loader that a Trainer has made, with passes that are counted.

    ``passes`` says how many were begun; ``ask`` is called before each batch. Everything else is the
    loader's.
    """

    def __init__(self, loader: Any, ask: Ask) -> None:
        self.loader = loader
        self.passes = 0
        self._ask = ask
        self._skips = 0
        inner = getattr(loader, "base_dataloader", loader)
        self.counted = PassedLoader([inner], self._again, deals=False)

    def _again(self) -> Iterator[Any]:
        return iter(self.loader)

    def skip(self, count: int) -> Batches:
        """Have the next pass begin ``count`` batches later, as a checkpoint of the Trainer asks."""
        self._skips = count
        return self

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        skips, self._skips = self._skips, 0
        return Pass(self, self._ask, skips)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


class Pass:
    """One iteration; nothing is drawn before the first batch is asked for. ``given``: batches."""

    def __init__(self, batches: Batches, ask: Ask, skips: int) -> None:
        self.batches = batches
        self.given = 0
        self._ask = ask
        self._skips = skips
        self._inner: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def begin(self, given: int = 0) -> None:
        """Draw from the loader from here on; ``given`` batches were given before a restore."""
        if self._inner is None:
            self._inner = iter(self.batches.counted)
            if not given:
                for _ in range(self._skips):
                    next(self._inner)
            self.given = given or self._skips

    def __next__(self) -> Any:
        self._ask(self)
        assert self._inner is not None
        batch = next(self._inner)
        self.given += 1
        return batch
