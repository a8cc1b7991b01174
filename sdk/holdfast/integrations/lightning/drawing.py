"""What Lightning's training loop draws from: its data fetcher, with a position."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from holdfast.errors import InvalidRequestError
from holdfast.state.passes import PassedLoader


def counted(fetcher: Any) -> PassedLoader:
    """Have ``fetcher`` be counted from its next iteration on; return its position.

    The class of the object is changed, not the class itself. What is made anew after a
    restore is the iteration of the fetcher, with what it reads ahead.

    Raises:
        InvalidRequestError: the training step draws its batches itself, or a loader is refused.
    """
    kind = type(fetcher)
    if kind.__name__ == "_DataLoaderIterDataFetcher":
        raise InvalidRequestError(
            "training_step draws its batches itself (dataloader_iter): how far it has got cannot "
            "be saved; let it take a batch"
        )

    def make() -> Iterator[Any]:
        kind.__iter__(fetcher)
        return _Plain(kind, fetcher)

    position = PassedLoader(fetcher.combined_loader.flattened, make, deals=False)
    methods = {"__iter__": _begin, "__next__": _next, "__slots__": ()}
    fetcher.__class__ = type(kind.__name__, (kind,), methods)
    fetcher.holdfast_position = position
    return position


class _Plain:
    """The batches of a fetcher as its own class gives them."""

    def __init__(self, kind: type, fetcher: Any) -> None:
        self._next = kind.__next__  # type: ignore[attr-defined]
        self._fetcher = fetcher

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._next(self._fetcher)


def _begin(fetcher: Any) -> Any:
    fetcher.holdfast_pass = iter(fetcher.holdfast_position)
    return fetcher


def _next(fetcher: Any) -> Any:
    return next(fetcher.holdfast_pass)
