"""Epochs that ranks end in unequal steps, ``even=False``: who is asked once more, gives nothing.

F81: what a rank with a batch less saves while others are in their last step, and between epochs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.unit.state.attempts import worlds
from torch.utils.data import DataLoader

from holdfast import ElasticIterable, ElasticSampler, ResumableLoader
from holdfast.errors import InvalidRequestError
from holdfast.state.capture import Capture
from holdfast.state.positions import LoaderClock

SIZE, RANKS = 7, 3  # rank 0 has three samples, the others two


class Lines(ElasticIterable):
    """Two files; the numbers in them are those of the samples."""

    def lane(self, number: int, start: int, stop: int) -> Iterator[int]:
        yield from range(4 * number + start, 4 * number + stop)


def of_rank(
    rank: int,
    ranks: int = RANKS,
    *,
    workers: int = 0,
    even: bool = False,
    lanes: bool = False,
    seed: int = 0,
) -> Any:
    data: Any = range(SIZE)
    if lanes:
        data = Lines((4, 3), ranks, rank, even=even, seed=seed)
    sampler = None if lanes else ElasticSampler(data, ranks, rank, even=even, seed=seed)
    loader = ResumableLoader(DataLoader(data, sampler=sampler, num_workers=workers))
    loader.bind(LoaderClock((rank, ranks)))
    return loader


def given(loader: Any, epoch: int) -> list[int]:
    data, sampler = loader.loader.dataset, loader.loader.sampler
    (data if isinstance(data, Lines) else sampler).set_epoch(epoch)
    return [batch.item() for batch in loader]


def in_the_last_step(rank: int, **more: Any) -> tuple[Any, Any]:
    """Return a loader that was asked three times, and its iterator: two ranks in vain."""
    loader = of_rank(rank, **more)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator, None)
    return loader, iterator


HOW = pytest.mark.parametrize("how", [{}, {"workers": 2}, {"lanes": True}], ids=str)


@HOW
@pytest.mark.parametrize("rank", range(RANKS))
def test_a_rank_that_was_asked_in_vain_gives_nothing_more_of_that_epoch(rank, how):
    """Else it would use all of its samples once more; and the next epoch is a whole one."""
    loader, iterator = in_the_last_step(rank, **how)
    saved = loader.state_dict()
    del iterator
    for _ in range(2):  # killed again before it has begun
        again = of_rank(rank, **how)
        again.load_state_dict(saved)
        saved = again.state_dict()

    assert given(again, 0) == []
    assert given(again, 1) == given(of_rank(rank, **how), 1) != []


@HOW
@pytest.mark.parametrize("rank", range(RANKS))
def test_a_checkpoint_between_epochs_begins_the_next_one(rank, how):
    """It looks the same to a rank that had a batch less: the number of the epoch tells."""
    loader = of_rank(rank, **how)
    given(loader, 0)
    again = of_rank(rank, **how)
    again.load_state_dict(loader.state_dict())

    assert given(again, 1) == given(of_rank(rank, **how), 1) != []


@pytest.mark.parametrize("lanes", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_on_other_ranks_nothing_is_left_of_it_whoever_was_asked_in_vain(tmp_path, ranks, lanes):
    """All agree that seven samples are used, though two of them have no iterator any more."""
    held = [in_the_last_step(rank, lanes=lanes) for rank in range(RANKS)]
    captures = [
        Capture({"loader": loader}, rank=rank, world_size=RANKS)
        for rank, (loader, _) in enumerate(held)
    ]
    seen = []
    with worlds.save_all(tmp_path, captures) as saved:
        for rank in range(ranks):
            loader = of_rank(rank, ranks, lanes=lanes)
            Capture({"loader": loader}, rank=rank, world_size=ranks).load(saved, step=1)
            assert given(loader, 0) == []
            seen += given(loader, 1)

    assert sorted(seen) == list(range(SIZE))


def test_a_rank_in_the_next_epoch_and_one_in_the_last_step_are_named(tmp_path):
    """What is left is of two epochs: on as many ranks each goes on where it was."""
    (first, held), (second, _) = in_the_last_step(0), in_the_last_step(1)
    second.loader.sampler.set_epoch(1)
    next(iterator := iter(second))
    captures = [
        Capture({"loader": loader}, rank=rank, world_size=2)
        for rank, loader in enumerate((first, second))
    ]
    with (
        worlds.save_all(tmp_path, captures) as saved,
        pytest.raises(InvalidRequestError, match=r"7 samples of epoch 0 and rank 1 3 samples of"),
    ):
        Capture({"loader": of_rank(0, 3)}, rank=0, world_size=3).load(saved, step=1)
    del held, iterator


@pytest.mark.parametrize("lanes", [False, True])
@pytest.mark.parametrize("rank", range(RANKS))
def test_an_epoch_that_is_begun_twice_is_refused_where_ranks_are_uneven(rank, lanes):
    """With one number for all a restart could not tell; told in the first run, not after a kill."""
    loader = of_rank(rank, lanes=lanes)
    list(loader)
    with pytest.raises(InvalidRequestError, match=r"epoch 0 .*call set_epoch\(epoch\)"):
        list(loader)
    assert given(loader, 1)

    for other in (of_rank(0, 1, lanes=lanes), of_rank(rank, even=True, lanes=lanes)):
        assert [list(other) != [] for _ in range(2)] == [True, True]


@pytest.mark.parametrize("lanes", [False, True])
def test_a_rank_without_a_sample_has_ended_it_too_and_other_data_are_refused(lanes):
    """Seven samples on nine ranks: the last two are asked in vain from the first step on."""
    loader = of_rank(8, 9, lanes=lanes)
    assert given(loader, 0) == []
    again, other = of_rank(8, 9, lanes=lanes), of_rank(8, 9, lanes=lanes, seed=4)
    for one in (again, other):
        one.load_state_dict(loader.state_dict())

    with pytest.raises(InvalidRequestError, match="with seed=0, but has seed=4 now"):
        given(other, 0)
    assert given(again, 0) == []
    with pytest.raises(InvalidRequestError, match="epoch 0 of a data loader with even=False"):
        list(again)


def test_what_had_ended_for_all_is_not_begun_again_after_a_restart():
    """Rank 0 has the most: asked in vain, it says that nobody has anything left."""
    loader = of_rank(0)
    given(loader, 0)
    again = of_rank(0)
    again.load_state_dict(loader.state_dict())
    with pytest.raises(InvalidRequestError, match=r"epoch 0 .* has ended"):
        given(again, 0)


@pytest.mark.parametrize("lanes", [False, True])
def test_a_seed_that_is_no_number_is_refused_by_name(lanes):
    """Else it fails in the first pass, in the middle of a sum, or in a digest that all share."""
    with pytest.raises(InvalidRequestError, match="seed='x' is no whole number"):
        of_rank(0, lanes=lanes, seed="x")


def test_what_ranks_had_ended_is_nothing_to_a_sampler_that_says_nothing_of_its_epochs():
    """Between epochs the sampler may become another one, also one that is not dealt out."""

    class Own(ElasticSampler):
        def __iter__(self) -> Iterator[int]:
            return super().__iter__()

    loader = of_rank(1)
    given(loader, 0)
    sampler = Own(range(SIZE), RANKS, 1, even=False)
    other = ResumableLoader(DataLoader(range(SIZE), sampler=sampler))
    other.bind(LoaderClock((1, RANKS)))
    other.load_state_dict(loader.state_dict())

    assert len(list(other)) == 2
