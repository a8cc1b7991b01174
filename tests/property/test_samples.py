"""Whatever ranks, batch sizes and kills: an epoch's samples are used as its order says, once each.

F81. Jobs of pretended ranks in one process; each attempt goes on from what the last one had saved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from holdfast.state.dataloaders import ResumableLoader
from holdfast.state.dealing import Deal, Tail
from holdfast.state.deals import check_agreed
from holdfast.state.positions import LoaderClock
from holdfast.state.samplers import ElasticSampler

EPOCHS = 3


@dataclass(frozen=True, kw_only=True)
class Make:
    """How the ranks of a job build their loaders."""

    length: int
    ranks: int = 1
    batch_size: int = 1
    kind: type = ElasticSampler
    seed: int = 0
    shuffle: bool = True
    drop: bool = False
    drop_batch: bool = False
    even: bool = True
    names_epochs: bool = True

    @property
    def tail(self) -> Tail:
        return Tail.DROP if self.drop else Tail.REPEAT if self.even else Tail.UNEVEN


@dataclass
class Rank:
    """The script of one rank: a state, and a loop over epochs that begins where that is."""

    make: Make
    rank: int
    epoch: int = 0
    loader: Any = field(init=False)

    def __post_init__(self) -> None:
        make = self.make
        even = {"even": make.even} if make.kind is ElasticSampler else {}
        sampler = make.kind(
            range(make.length), make.ranks, self.rank, make.shuffle, make.seed, make.drop, **even
        )
        loader = DataLoader(
            range(make.length), make.batch_size, sampler=sampler, drop_last=make.drop_batch
        )
        self.loader = ResumableLoader(loader)
        self.loader.bind(LoaderClock((self.rank, make.ranks)))

    def epochs(self) -> Iterator[Iterator[list[int]]]:
        """Yield what the model of this rank sees, epoch by epoch."""
        while self.epoch < EPOCHS:
            if self.make.names_epochs:
                self.loader.loader.sampler.set_epoch(self.epoch)
            yield (batch.tolist() for batch in self.loader)
            self.epoch += 1

    def state(self) -> dict[str, Any]:
        return {"loader": self.loader.state_dict(), "epoch": self.epoch}

    def load(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state["loader"])
        self.epoch = state["epoch"]


@dataclass
class Job:
    """Attempts one after the other; ``seen`` has, by epoch, the samples of each committed step."""

    seen: dict[int, list[list[list[int]]]] = field(default_factory=dict)
    saved: list[dict[str, Any]] | None = None
    is_done: bool = False

    def attempt(self, make: Make, steps: int | None = None) -> None:
        """Train until ``steps`` are committed and be killed; None: to the end."""
        if self.is_done:
            return
        ranks = [Rank(make, rank) for rank in range(make.ranks)]
        if self.saved is not None:
            if len(self.saved) != len(ranks):
                check_agreed("loader", dict(enumerate(s["loader"] for s in self.saved)))
            for rank in ranks:
                rank.load(self.saved[rank.rank % len(self.saved)])
        for number, batches in enumerate(_steps(make, ranks)):
            if number == steps:
                return  # this step was not committed
            self.seen.setdefault(ranks[0].epoch, []).append([batch or [] for batch in batches])
            if number + 1 == steps:
                self.saved = [rank.state() for rank in ranks]
        self.is_done = True

    def in_order(self, epoch: int) -> list[int]:
        """Return the samples of an epoch as ranks took them in turn."""
        steps = self.seen.get(epoch, [])
        return [
            sample
            for step in steps
            for in_turn in zip_longest(*step)
            for sample in in_turn
            if sample is not None
        ]


def _steps(make: Make, ranks: list[Rank]) -> Iterator[tuple[list[int] | None, ...]]:
    """Yield what ranks see, step by step; all have as many, else a collective waits for ever."""
    for epochs in zip(*(rank.epochs() for rank in ranks), strict=True):
        yield from zip(*epochs, strict=True) if make.even else zip_longest(*epochs)


def order(make: Make, epoch: int) -> list[int]:
    """Return the samples of an epoch as one rank takes them, by torch itself."""
    sampler = DistributedSampler(range(make.length), 1, 0, make.shuffle, make.seed)
    sampler.set_epoch(epoch)
    return list(sampler)


MAKES = st.builds(
    Make,
    length=st.integers(0, 40),
    kind=st.sampled_from([ElasticSampler, DistributedSampler]),
    seed=st.integers(0, 3),
    shuffle=st.booleans(),
    drop=st.booleans(),
    drop_batch=st.booleans(),
)
ATTEMPTS = st.lists(
    st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(0, 12)), min_size=1, max_size=6
)


@given(make=MAKES, attempts=ATTEMPTS)
def test_each_sample_is_used_once_in_each_epoch_whatever_ranks_come_and_go(make, attempts):
    """F81, known answer 7: the order of one rank, then at most ranks - 1 repeated or left out."""
    job = Job()
    for ranks, batch_size, steps in attempts:
        job.attempt(replace(make, ranks=ranks, batch_size=batch_size), steps)
    last = replace(make, ranks=ranks, batch_size=batch_size)
    job.attempt(last)

    for epoch in range(EPOCHS):
        expected, seen = order(make, epoch), job.in_order(epoch)
        assert seen[: len(expected)] == expected[: len(seen)]
        if not (make.drop or make.drop_batch):
            assert set(Counter(seen[: len(expected)]).values()) <= {1}
            repeated = seen[len(expected) :]
            assert len(repeated) < max(ranks for ranks, *_ in attempts)
            assert repeated == (expected * 5)[: len(repeated)]
        else:
            most = max(ranks * batch_size for ranks, batch_size, _ in attempts)
            assert len(expected) - most < len(seen)


@given(make=MAKES, attempts=ATTEMPTS)
@example(make=Make(length=4), attempts=[(3, 1, 2), (3, 1, 0), (1, 1, 0)])
@example(make=Make(length=2), attempts=[(1, 1, 1), (2, 1, 1)])
def test_uneven_it_is_exactly_once_with_nothing_repeated_and_nothing_left(make, attempts):
    """F81: ``even=False``, for evaluation and DDP's join: also if some have asked in vain."""
    make = replace(make, kind=ElasticSampler, drop=False, drop_batch=False, even=False)
    job = Job()
    for ranks, batch_size, steps in attempts:
        job.attempt(replace(make, ranks=ranks, batch_size=batch_size), steps)
    job.attempt(replace(make, ranks=ranks, batch_size=batch_size))

    assert [job.in_order(epoch) for epoch in range(EPOCHS)] == [
        order(make, epoch) for epoch in range(EPOCHS)
    ]


@given(
    length=st.integers(0, 60),
    ranks=st.integers(1, 9),
    rank=st.integers(0, 8),
    epoch=st.integers(0, 5),
    shuffle=st.booleans(),
    drop=st.booleans(),
)
def test_undisturbed_it_is_the_sampler_of_torch(length, ranks, rank, epoch, shuffle, drop):
    """Nobody's batches change by taking it."""
    assume(rank < ranks)
    given_ = (range(length), ranks, rank, shuffle, 3, drop)
    ours, torchs = ElasticSampler(*given_), DistributedSampler(*given_)
    ours.set_epoch(epoch)
    torchs.set_epoch(epoch)

    assert (len(ours), list(ours)) == (len(torchs), list(torchs))


@given(
    length=st.integers(0, 60),
    begin=st.integers(0, 70),
    ranks=st.integers(1, 9),
    batch_size=st.integers(1, 6),
    drop_last=st.booleans(),
    tail=st.sampled_from(Tail),
    batches=st.integers(0, 70),
)
def test_what_is_used_never_passes_the_end_and_grows(
    length, begin, ranks, batch_size, drop_last, tail, batches
):
    """The one number that all ranks agree on, for any deal."""
    assume(begin <= length)
    deal = Deal(length=length, begin=begin, ranks=ranks, tail=tail)
    counts = [len(deal.places(rank)) for rank in range(ranks)]
    used = deal.used(batches, batch_size, drop_last=drop_last)

    assert max(counts) - min(counts) <= (tail is Tail.UNEVEN)
    assert begin <= used <= length
    assert used <= deal.used(batches + 1, batch_size, drop_last=drop_last)
    whole = batches >= deal.batches(batch_size, drop_last=drop_last)
    assert whole == (used == length) or used == begin + batches * batch_size * ranks
