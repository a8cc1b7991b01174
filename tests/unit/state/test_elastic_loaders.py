"""Loaders go on with the rest of an epoch on another number of ranks, or say why they cannot.

F81: which samples, with real captures, segments, workers; the property is ``test_samples``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.unit.state.attempts import SIZE, Make, inside, of_world, shared, train, worlds
from tests.unit.state.setups import Lazy, Stream
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from holdfast import ElasticSampler, ResumableLoader
from holdfast.errors import InvalidRequestError, PreconditionError
from holdfast.state.capture import Capture

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata 0.11
    pytest.mark.filterwarnings("ignore:The 'repr' parameter"),
]


class Noisy(Dataset):
    """Augments, with draws of its process."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, torch.rand(1).item()


def sampled(sampler: type, kind: type = DataLoader, workers: int = 0, **more: Any) -> Make:
    """Return what makes the loader of a rank: called with rank, ranks, batch size."""

    def make(rank: int, ranks: int, batch_size: int) -> Any:
        shared = sampler(range(SIZE), ranks, rank, seed=3)
        loader = kind(Noisy(), batch_size, sampler=shared, num_workers=workers, **more)
        return ResumableLoader(loader) if kind is DataLoader else loader

    return make


def batched(rank: int, ranks: int, batch_size: int) -> Any:
    batches = BatchSampler(DistributedSampler(range(SIZE), ranks, rank, seed=3), batch_size, False)
    return ResumableLoader(DataLoader(Noisy(), batch_sampler=batches))


def shuffled_alone(rank: int, ranks: int, batch_size: int, workers: int = 0) -> Any:
    """As many scripts do: a sampler only where there are several ranks."""
    sampler = DistributedSampler(range(SIZE), ranks, rank, seed=3) if ranks > 1 else None
    shuffle = sampler is None
    loader = DataLoader(Noisy(), batch_size, shuffle, sampler, num_workers=workers)
    return ResumableLoader(loader)


def order() -> list[int]:
    return list(DistributedSampler(range(SIZE), 1, 0, seed=3))


MAKES = {
    "DistributedSampler": sampled(DistributedSampler),
    "ElasticSampler": sampled(ElasticSampler),
    "ElasticSampler, 2 workers": sampled(ElasticSampler, workers=2),
    "DistributedSampler, 2 persistent workers": sampled(
        DistributedSampler, workers=2, persistent_workers=True
    ),
    "torchdata": sampled(DistributedSampler, StatefulDataLoader),
    "torchdata, its sampler": sampled(StatefulDistributedSampler, StatefulDataLoader),
    "torchdata, ElasticSampler": sampled(ElasticSampler, StatefulDataLoader),
    "torchdata, ElasticSampler, 2 workers": sampled(ElasticSampler, StatefulDataLoader, 2),
    "batch_sampler": batched,
}


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_ranks_come_and_go_inside_an_epoch_and_the_order_stays(tmp_path, make):
    """F81: 3 ranks, 2 with other batches, killed and restarted, 4 to the end."""
    first, saved = train(tmp_path / "1", make, None, ranks=3, steps=2)
    second, saved = train(tmp_path / "2", make, saved, ranks=2, batch_size=3, steps=1)
    third, same = train(tmp_path / "3", make, saved, ranks=2, batch_size=3, steps=1)
    fourth, _ = train(tmp_path / "4", make, same, ranks=4)
    seen = [index for index, _ in first + second + third + fourth]

    assert seen[:SIZE] == order()
    assert seen[SIZE:] == order()[: len(seen) - SIZE]
    assert len(seen) < SIZE + 4


@pytest.mark.parametrize("make", [sampled(DistributedSampler), sampled(ElasticSampler, workers=2)])
def test_after_a_change_a_restart_on_the_same_ranks_is_bit_identical(tmp_path, make):
    """What is drawn at random, too: a deal that was made anew is replayed like any other."""
    _, saved = train(tmp_path / "1", make, None, ranks=3, steps=2)
    _, at_one = train(tmp_path / "2", make, saved, ranks=2, steps=1)
    through, _ = train(tmp_path / "3", make, saved, ranks=2)
    resumed, _ = train(tmp_path / "4", make, at_one, ranks=2)

    assert through[4:] == resumed


def test_augmentation_is_drawn_from_another_stream_on_each_rank(tmp_path):
    """Ranks that were not there before do not draw what others draw."""
    make = sampled(DistributedSampler)
    _, saved = train(tmp_path / "1", make, None, ranks=1, steps=2)
    seen, _ = train(tmp_path / "2", make, saved, ranks=3)
    again, _ = train(tmp_path / "3", make, saved, ranks=3)

    assert len({draw for _, draw in seen}) == len(seen)
    assert seen == again


@pytest.mark.parametrize("workers", [0, 2])
def test_a_script_that_has_a_sampler_only_on_several_ranks_goes_on_with_one_order(
    tmp_path, workers
):
    """1 rank with shuffle=True, 2 with a DistributedSampler, 1 again; and the other way round."""

    def make(rank: int, ranks: int, batch_size: int) -> Any:
        return shuffled_alone(rank, ranks, batch_size, workers)

    whole, _ = train(tmp_path / "0", make, None, ranks=1)
    first, saved = train(tmp_path / "1", make, None, ranks=1, steps=3)
    second, saved = train(tmp_path / "2", make, saved, ranks=2, steps=3)
    third, _ = train(tmp_path / "3", make, saved, ranks=1, batch_size=4)
    other, saved = train(tmp_path / "4", make, None, ranks=2, steps=3)
    rest, _ = train(tmp_path / "5", make, saved, ranks=1)

    assert [i for i, _ in first + second + third] == [i for i, _ in whole]
    assert [i for i, _ in other + rest] == order()


def test_a_checkpoint_of_the_last_batch_ends_the_epoch_on_any_ranks(tmp_path):
    """Also if there was something left out, which other ranks could take."""

    def make(rank: int, ranks: int, batch_size: int) -> Any:
        sampler = ElasticSampler(range(SIZE), ranks, rank, drop_last=True)
        return ResumableLoader(DataLoader(Noisy(), batch_size, sampler=sampler, drop_last=True))

    seen, saved = train(tmp_path / "1", make, None, ranks=4, batch_size=3, steps=3)
    assert len(seen) == SIZE - 1
    assert train(tmp_path / "2", make, saved, ranks=1, batch_size=1)[0] == []


def test_ranks_that_had_used_unequally_much_are_named(tmp_path):
    """One number for all, or none."""
    make = sampled(DistributedSampler)
    loaders = [make(rank, 2, 2) for rank in range(2)]
    captures = [Capture({"loader": one}, rank=r, world_size=2) for r, one in enumerate(loaders)]
    held = [iter(loader) for loader in loaders]
    for number, iterator in enumerate(held):
        for _ in range(number + 1):
            next(iterator)
    saved = worlds.save_all(tmp_path, captures)

    with (
        saved as segments,
        pytest.raises(
            InvalidRequestError,
            match=r"'loader': rank 0 had used 4 samples of epoch 0 and rank 1 8 samples",
        ),
    ):
        Capture({"loader": make(0, 3, 2)}, rank=0, world_size=3).load(segments, step=1)


class Weighted(ElasticSampler):
    """Draws with replacement, in an order that all ranks agree on."""

    def order(self, epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed + epoch)
        return torch.randint(self.length, (self.length,), generator=generator)


@pytest.mark.parametrize(
    ("saved", "here", "text"),
    [
        (lambda: shared(2), lambda: shared(3, size=40), "37 samples, and its data set has 40 now"),
        (lambda: shared(2), lambda: shared(2, size=40), "37 samples, and its data set has 40 now"),
        (lambda: shared(2), lambda: shared(3, seed=4), "with seed=0, but has seed=4 now"),
        (lambda: shared(2), lambda: shared(3, shuffle=False), "with shuffle=True, but has"),
        (
            lambda: shared(2),
            lambda: of_world(DataLoader(range(SIZE), sampler=Lazy()), (0, 3)),
            r"that 2 ranks share, and has a Lazy now.*\n.*holdfast\.ElasticSampler\(dataset\)",
        ),
        (
            lambda: shared(2),
            lambda: of_world(DataLoader(range(SIZE), shuffle=True), (0, 3)),
            "that 2 ranks share, and has a RandomSampler now",
        ),
        (
            lambda: of_world(DataLoader(range(SIZE), sampler=Lazy()), (0, 1)),
            lambda: shared(3),
            "whose order only its sampler knew, on 1 ranks",
        ),
        (
            lambda: shared(2),
            lambda: of_world(DataLoader(range(SIZE), sampler=Weighted(range(SIZE), 3, 0)), (0, 3)),
            "with the order of torch, but has the order of Weighted",
        ),
    ],
    ids=["data", "data, same ranks", "seed", "shuffle", "own", "random", "to shared", "order"],
)
def test_another_order_is_refused_by_name(saved, here, text):
    """It would use some samples twice and others not at all, and nobody would see it."""
    with pytest.raises(InvalidRequestError, match=f"(?s){text}"):
        here().load_state_dict(inside(saved()))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: DataLoader(range(SIZE), shuffle=True), "a RandomSampler does not say how"),
        (lambda: DataLoader(range(SIZE), sampler=Lazy()), "a Lazy does not say how"),
        (lambda: DataLoader(Stream()), "its iterable data set, Stream, does not say how"),
    ],
)
def test_ranks_that_share_nothing_go_on_and_are_told(make, text, caplog):
    """Each uses all the data in an order of its own, or knows what is its own only itself."""
    of_world(make(), (0, 3)).load_state_dict(inside(of_world(make(), (0, 2))))

    assert "saved inside an epoch by 2 ranks, and now there are 3" in caplog.text
    assert text in caplog.text


def test_an_epoch_begun_and_not_used_begins_anew_on_other_ranks_with_other_workers(tmp_path):
    """torchdata refuses the state of its iterator without workers where there are some."""
    loaders = [sampled(DistributedSampler, StatefulDataLoader)(rank, 2, 13) for rank in range(2)]
    captures = [Capture({"loader": one}, rank=r, world_size=2) for r, one in enumerate(loaders)]
    held = [iter(loader) for loader in loaders]
    make = sampled(DistributedSampler, StatefulDataLoader, workers=1)
    with worlds.save_all(tmp_path, captures) as segments:
        loader = make(0, 3, 13)
        capture = Capture({"loader": loader}, rank=0, world_size=3)
        capture.load(segments, step=1)
    batches = list(loader)

    assert [13] == [len(samples) for samples, _ in batches]
    assert [2, 2] == [len(iterator) for iterator in held]
    capture.release()


def test_between_epochs_data_and_ranks_may_change():
    """Nothing was begun that could not be ended."""
    loader = shared(2)
    assert len(list(loader)) == 19
    other = shared(3, size=10, seed=4)
    other.load_state_dict(loader.state_dict())

    assert len(list(other)) == 4


def test_draws_with_replacement_are_dealt_out_by_an_order_of_ones_own():
    """Each draw once, though a sample may be drawn often."""

    def make(rank: int, ranks: int) -> ResumableLoader:
        sampler = Weighted(range(SIZE), ranks, rank)
        return of_world(DataLoader(range(SIZE), sampler=sampler), (rank, ranks))

    saved, seen = [], []
    for rank in range(2):
        loader = make(rank, 2)
        seen.append(next(iterator := iter(loader)).item())
        saved.append(loader.state_dict())
        del iterator
    rest = make(0, 1)
    rest.load_state_dict(saved[0])

    whole = Weighted(range(SIZE)).order(0).tolist()
    assert seen + [batch.item() for batch in rest] == whole


def test_an_epoch_that_nobody_names_is_the_next_one():
    """``set_epoch`` forgotten: torch would give the same order for ever."""
    ours, named = ElasticSampler(range(9)), ElasticSampler(range(9))
    unnamed = [list(ours) for _ in range(3)]
    by_name = []
    for epoch in range(3):
        named.set_epoch(epoch)
        by_name.append(list(named))

    assert unnamed == by_name
    assert unnamed[0] != unnamed[1]


def test_without_a_process_group_it_is_for_one_rank_or_refuses(monkeypatch):
    assert ElasticSampler(range(3)).num_replicas == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(PreconditionError, match="after init_process_group"):
        ElasticSampler(range(3))
    with pytest.raises(InvalidRequestError, match="rank=2 is none of num_replicas=2"):
        ElasticSampler(range(3), 2, 2)
    with pytest.raises(InvalidRequestError, match="rank=-1 is none of num_replicas=2"):
        ElasticSampler(range(3), 2, -1)
    with pytest.raises(InvalidRequestError, match="choose one"):
        ElasticSampler(range(3), 2, 1, drop_last=True, even=False)


def test_with_a_process_group_what_is_not_given_is_as_that_says(world):
    """Else two ranks would both be rank 0 of one, and read every sample twice."""
    world(1, 3)
    for given, taken in [
        ((None, None), (3, 1)),
        ((None, 2), (3, 2)),
        ((5, None), (5, 1)),
        ((2, 0), (2, 0)),
    ]:
        sampler = ElasticSampler(range(SIZE), *given)
        assert (sampler.num_replicas, sampler.rank) == taken

    loader = ResumableLoader(DataLoader(range(SIZE), sampler=ElasticSampler(range(SIZE))))
    assert inside(loader)["world"] == [1, 3], "also of a loader that is in no capture"


@pytest.mark.parametrize(
    "more",
    [{"replacement": True}, {"generator": torch.Generator()}],
    ids=["with replacement", "by a generator of its own"],
)
def test_an_order_that_only_a_sampler_knows_is_not_dealt_out_in_batches_of_another_size(more):
    """As a permutation of the global seed it would be another one: samples never come, or twice."""

    def make(batch_size: int) -> ResumableLoader:
        sampler = RandomSampler(range(SIZE), **more)
        return of_world(DataLoader(range(SIZE), batch_size, sampler=sampler), (0, 1))

    with pytest.raises(InvalidRequestError, match="batch_size=2, but has batch_size=3 now"):
        make(3).load_state_dict(inside(make(2)))


def test_a_permutation_is_known_where_workers_have_a_generator_of_their_own():
    """Then making the iterator draws nothing from the stream of the permutation."""

    def make(batch_size: int) -> ResumableLoader:
        loader = DataLoader(
            range(SIZE),
            batch_size,
            sampler=RandomSampler(range(SIZE)),
            num_workers=1,
            generator=torch.Generator(),
        )
        return of_world(loader, (0, 1))

    first, then = make(2), make(5)
    iterator = iter(first)
    seen = next(iterator).tolist()
    then.load_state_dict(first.state_dict())
    del iterator

    assert sorted(seen + [sample for batch in then for sample in batch.tolist()]) == [*range(SIZE)]


@pytest.mark.parametrize(("workers", "epoch"), [(0, 7), (1, 0)])
def test_an_epoch_that_is_set_beside_an_iterator_is_of_those_that_ask_later(workers, epoch):
    """Workers are asked at once, else the first batch asks: what is saved says which it was."""
    sampler = ElasticSampler(range(SIZE), 2, 0)
    loader = of_world(DataLoader(range(SIZE), sampler=sampler, num_workers=workers), (0, 2))
    iterator = iter(loader)
    sampler.set_epoch(7)
    next(iterator)

    assert loader.state_dict()["dealt"]["order"]["epoch"] == epoch


@pytest.mark.parametrize("size", [SIZE - 1, SIZE + 1])
def test_an_order_of_ones_own_of_other_than_all_samples_is_refused(size):
    """Ranks would share another number than they say: some samples never come, or twice."""

    class Filtered(ElasticSampler):
        def order(self, epoch: int) -> range:
            return range(size)

    with pytest.raises(InvalidRequestError, match=rf"order\(\) gave {size} samples.*has {SIZE}"):
        list(Filtered(range(SIZE), 2, 0))


def test_an_order_of_another_class_is_refused_and_both_are_named():
    """The one that has no class of its own is torch's."""
    own, torchs = Weighted(range(SIZE), 2, 0), ElasticSampler(range(SIZE), 2, 0)
    for sampler, other, named in [(own, torchs, ("Weighted", "torch")),
                                  (torchs, own, ("torch", "Weighted"))]:  # fmt: skip
        next(iter(sampler))
        text = "with the order of {}, but has the order of {} now".format(*named)
        with pytest.raises(InvalidRequestError, match=text):
            other.load_state_dict(sampler.state_dict())


@pytest.mark.parametrize("passes", [0, 1])
def test_a_sampler_that_was_saved_between_passes_goes_on_with_the_next_one(passes):
    """Else the first epoch, or the one after the last, would be left out or come twice."""
    sampler, again = ElasticSampler(range(SIZE)), ElasticSampler(range(SIZE))
    for _ in range(passes):
        list(sampler)
    again.load_state_dict(sampler.state_dict())

    assert list(again) == list(sampler)
    assert again.epoch == passes


def test_samples_that_are_given_once_more_to_be_as_many_on_each_rank_count_as_no_others():
    """Of an epoch that is at its end nothing is to come, and not less than nothing."""
    sampler = ElasticSampler(range(5), 2, 0)
    iterator = iter(sampler)
    for _ in range(3):
        next(iterator)

    assert (sampler.state_dict()["index"], sampler.state_dict()["live"]) == (5, True)
