"""Batches fetched by samples, with random draws that depend on their place in training alone.

Whatever a data set or a collate function draws for a batch comes from a stream that is seeded by
the batch: so it is the same in any worker process, however many there are, and after a restart,
and the training loop's own draws are never moved.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from holdfast.elastic.updates import Micro
from holdfast.state import rng

Plan = Callable[[], Iterator["Wanted"]]


class Wanted(NamedTuple):
    """Which samples make a batch, and the seed of what is drawn for it."""

    seed: int
    samples: list[int]


def seed_of(seed: int, number: int, rank: int, micro: Micro) -> int:
    """Return the seed of one micro-batch of one rank, of pass ``number``."""
    text = f"{seed}.{number}.{rank}.{micro.of.start}.{micro.index}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


class _Through(Dataset[Any]):
    """Stands for the data set in torch's loader: hands on what is wanted, all at once."""

    def __getitem__(self, wanted: Any) -> Any:
        return wanted

    def __getitems__(self, wanted: Any) -> Any:
        return wanted


class _Fetch:
    """Makes a batch of what is wanted, where torch's loader collates."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self._dataset = dataset
        self._collate = collate
        self._apart: rng.Apart | None = None

    def __call__(self, wanted: Wanted) -> Any:
        if get_worker_info() is not None:
            _seed(wanted.seed)
            return self._made(wanted.samples)
        if self._apart is None:
            self._apart = rng.Apart()
        with self._apart.used():
            _seed(wanted.seed)
            return self._made(wanted.samples)

    def _made(self, samples: Sequence[int]) -> Any:
        many = getattr(self._dataset, "__getitems__", None)
        found = many(list(samples)) if callable(many) else [self._dataset[i] for i in samples]
        return self._collate(found)

    def __getstate__(self) -> dict[str, Any]:
        return {"_dataset": self._dataset, "_collate": self._collate, "_apart": None}


class _Batches:
    """What torch's loader takes for its batch sampler: the plan of the pass, whatever it is now."""

    def __init__(self) -> None:
        self.plan: Plan = lambda: iter(())

    def __iter__(self) -> Iterator[Wanted]:
        return self.plan()


class Fetching:
    """Torch's loader, with its workers, for plans of ours.

    Args:
        dataset: A map-style data set.
        options: Those of torch's loader that say how batches are fetched, not which.
    """

    def __init__(self, dataset: Any, options: dict[str, Any]) -> None:
        self._batches = _Batches()
        collate = options.pop("collate_fn", None) or default_collate
        self._loader: DataLoader[Any] = DataLoader(
            _Through(),
            batch_sampler=cast("Any", self._batches),
            collate_fn=cast("Any", _Fetch(dataset, collate)),
            generator=torch.Generator(),  # it draws a seed for each pass, which nobody uses
            **options,
        )

    def batches(self, plan: Plan) -> Iterator[Any]:
        """Yield the batches of a plan."""
        self._batches.plan = plan
        return iter(self._loader)


def _seed(number: int) -> None:
    """Seed what a data set may draw from; not CUDA, where nothing is drawn between batches."""
    random.seed(number)
    torch.default_generator.manual_seed(number)
    if "numpy" in sys.modules:
        cast("Any", sys.modules["numpy"]).random.seed(number & 0xFFFF_FFFF)
