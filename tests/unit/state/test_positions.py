"""What a loader's position says and does where a loop uses it in an unusual way; no workers."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from tests.unit.state.attempts import inside, of_world, shared
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast import ElasticSampler, ResumableLoader
from holdfast.errors import InvalidRequestError, PreconditionError
from holdfast.state.passes import PassedLoader
from holdfast.state.positions import LoaderClock

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11

SIZE = 12


def shuffled(batch_size: int = 2, **more: Any) -> ResumableLoader:
    return ResumableLoader(DataLoader(range(SIZE), batch_size, shuffle=True, **more))


def rest(loader: Any) -> list[int]:
    return [sample for batch in loader for sample in batch.tolist()]


def restored(loaders: list[ResumableLoader], states: list[dict]) -> None:
    """Load as a capture does: the stream is set, and once more until a batch was drawn."""
    clock, stream = LoaderClock(), torch.get_rng_state()
    for loader, state in zip(loaders, states, strict=True):
        loader.bind(clock)
        loader.load_state_dict(state)
    torch.rand(7)
    clock.arm(lambda: torch.set_rng_state(stream))


def test_what_a_script_draws_between_restore_and_loop_moves_nothing_that_follows():
    """G9: a new model is initialized then, and not in the run that was not stopped."""
    state, again = inside(shuffled()), shuffled()
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    restored([again], [state])
    torch.rand(3)
    iter(again)

    assert torch.equal(expected, torch.rand(2))


def test_a_second_loader_that_goes_on_later_takes_no_draw_back():
    """G9: once one has given a batch the stream is the loop's, whoever is made again then."""
    states = [inside(shuffled()) for _ in range(2)]
    first, second = shuffled(), shuffled()
    torch.manual_seed(5)
    restored([first, second], states)
    next(iter(first))
    before = torch.rand(2)
    iter(second)

    assert not torch.equal(before, torch.rand(2))


@pytest.mark.parametrize("several", [True, False])
def test_what_is_drawn_through_something_around_loaders_is_not_dealt_out(several, caplog):
    """From several at once, or where the loop counts on its batches: no sampler tells of it."""

    def make(ranks: int) -> PassedLoader:
        loaders = [
            DataLoader(range(SIZE), sampler=DistributedSampler(range(SIZE), ranks, 0))
            for _ in range(2 if several else 1)
        ]
        made = PassedLoader(loaders, lambda: zip(*loaders, strict=True), deals=several)
        made.bind(LoaderClock((0, ranks)))
        return made

    state = inside(make(2))
    assert state["dealt"] is None
    make(3).load_state_dict(state)
    assert ("samples may be used twice" in caplog.text) is several


def test_an_epoch_that_all_ranks_end_in_one_step_leaves_nothing_to_be_told():
    loader = shared(2)
    list(loader)
    assert loader.state_dict()["over"] is None


def test_iterators_that_are_drawn_from_in_turn_are_told_once(caplog):
    """G9: not with each batch of the rest of the run."""
    loader = ResumableLoader(DataLoader(range(6)))
    first, second = iter(loader), iter(loader)
    for iterator in (first, second) * 2:
        next(iterator)

    assert ["training goes on" in r.getMessage() for r in caplog.records] == [True]
    assert caplog.records[0].levelno == logging.ERROR


def test_an_iterator_of_before_a_restore_still_gives_batches():
    """Training goes on with it; what is saved could not be restored."""
    loader = ResumableLoader(DataLoader(range(6)))
    state = inside(ResumableLoader(DataLoader(range(6))))
    iterator = iter(loader)
    next(iterator)
    loader.load_state_dict(state)

    assert next(iterator).tolist() == [1]
    with pytest.raises(InvalidRequestError, match="two iterators of a data loader"):
        loader.state_dict()


def test_a_loop_that_breaks_off_early_is_not_taken_for_one_that_counts(caplog):
    loader = shuffled()
    for _ in range(2):
        for _ in loader:
            break

    assert not caplog.records
    assert loader.state_dict()["counted"] is False


def test_a_loop_that_says_that_it_counts_hears_nothing(caplog):
    """And one that does not hears it once."""
    for counted in (True, False):
        loader = ResumableLoader(DataLoader(range(4), 2), counted=counted)
        for _ in range(3):
            iterator = iter(loader)
            for _ in range(2):
                next(iterator)

    assert ["counts the batches" in r.getMessage() for r in caplog.records] == [True]


@pytest.mark.parametrize("saved", [True, False])
def test_a_loop_counts_if_either_it_or_the_checkpoint_says_so(saved):
    """Else a restart from the last step of an epoch would begin with an empty one."""
    loader = ResumableLoader(DataLoader(range(4), 2), counted=saved)
    again = ResumableLoader(DataLoader(range(4), 2), counted=not saved)
    again.load_state_dict(loader.state_dict())
    iterator = iter(again)
    for _ in range(2):
        next(iterator)

    assert again.state_dict()["live"] is False


def test_what_is_saved_before_a_restored_loader_begins_is_what_was_loaded():
    """A job that is killed once more before it trains loses nothing of its epoch."""
    state = inside(shuffled())
    again, last = shuffled(), shuffled()
    again.load_state_dict(state)
    last.load_state_dict(again.state_dict())
    again = shuffled()
    again.load_state_dict(state)

    assert rest(last) == rest(again)


class Wordless(Sampler):
    """Draws an order of its own, and says nothing of where it is."""

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Any:
        return iter(torch.randperm(SIZE).tolist())


def test_torchdatas_loader_with_a_sampler_that_cannot_tell_is_replayed():
    """Its own state has no word of the order: a restart would draw another."""

    def make() -> ResumableLoader:
        return ResumableLoader(StatefulDataLoader(range(SIZE), 2, sampler=Wordless()))

    loader, again = make(), make()
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    again.load_state_dict(state)

    assert state["own"] is None
    assert rest(again) == rest(iterator)


def test_torchdatas_loader_inside_something_that_cannot_tell_is_replayed():
    """What a framework makes around its iterator is what is drawn from."""

    def make() -> PassedLoader:
        loader = StatefulDataLoader(range(SIZE), 2)
        return PassedLoader([loader], lambda: (batch for batch in loader))

    again = make()
    again.load_state_dict(inside(make()))
    assert rest(again) == [*range(2, SIZE)]


def test_what_is_dealt_anew_to_torchdatas_loader_is_replayed_too():
    """Its own state is of another order than its sampler's, so that it could not go on by it."""

    def make(rank: int, ranks: int) -> ResumableLoader:
        sampler = DistributedSampler(range(SIZE), ranks, rank)
        return of_world(StatefulDataLoader(range(SIZE), 1, sampler=sampler), (rank, ranks))

    second, third = make(0, 2), make(0, 2)
    second.load_state_dict(inside(make(0, 3)))
    iterator = iter(second)
    next(iterator)
    state = second.state_dict()
    third.load_state_dict(state)

    assert state["own"] is None
    assert rest(third) == rest(iterator)


def test_a_script_may_draw_between_an_iterator_and_its_first_batch():
    """A sampler draws its seed with the first batch: that is where its stream is."""
    loader, again = shuffled(), shuffled()
    iterator = iter(loader)
    torch.rand(3)
    next(iterator)
    again.load_state_dict(loader.state_dict())

    assert rest(again) == rest(iterator)


def test_an_iterator_that_has_given_nothing_is_made_again_by_the_streams_of_its_time():
    """What it had drawn from the loader's generator is not drawn once more."""

    def make() -> ResumableLoader:
        sampler = DistributedSampler(range(SIZE), 2, 0)
        generator = torch.Generator().manual_seed(5)
        loader = DataLoader(range(SIZE), sampler=sampler, generator=generator)
        return of_world(loader, (0, 2))

    loader, again = make(), make()
    kept = iter(loader)
    again.load_state_dict(loader.state_dict())
    made = iter(again)

    states = [one.loader.generator.get_state() for one in (loader, again)]
    assert torch.equal(*states)
    del kept, made


def test_an_order_that_was_not_drawn_yet_is_drawn_from_the_stream_that_was_restored():
    """An iterator was made, and had given nothing: its sampler draws with the first batch."""
    loader, again = shuffled(), shuffled()
    iterator = iter(loader)
    state, stream = loader.state_dict(), torch.get_rng_state()
    order = rest(iterator)
    torch.set_rng_state(stream)
    again.load_state_dict(state)

    assert rest(again) == order


def alone(batch_size: int = 1, **more: Any) -> ResumableLoader:
    sampler = RandomSampler(range(SIZE))
    return of_world(DataLoader(range(SIZE), batch_size, sampler=sampler, **more), (0, 1))


def unshared() -> ResumableLoader:
    return of_world(DataLoader(range(SIZE), sampler=RandomSampler(range(SIZE))), (0, 2))


def test_one_rank_goes_on_in_batches_of_another_size():
    """No other rank shares its order, so that the rest of it can be dealt out."""
    loader, again = alone(2), alone(5)
    iterator = iter(loader)
    next(iterator)
    again.load_state_dict(loader.state_dict())

    assert rest(again) == rest(iterator)


def test_an_order_of_one_rank_is_not_shared_by_ranks_that_share_none(caplog):
    """They go on, each with its own, and are told."""
    unshared().load_state_dict(inside(alone()))
    assert "saved inside an epoch by 1 ranks, and now there are 2" in caplog.text


def test_ranks_that_share_an_order_begun_by_one_cannot_stop_sharing_it():
    """Each would use all that is left, and nobody would see it."""
    sharing = shared(2, size=37)
    sharing.load_state_dict(inside(of_world(DataLoader(range(37), shuffle=True), (0, 1))))
    state = inside(sharing)
    assert state["dealt"]["order"]["of"]
    with pytest.raises(InvalidRequestError, match="that 2 ranks share, and has a RandomSampler"):
        unshared().load_state_dict(state)


def elastic(ranks: int = 2, kind: type = ElasticSampler, **more: Any) -> ResumableLoader:
    return of_world(DataLoader(Seen(), sampler=kind(range(SIZE), ranks, 0, **more)), (0, ranks))


class Seen:
    """Data that note what was asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        self.asked.append(index)
        return index


@pytest.mark.parametrize(
    "make",
    [
        lambda: elastic(kind=DistributedSampler, shuffle=False),
        lambda: elastic(shuffle=False, drop_last=True),
        lambda: of_world(
            DataLoader(Seen(), sampler=ElasticSampler(range(SIZE), 2, 0, shuffle=False)), (0, 4)
        ),
    ],
    ids=["another sampler", "another tail", "more ranks of the same share"],
)
def test_where_anything_of_the_deal_has_changed_nothing_is_drawn_twice(make):
    """The rest is dealt out anew; only what goes on just as it was is replayed."""
    again = make()
    again.load_state_dict(inside(elastic(shuffle=False)))

    assert rest(again) == [*range(2, SIZE, 2)]
    assert again.loader.dataset.asked == [*range(2, SIZE, 2)]
    replayed = elastic(shuffle=False)
    replayed.load_state_dict(inside(elastic(shuffle=False)))
    assert rest(replayed) == [*range(2, SIZE, 2)]
    assert replayed.loader.dataset.asked == [*range(0, SIZE, 2)]


def test_an_epoch_that_torchdatas_loader_began_goes_on_in_torchs():
    """Which has no state of its own to go on by: the rest is dealt out."""

    def make(kind: type) -> ResumableLoader:
        sampler = DistributedSampler(range(SIZE), 2, 0, shuffle=False)
        return of_world(kind(range(SIZE), sampler=sampler), (0, 2))

    state = inside(make(StatefulDataLoader))
    assert state["own"] is not None
    again = make(DataLoader)
    again.load_state_dict(state)
    assert rest(again) == [*range(2, SIZE, 2)]


def test_ranks_that_share_nothing_and_are_as_many_as_before_hear_nothing(caplog):
    again = unshared()
    again.load_state_dict(inside(unshared()))
    assert len(rest(again)) == SIZE - 1
    assert not caplog.records


def test_an_epoch_of_one_rank_goes_on_with_a_sampler_of_which_nothing_is_known():
    """Each of the ranks that there are now has its own order, and none is dealt out."""
    order = [*range(SIZE)]
    again = of_world(DataLoader(range(SIZE), sampler=order), (0, 2))
    again.load_state_dict(inside(of_world(DataLoader(range(SIZE)), (0, 1))))
    assert rest(again) == order[1:]


def test_a_state_of_before_deals_were_saved_goes_on_as_it_was():
    """It says nothing of its order, which is not to say that only its sampler knew it."""
    state = inside(elastic(shuffle=False))
    del state["dealt"]
    again = elastic(shuffle=False)
    again.load_state_dict(state)
    assert rest(again) == [*range(2, SIZE, 2)]


def test_what_is_left_may_be_begun_and_let_be():
    """A script looks at a loader before its loop: an iterator that is made has taken the rest."""
    again = elastic(3, shuffle=False)
    again.load_state_dict(inside(elastic(shuffle=False)))
    kept = iter(again)
    assert rest(again) == [*range(0, SIZE, 3)]
    del kept


def test_a_loader_of_no_data_is_not_taken_for_one_that_was_counted(caplog):
    loader = ResumableLoader(DataLoader([]))
    for _ in range(2):
        iter(loader)
    assert not caplog.records


class Failing(Seen):
    """Data of which a part cannot be read."""

    fails: frozenset[int] = frozenset()

    def __getitem__(self, index: int) -> int:
        if index in self.fails:
            raise OSError(f"no sample {index}")
        return super().__getitem__(index)


def test_what_fails_only_when_it_is_drawn_once_more_is_not_passed_over():
    """The loop had been given that batch: a restart that goes on without says so."""
    loader, again = ResumableLoader(DataLoader(Failing())), ResumableLoader(DataLoader(Failing()))
    again.load_state_dict(inside(loader))
    again.loader.dataset.fails = frozenset([0])
    with pytest.raises(OSError, match="no sample 0"):
        iter(again)


@pytest.mark.parametrize("counted", [True, False])
def test_an_iterator_that_is_kept_at_its_end_is_not_live_and_one_inside_is(counted):
    """Else a restart would begin with an empty epoch, or leave out the rest of one."""
    loader = ResumableLoader(DataLoader(range(3)), counted=counted)
    iterator = iter(loader)
    next(iterator)
    assert loader.state_dict()["live"] is True
    assert rest(iterator) == [1, 2]
    assert loader.state_dict()["live"] is False


class ByItself(DataLoader):
    """Makes its batches by its own code, of what its sampler gives or of something else."""

    asks = True

    def __iter__(self) -> Any:
        return map(torch.tensor, [*self.batch_sampler] if self.asks else [[0], [1]])


@pytest.mark.parametrize("asks", [True, False])
def test_a_loader_that_does_not_ask_for_the_rest_is_refused(asks):
    """It would use samples that were used before."""

    def make(ranks: int) -> ResumableLoader:
        sampler = ElasticSampler(range(SIZE), ranks, 0, shuffle=False)
        loader = ByItself(range(SIZE), sampler=sampler)
        loader.asks = asks
        return of_world(loader, (0, ranks))

    again = make(3)
    again.load_state_dict(inside(make(2)))
    if asks:
        assert rest(again) == [2, 5, 8, 11]
    else:
        with pytest.raises(PreconditionError, match="ByItself makes its batches in a way of its"):
            rest(again)
