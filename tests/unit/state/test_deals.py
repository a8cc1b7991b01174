"""Which loaders' epochs can be dealt out anew, and what of them is known; no workers, no files."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.unit.state.attempts import inside, of_world
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast import ElasticSampler, ResumableLoader
from holdfast.errors import InvalidRequestError
from holdfast.state import rng
from holdfast.state.deals import check_agreed, deals_of

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11

SIZE = 12


def rest(loader: Any) -> list[int]:
    return [sample for batch in loader for sample in batch.flatten().tolist()]


def shared(ranks: int, kind: type = DataLoader, **more: Any) -> ResumableLoader:
    sampler = DistributedSampler(range(SIZE), ranks, 0, shuffle=False)
    return of_world(kind(torch.arange(SIZE), sampler=sampler, **more), (0, ranks))


class Nothing(IterableDataset):
    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    "loader",
    [
        lambda: DataLoader(Nothing()),
        lambda: DataLoader(range(SIZE), sampler=RandomSampler(range(SIZE), replacement=True)),
        lambda: DataLoader(range(SIZE), sampler=RandomSampler(range(SIZE), num_samples=3)),
        lambda: DataLoader(range(SIZE), sampler=[3, 1, 2]),
    ],
    ids=["stream", "with replacement", "a few", "a list"],
)
def test_what_does_not_give_each_sample_once_is_not_dealt_out(loader):
    assert deals_of(loader()) is None


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("shuffle", [True, False])
def test_one_rank_takes_over_what_several_had_shared_whatever_its_sampler(kind, shuffle):
    """The order is the one that was begun: also with torch's own sampler of one rank."""
    again = of_world(kind(torch.arange(SIZE), shuffle=shuffle), (0, 1))
    again.load_state_dict(inside(shared(2)))

    assert rest(again) == [*range(2, SIZE)]


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_a_loader_that_makes_no_batches_is_dealt_out_sample_by_sample(kind):
    """batch_size=None: what has a length of its own, or is a batch already."""
    loader, again = shared(2, kind, batch_size=None), shared(3, kind, batch_size=None)
    again.load_state_dict(inside(loader))

    assert rest(again) == [2, 5, 8, 11]


def test_a_loader_in_order_on_one_rank_goes_on_on_two():
    alone = of_world(DataLoader(torch.arange(SIZE)), (0, 1))
    again = shared(2)
    again.load_state_dict(inside(alone))

    assert rest(again) == [1, 3, 5, 7, 9, 11]  # the rest is repeated from 0, by the other rank


class Reversed(ElasticSampler):
    def order(self, epoch: int) -> torch.Tensor:
        return torch.arange(self.length).flip(0)


def test_an_order_of_ones_own_is_not_taken_for_torchs_by_one_rank():
    """It would use other samples than those that are left."""
    sampler = Reversed(range(SIZE), 2, 0)
    state = inside(of_world(DataLoader(range(SIZE), sampler=sampler), (0, 2)))

    with pytest.raises(InvalidRequestError, match="and has a SequentialSampler now"):
        of_world(DataLoader(range(SIZE)), (0, 1)).load_state_dict(state)


@pytest.mark.parametrize("ranks", [1, 2])
def test_only_of_one_rank_is_the_order_of_torchs_sampler_known(ranks):
    """Several permute each by itself: what one has used says nothing of the others."""
    state = inside(of_world(DataLoader(range(SIZE), shuffle=True), (0, ranks)))
    assert (state["dealt"] is None) is (ranks > 1)


def test_an_order_by_a_generator_of_the_samplers_own_is_not_known():
    sampler = RandomSampler(range(SIZE), generator=torch.Generator())
    state = inside(of_world(DataLoader(range(SIZE), sampler=sampler), (0, 1)))
    assert state["dealt"] is None


@pytest.mark.parametrize("own", [True, False])
def test_a_permutations_seed_is_drawn_after_that_of_workers_from_one_stream(own):
    """Unless these have a generator of their own; nothing is started to see it."""
    more = {"generator": torch.Generator()} if own else {}
    sampler = RandomSampler(range(SIZE))
    loader = DataLoader(range(SIZE), sampler=sampler, num_workers=2, **more)
    deals, made = deals_of(loader), rng.take()
    seeds = [int(torch.empty((), dtype=torch.int64).random_()) for _ in range(2)]

    assert deals.begun(alone=True, made=made, first=None).order.seed == seeds[0 if own else 1]


def test_one_rank_may_begin_an_epoch_twice_with_an_uneven_sampler():
    """No other rank could still be in it: a script that names no epochs goes on."""
    sampler = ElasticSampler(range(SIZE), 1, 0, even=False, shuffle=False)
    loader = of_world(DataLoader(torch.arange(SIZE), sampler=sampler), (0, 1))
    sampler.set_epoch(0)
    assert rest(loader) == [*range(SIZE)]
    sampler.set_epoch(0)
    assert rest(loader) == [*range(SIZE)]


@pytest.mark.parametrize("used", [1, 2])
def test_ranks_whose_loaders_share_nothing_agree_whatever_they_have_used(used):
    """Each has data of its own; other ranks go on with theirs, and are told."""

    def state(count: int) -> dict[str, object]:
        loader = of_world(DataLoader(range(SIZE), shuffle=True), (0, 2))
        iterator = iter(loader)
        for _ in range(count):
            next(iterator)
        return loader.state_dict()

    check_agreed("loader", {0: state(1), 1: state(used)})


def test_another_seed_is_refused_by_ranks_that_share_an_order():
    def make(seed: int, ranks: int) -> ResumableLoader:
        sampler = DistributedSampler(range(SIZE), ranks, 0, seed=seed)
        return of_world(DataLoader(range(SIZE), sampler=sampler), (0, ranks))

    with pytest.raises(InvalidRequestError, match="seed=0, but has seed=4 now"):
        make(4, 3).load_state_dict(inside(make(0, 2)))
