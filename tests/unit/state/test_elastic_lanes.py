"""Iterable data sets of lanes go on with the rest of an epoch, on other ranks and other workers.

F81: which samples, with real captures, segments, workers; the property is ``test_lanes``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.unit.state.attempts import SIZE, Make, inside, of_world, shared, train, worlds
from tests.unit.state.setups import Stream
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast import ElasticIterable, ResumableLoader
from holdfast.errors import InvalidRequestError, ManifestError, PreconditionError
from holdfast.state.capture import Capture

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata 0.11
    pytest.mark.filterwarnings("ignore:The 'repr' parameter"),
]
LENGTHS = (9, 0, 13, 2, 13)  # SIZE samples


class Lines(ElasticIterable):
    """Files of numbers: a sample is its lane, its place there, and a draw."""

    def lane(self, number: int, start: int, stop: int) -> Iterator[tuple[int, float]]:
        for at in range(start, stop):
            yield 100 * number + at, torch.rand(1).item()


def lines(workers: int = 0, kind: type = DataLoader, **more: Any) -> Make:
    def make(rank: int, ranks: int, batch_size: int) -> Any:
        data = Lines(LENGTHS, ranks, rank, **more)
        loader = kind(data, batch_size, num_workers=workers)
        return ResumableLoader(loader) if kind is DataLoader else loader

    return make


def every_line() -> list[int]:
    return [100 * number + at for number, length in enumerate(LENGTHS) for at in range(length)]


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (lines(), lines()),
        (lines(2), lines(1)),
        (lines(shuffle=True), lines(2, shuffle=True)),
        (lines(2, StatefulDataLoader), lines(0, StatefulDataLoader)),
        (lines(2, StatefulDataLoader), lines(2)),
    ],
    ids=["in the process", "workers", "shuffled", "torchdata", "from torchdata"],
)
def test_lanes_are_dealt_out_to_other_ranks_and_workers(tmp_path, first, then):
    """F81: an iterable data set; what workers had read ahead counts for nothing."""
    seen, saved = train(tmp_path / "1", first, None, ranks=3, steps=2)
    more, saved = train(tmp_path / "2", then, saved, ranks=2, batch_size=3, steps=1)
    again, saved = train(tmp_path / "3", then, saved, ranks=2, batch_size=3, steps=1)
    last, _ = train(tmp_path / "4", first, saved, ranks=4)
    samples = [sample for sample, _ in seen + more + again + last]

    assert sorted(set(samples)) == every_line()
    assert len(samples) < SIZE + 4
    assert len({draw for _, draw in last}) == len(last)


@pytest.mark.parametrize("make", [lines(), lines(2), lines(2, StatefulDataLoader)])
def test_lanes_on_the_same_ranks_are_replayed_bit_for_bit(tmp_path, make):
    """Draws too; after a change as before it."""
    whole, _ = train(tmp_path / "0", make, None, ranks=2)
    first, saved = train(tmp_path / "1", make, None, ranks=2, steps=3)
    second, _ = train(tmp_path / "2", make, saved, ranks=2)
    assert first + second == whole

    _, at_one = train(tmp_path / "3", make, saved, ranks=3, steps=1)
    through, _ = train(tmp_path / "4", make, saved, ranks=3)
    resumed, _ = train(tmp_path / "5", make, at_one, ranks=3)
    assert through[6:] == resumed


def test_a_seeking_data_set_reads_nothing_twice_and_gives_the_same_samples(tmp_path):
    """Else a restart late in an epoch reads nearly all of it once more."""
    read: list[int] = []

    class Noting(Lines):
        def lane(self, number: int, start: int, stop: int) -> Iterator[tuple[int, float]]:
            for sample in super().lane(number, start, stop):
                read.append(sample[0])
                yield sample

    def make(rank: int, ranks: int, batch_size: int) -> ResumableLoader:
        data = Noting(LENGTHS, ranks, rank, seek=True)
        return ResumableLoader(DataLoader(data, batch_size))

    whole, _ = train(tmp_path / "0", make, None, ranks=1)
    first, saved = train(tmp_path / "1", make, None, ranks=1, steps=15)
    read.clear()
    second, _ = train(tmp_path / "2", make, saved, ranks=1)

    assert [i for i, _ in first + second] == [i for i, _ in whole]
    assert read == [sample for sample, _ in second]


def test_lanes_of_other_lengths_are_refused_and_so_is_a_lane_that_ends_early():
    loader = of_world(DataLoader(Lines(LENGTHS, 2, 0), 2), (0, 2))
    saved = inside(loader)
    other = of_world(DataLoader(Lines((9, 1, 12, 2, 13), 2, 0), 2), (0, 2))
    with pytest.raises(InvalidRequestError, match="the order of lanes"):
        other.load_state_dict(saved)
    with pytest.raises(InvalidRequestError, match="of a data set with a sampler"):
        loader.load_state_dict(inside(shared(2)))
    with pytest.raises(InvalidRequestError, match="has its iterable data set, Stream, now"):
        of_world(DataLoader(Stream()), (0, 2)).load_state_dict(saved)
    with pytest.raises(InvalidRequestError, match="has a DistributedSampler now, which does not"):
        shared(3).load_state_dict(saved)
    broken = {**saved, "dealt": {**saved["dealt"], "tail": "torn"}}
    with pytest.raises(ManifestError, match="does not say how samples were dealt out"):
        loader.load_state_dict(broken)
    for length in (-1, 2.5, float("nan")):
        with pytest.raises(InvalidRequestError, match=f"lengths= has {length}"):
            Lines([3, length])
    for lengths in (5, ["3"], [float("inf")], [None]):
        with pytest.raises(InvalidRequestError, match="lengths= has the number of samples of each"):
            Lines(lengths)
    with pytest.raises(InvalidRequestError, match="choose one"):
        Lines(LENGTHS, drop_last=True, even=False)

    class Short(Lines):
        def lane(self, number: int, start: int, stop: int) -> Iterator[tuple[int, float]]:
            yield from list(super().lane(number, start, stop))[:-1]

    with pytest.raises(InvalidRequestError, match=r"lane\(0, 0, 5\) of Short gave 4 samples"):
        list(Short([5]))

    class Long(Lines):
        def lane(self, number: int, start: int, stop: int) -> Iterator[tuple[int, float]]:
            return super().lane(number, start, stop + 1)

    given = iter(Long([5]))
    assert len([next(given) for _ in range(5)]) == 5
    with pytest.raises(InvalidRequestError, match=r"lane\(0, 0, 5\) of Long gave more samples"):
        next(given)


def test_two_loaders_of_one_data_set_each_read_in_their_own_batches():
    """What one was told is nothing to the other: the rest of the first is the rest of the first."""

    def make(workers: int) -> tuple[ResumableLoader, ResumableLoader]:
        data = Lines(LENGTHS, 1, 0)
        first = DataLoader(data, 4, num_workers=workers, collate_fn=list)
        return of_world(first, (0, 1)), of_world(DataLoader(data, 5), (0, 1))

    first, second = make(2)
    iterator = iter(first)
    seen = next(iterator)
    list(second)
    seen += next(iterator)
    again, _ = make(0)
    again.load_state_dict(first.state_dict())
    del iterator
    samples = [sample for batch in [seen, *again] for sample, _ in batch]

    assert len(samples) == SIZE
    assert sorted(samples) == every_line()


@pytest.mark.parametrize("workers", [0, 2])
def test_what_reads_the_data_set_beside_its_loader_has_a_whole_epoch(workers):
    """What is left is dealt out by the next iterator of the loader alone."""
    saved = inside(of_world(DataLoader(Lines(LENGTHS, 1, 0), 4), (0, 1)))
    data = Lines(LENGTHS, 1, 0)
    loader = of_world(DataLoader(data, 5, num_workers=workers), (0, 1))
    loader.load_state_dict(saved)
    iterator = iter(loader)
    at_once = len(list(data))
    left = sum(len(numbers) for numbers, _ in iterator)

    assert (at_once, left, len(list(data))) == (SIZE, SIZE - 4, SIZE)


def of_two(rank: int, size: int | None = 1, ranks: int = 2, **more: Any) -> ResumableLoader:
    return of_world(DataLoader(Lines((5,), ranks, rank, **more), size), (rank, ranks))


def numbers_of(loader: Any) -> list[int]:
    return [int(number) for number, _ in loader]


def test_lanes_whose_tail_is_another_now_are_dealt_out_anew_on_the_same_ranks():
    """Drawn once more they would be other ones: rank 1 would read again what it had."""
    saved = [inside(of_two(rank)) for rank in range(2)]  # samples 0 and 3
    seen = [0, 3]
    for rank in range(2):
        loader = of_two(rank, drop_last=True)
        loader.load_state_dict(saved[rank])
        seen += numbers_of(loader)

    assert sorted(seen) == [0, 1, 2, 3]


def test_lanes_of_which_ranks_had_used_unequally_much_are_refused_by_other_ranks(tmp_path):
    """What is left is not what either of them says."""
    captures, held = [], []
    for rank in range(2):
        loader = of_two(rank)
        held.append(iter(loader))
        for _ in range(1 + rank):
            next(held[-1])
        captures.append(Capture({"loader": loader}, rank=rank, world_size=2))
    with (
        worlds.save_all(tmp_path, captures) as saved,
        pytest.raises(InvalidRequestError, match=r"rank 0 had used 2 samples .* rank 1 4 samples"),
    ):
        Capture({"loader": of_two(0, ranks=3)}, rank=0, world_size=3).load(saved, step=1)


def test_lanes_that_are_not_made_into_batches_are_dealt_out_too():
    saved, seen = inside(of_two(0, None)), [0, 3]
    for rank in range(3):
        loader = of_two(rank, None, ranks=3)
        loader.load_state_dict(saved)
        seen += numbers_of(loader)

    assert sorted(seen) == list(range(5))


def test_lanes_that_are_mixed_by_an_iter_of_their_own_are_told(caplog):
    """What such a data set has given is no part from the beginning of what was dealt out."""

    class Mixed(Lines):
        def __iter__(self) -> Iterator[tuple[int, float]]:
            return iter(list(super().__iter__())[::-1])

    of_world(DataLoader(Mixed(LENGTHS, 3, 0), 2), (0, 3)).load_state_dict(
        inside(of_world(DataLoader(Mixed(LENGTHS, 2, 0), 2), (0, 2)))
    )

    assert "its iterable data set, Mixed, does not say how they share it" in caplog.text
    assert "leave its __iter__ to holdfast.ElasticIterable" in caplog.text


class Late(DataLoader):
    """Makes its iterator with the first batch, as loaders around loaders do."""

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()


class Apart(DataLoader):
    """Has what it gives from somewhere else."""

    def __iter__(self) -> Iterator[Any]:
        return iter([torch.zeros(1), torch.zeros(1)])


@pytest.mark.parametrize("data", [None, Lines])
def test_a_loader_that_makes_its_iterator_late_deals_the_rest_out_too(data):
    def make(rank: int, ranks: int, kind: type) -> ResumableLoader:
        held = Lines(LENGTHS, ranks, rank) if data else range(SIZE)
        sampler = None if data else DistributedSampler(held, ranks, rank, shuffle=False)
        return of_world(kind(held, 2, sampler=sampler), (rank, ranks))

    saved = inside(make(0, 2, Late))
    late, plain = make(0, 3, Late), make(0, 3, DataLoader)
    late.load_state_dict(saved)
    plain.load_state_dict(saved)

    found, expected = list(late), list(plain)
    assert repr([b[0] if data else b for b in found]) == repr(
        [b[0] if data else b for b in expected]
    )
    assert len(list(late)) == len(list(plain)) > len(found), "the next epoch is a whole one"


def test_a_loader_that_makes_its_batches_elsewhere_is_refused_with_the_first():
    """It would give a whole epoch, and nobody would see it."""
    saved = inside(shared(2))
    sampler = DistributedSampler(range(SIZE), 3, 0)
    loader = of_world(Apart(range(SIZE), sampler=sampler), (0, 3))
    loader.load_state_dict(saved)
    with pytest.raises(PreconditionError, match="Apart makes its batches in a way of its own"):
        next(iter(loader))


def test_lanes_are_shuffled_anew_in_each_epoch_and_by_the_seed_alone():
    whole = sorted(Lines(LENGTHS).ranges(0))
    orders = [Lines(LENGTHS, shuffle=True, seed=3).ranges(epoch) for epoch in range(4)]

    assert [whole] * 4 == [sorted(ranges) for ranges in orders]
    assert len({tuple(ranges) for ranges in orders}) > 1
    assert orders[1] == Lines(LENGTHS, 2, 1, shuffle=True, seed=3).ranges(1)
    assert whole == Lines(LENGTHS).ranges(1)
