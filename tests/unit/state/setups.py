"""The data loaders that people write, each with what becomes of it: one table for tests and docs.

``replay`` and ``own`` are the two ways of going on bit-identically; anything else is the reason why
the set-up is refused when it is wrapped or captured.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)  # fmt: skip
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from holdfast import ElasticIterable, ElasticSampler

SIZE, BATCH, BATCHES = 10, 3, 4
DATA = torch.arange(float(SIZE))


def global_numpy() -> float:
    """Draw from NumPy's global generator, as many scripts do."""
    return np.random.rand()  # noqa: NPY002


class Noisy(Dataset):
    """Augments: draws from the generators of its process for every sample."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> list[float]:
        return [index, torch.rand(1).item(), random.random(), global_numpy()]


class OwnDraws(Noisy):
    """Augments with a generator of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(7)

    def __getitem__(self, index: int) -> list[float]:
        return [index, self.rng.random()]


class Saying(Noisy):
    """Map-style, without draws, and says that there is nothing to remember."""

    def __getitem__(self, index: int) -> list[float]:
        return [index]

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        del state


def noisy_collate(samples: list[torch.Tensor]) -> torch.Tensor:
    """Mix noise into the batch."""
    return torch.stack(samples) + torch.rand(1) + global_numpy()


class Lazy(Sampler):
    """Draws each index when it is asked for, from the global stream."""

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        left = list(range(SIZE))
        while left:
            yield left.pop(int(torch.randint(len(left), ())))


class Pools(Lazy):
    """Batches from pools of six that are shuffled one after the other."""

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[list[int]]:
        for begin in (0, 6):
            pool = list(range(begin, min(begin + 6, SIZE)))
            random.shuffle(pool)
            yield from (pool[i : i + BATCH] for i in range(0, len(pool), BATCH))


class Own(Lazy):
    """Draws from a generator of its own, epoch after epoch."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.rng = make()

    def __iter__(self) -> Iterator[int]:
        if isinstance(self.rng, random.Random):
            yield from self.rng.sample(range(SIZE), SIZE)
        else:
            yield from self.rng.permutation(SIZE).tolist()


class Epochs(Lazy):
    """Counts its epochs and seeds from that; batches of its own making."""

    def __init__(self) -> None:
        self.seed, self.epoch = 5, 0

    def __iter__(self) -> Iterator[int]:
        order = random.Random(self.seed + self.epoch).sample(range(SIZE), SIZE)
        self.epoch += 1
        yield from order


class InPlace(Lazy):
    """Shuffles its list further each epoch."""

    def __init__(self) -> None:
        self.order = list(range(SIZE))

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.order)
        yield from list(self.order)


class Telling(Lazy):
    """Says where it is, as torchdata wants it: the order is that of seed and epoch."""

    def __init__(self) -> None:
        self.at, self.epoch = 0, 0

    def __iter__(self) -> Iterator[int]:
        order = random.Random(self.epoch).sample(range(SIZE), SIZE)
        while self.at < SIZE:
            self.at += 1
            yield order[self.at - 1]
        self.at, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.epoch = state["at"], state["epoch"]


class Stream(IterableDataset):
    """Yields in order, its worker's share."""

    def __iter__(self) -> Iterator[float]:
        worker = get_worker_info()
        yield from range(*((worker.id, SIZE, worker.num_workers) if worker else (SIZE,)))


class Buffered(Stream):
    """Shuffles through a buffer of four."""

    def __iter__(self) -> Iterator[float]:
        buffer = []
        for value in super().__iter__():
            buffer.append(value)
            if len(buffer) > 4:
                yield buffer.pop(int(torch.randint(len(buffer), ()))) + random.random()
        yield from buffer


class Counting(Stream):
    """Another order each epoch, by a counter and a generator."""

    def __init__(self) -> None:
        self.epoch, self.rng = 0, np.random.default_rng(3)

    def __iter__(self) -> Iterator[float]:
        self.epoch += 1
        for value in super().__iter__():
            yield value + 100 * self.epoch + self.rng.random()


class TellingStream(Stream):
    """Says where it is."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[float]:
        values = list(super().__iter__())
        while self.at < len(values):
            self.at += 1
            yield values[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Lanes(ElasticIterable):
    """A rank's share of three lanes, with draws."""

    def __init__(self) -> None:
        super().__init__((7, 4, 9), 2, 1, shuffle=True)

    def lane(self, number: int, start: int, stop: int) -> Iterator[float]:
        yield from (100 * number + at + torch.rand(1).item() for at in range(start, stop))


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One row: what it is, how it is made, what becomes of it."""

    name: str
    make: Callable[[type], Any]
    plain: str = "replay"
    stateful: str = "replay"


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def row(
    name: str, *, plain: str = "replay", stateful: str = "replay", data: object = DATA, **more: Any
) -> Setup:
    """Return a set-up of map-style data; callables among ``more`` make what they stand for."""

    def make(kind: type) -> Any:
        held = data() if isinstance(data, type) else data
        given = {k: v() if getattr(v, "makes", False) else v for k, v in more.items()}
        if "batch_sampler" not in given:
            given.setdefault("batch_size", BATCH)
        return kind(held, **given)

    return Setup(name=name, make=make, plain=plain, stateful=stateful)


class Makes:
    """Marks a function that makes an argument anew for each loader."""

    makes = True

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __call__(self) -> Any:
        return self._make()


new = Makes

SETUPS = [
    row("in order", stateful="own"),
    row("`shuffle=True`", stateful="own", shuffle=True),
    row("`shuffle=True`, `generator=`", stateful="own", shuffle=True, generator=new(generator)),
    row("`drop_last`", stateful="own", shuffle=True, drop_last=True),
    row("`batch_size=None`", stateful="own", shuffle=True, batch_size=None),
    row("`SubsetRandomSampler`", sampler=new(lambda: SubsetRandomSampler(range(SIZE)))),
    row("`SubsetRandomSampler`, `generator=`",
        sampler=new(lambda: SubsetRandomSampler(range(SIZE), generator()))),
    row("`WeightedRandomSampler`",
        sampler=new(lambda: WeightedRandomSampler([1.0] * SIZE, SIZE))),
    row("`RandomSampler`, replacement, more than one draw",
        sampler=new(lambda: RandomSampler(DATA, replacement=True, num_samples=80)), batch_size=20),
    row("`RandomSampler`, more samples than data, `generator=`",
        sampler=new(lambda: RandomSampler(DATA, num_samples=12, generator=generator()))),
    row("`DistributedSampler`, `set_epoch`", stateful="own",
        sampler=new(lambda: DistributedSampler(range(2 * SIZE), 2, 1)), data=range(2 * SIZE)),
    row("torchdata's `StatefulDistributedSampler`", stateful="own", data=range(2 * SIZE),
        sampler=new(lambda: StatefulDistributedSampler(range(2 * SIZE), 2, 1))),
    row("`holdfast.ElasticSampler`", stateful="own", data=range(2 * SIZE),
        sampler=new(lambda: ElasticSampler(range(2 * SIZE), 2, 1))),
    row("`batch_sampler=`", batch_sampler=new(
        lambda: BatchSampler(SubsetRandomSampler(range(SIZE)), BATCH, drop_last=False))),
    row("`Subset`, `ConcatDataset`", stateful="own", shuffle=True,
        data=ConcatDataset([Subset(DATA, range(4)), DATA[4:]])),
    row("own sampler: draws each index late", sampler=new(Lazy)),
    row("own batch sampler: shuffles pool after pool", batch_sampler=new(Pools)),
    row("own sampler: NumPy generator in an attribute",
        sampler=new(lambda: Own(lambda: np.random.default_rng(5)))),
    row("own sampler: `RandomState` in an attribute",
        sampler=new(lambda: Own(lambda: np.random.RandomState(5)))),
    row("own sampler: `random.Random` in an attribute",
        sampler=new(lambda: Own(lambda: random.Random(5)))),
    row("own sampler: counts its epochs", sampler=new(Epochs)),
    row("own sampler: shuffles its list in place", sampler=new(InPlace)),
    row("own sampler with `state_dict`", stateful="own", sampler=new(Telling)),
    row("draws in the dataset", stateful="own", shuffle=True, data=Noisy),
    row("dataset with a generator of its own", stateful="own", shuffle=True, data=OwnDraws),
    row("draws in `collate_fn`", stateful="own", shuffle=True, collate_fn=noisy_collate),
    row("iterable", data=Stream),
    row("iterable: shuffle buffer, draws", data=Buffered),
    row("iterable: counter and generator in attributes", data=Counting),
    row("iterable with `state_dict`", stateful="own", data=TellingStream),
    row("`holdfast.ElasticIterable`, draws", data=Lanes),
    row("2 workers", shuffle=True, num_workers=2),
    row("2 workers, `generator=`", shuffle=True, num_workers=2, generator=new(generator)),
    row("2 workers, draws in the dataset", shuffle=True, num_workers=2, data=Noisy),
    row("2 workers, dataset with `state_dict`", stateful="own", shuffle=True, num_workers=2,
        data=Saying),
    row("2 workers, own sampler: draws each index late", num_workers=2, sampler=new(Lazy)),
    row("2 workers, iterable: shuffle buffer, draws", num_workers=2, data=Buffered),
    row("2 workers, iterable with `state_dict`", stateful="own", num_workers=2, data=TellingStream),
    row("2 workers, `holdfast.ElasticIterable`, draws", num_workers=2, data=Lanes),
    row("2 workers, `persistent_workers=True`, draws in the dataset", shuffle=True, data=Noisy,
        num_workers=2, persistent_workers=True),
    row("`in_order=False`", plain="in_order=False cannot be saved",
        stateful="in_order=False cannot be saved", num_workers=2, in_order=False),
]  # fmt: skip

KINDS = {"plain": DataLoader, "stateful": StatefulDataLoader}


def page() -> str:
    """Return the table as the documentation shows it."""
    says = {"replay": "replayed", "own": "by its `state_dict`"}
    lines = [
        "| loader | `ResumableLoader(DataLoader(…))` | `StatefulDataLoader` |",
        "|---|---|---|",
    ]
    for setup in SETUPS:
        ends = (says.get(text, "refused") for text in (setup.plain, setup.stateful))
        lines.append(f"| {setup.name} | {' | '.join(ends)} |")
    return "\n".join(lines) + "\n"
