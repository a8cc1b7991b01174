"""The adaptive loader: which samples, in which batches, and where it goes on (F81, F83)."""

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.elastic import models
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from holdfast.core.hints import check
from holdfast.elastic import loader as loaders
from holdfast.elastic import running
from holdfast.elastic.loader import AdaptiveDataLoader
from holdfast.errors import InvalidRequestError
from holdfast.state.samplers import ElasticSampler


class World:
    """This process as any rank of any number; nothing is exchanged."""

    def __init__(self, patch):
        self.replicas, self.rank = 1, 0
        patch.setattr(loaders, "replicas_of", lambda _: (self.replicas, self.rank))
        patch.setattr(loaders, "agreed", lambda numbers, _: list(numbers))
        patch.setattr(loaders, "nodes_count", lambda: 1)

    def become(self, replicas, rank):
        self.replicas, self.rank = replicas, rank

    def stage(self, make, replicas, state=None, updates=math.inf):
        """Have each of so many ranks go on from ``state`` for some updates; return what is used."""
        used, states = [], []
        for rank in range(replicas):
            self.become(replicas, rank)
            made = make()
            if state is not None:
                made.load_state_dict(state)
            left = updates
            for batch in made:
                micro = running.current().micro
                used += [] if micro.spare else batch[0].tolist()
                left -= micro.last
                if not left:
                    states.append(made.state_dict())
                    break
            else:
                states.append(made.state_dict())
        assert all(one == states[0] for one in states)
        return used, states[0]


@pytest.fixture
def world(monkeypatch):
    yield World(monkeypatch)
    running._held.clear()


class Numbers(Dataset):
    """Its samples are their numbers, with what is drawn for them."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        drawn = random.random() + np.random.rand() + float(torch.rand(()))  # noqa: NPY002
        return index, drawn


class Stream(IterableDataset):
    def __iter__(self):
        yield 1


STAGES = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 12)), max_size=4)


@settings(max_examples=40, deadline=None)
@given(st.integers(5, 120), STAGES, st.integers(5, 40), st.booleans())
def test_each_sample_is_used_once_in_a_pass_however_ranks_change(length, stages, size, shuffle):
    """Known answer 7: killed after any update, on any number of ranks, any number of times."""
    with pytest.MonkeyPatch.context() as patch:
        world, used, state = World(patch), [], None
        for replicas, updates in [*stages, (3, math.inf)]:
            more, state = world.stage(
                lambda: AdaptiveDataLoader(Numbers(length), size, shuffle=shuffle, seed=7),
                replicas, state, updates,
            )  # fmt: skip
            used += more
            if not state["live"]:
                break
    running._held.clear()

    assert sorted(used) == list(range(length))


def test_ranks_that_have_no_sample_left_do_one_again_that_does_not_count(world):
    """A collective wants all of them; one sample can be left after a change of ranks."""
    _, state = world.stage(lambda: AdaptiveDataLoader(Numbers(21), 4), 1, updates=2)
    for rank in range(3):
        world.become(3, rank)
        made = AdaptiveDataLoader(Numbers(21), 4)
        made.load_state_dict(state | {"position": 20})
        parts = [(batch[0].tolist(), running.current()) for batch in made]

        assert [part for part, _ in parts] == [[20]]
        assert parts[0][1].factor == (0.0 if rank else 3.0)


def test_a_kill_between_two_micro_batches_does_the_whole_update_again(world):
    def make():
        made = AdaptiveDataLoader(Numbers(24), 12)
        made.autoscale_batch_size(12, (1, 4), gradient_accumulation=True)
        return made

    made = make()
    states = [made.state_dict()["position"] for _ in made]

    assert states == [0, 0, 12, 12, 12, 24]
    again = make()
    again.load_state_dict(made.state_dict() | {"live": True, "position": 12})
    assert [batch[0].tolist() for batch in again] == [
        [12, 13, 14, 15], [16, 17, 18, 19], [20, 21, 22, 23],
    ]  # fmt: skip


def test_a_pass_that_was_at_its_end_ends_at_once_and_the_next_one_is_another(world):
    def make():
        return AdaptiveDataLoader(Numbers(24), 8, shuffle=True)

    one = make()
    for _batch in one:
        state = one.state_dict()
    after = [batch[0].tolist() for batch in one]
    again = make()
    again.load_state_dict(state)

    assert (one.epoch, again.epoch) == (2, 0)
    assert list(again) == []
    assert again.epoch == 1
    assert [batch[0].tolist() for batch in again] == after


def test_a_loop_that_was_left_is_not_gone_on_with(world):
    made = AdaptiveDataLoader(Numbers(24), 8)
    for _batch in made:
        break
    state = made.state_dict()

    assert (state["live"], made.epoch) == (False, 1)
    assert running.current() is None
    assert len(list(made)) == 3


def test_a_second_loop_over_one_loader_takes_its_place(world):
    made = AdaptiveDataLoader(Numbers(24), 8)
    kept = iter(made)
    next(kept)
    for batch in made:
        kept.close()
        assert made.state_dict()["live"]
        assert batch[0][0] == running.current().micro.begin


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_drawn_for_a_batch_depends_on_its_place_alone(world, workers):
    """Neither on workers, nor on a restart, nor on what the loop draws, whose draws stay so."""
    options = {"multiprocessing_context": "fork"} if workers else {}

    def make():
        return AdaptiveDataLoader(Numbers(24), 4, shuffle=True, num_workers=workers, **options)

    plain = list(AdaptiveDataLoader(Numbers(24), 4, shuffle=True))
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    made, drawn = make(), []
    for number, batch in enumerate(made):
        assert torch.equal(batch[1], plain[number][1])
        if number in (1, 3):
            drawn.append(torch.rand(()))
        if number == 3:
            state = made.state_dict()
    again = make()
    again.load_state_dict(state)

    assert torch.equal(torch.stack(drawn), expected)
    for number, batch in enumerate(again, start=4):
        assert all(map(torch.equal, batch, plain[number]))


def test_an_epoch_of_progress_reads_the_data_until_there_was_enough(world, alone):
    """AdaptDL's epoch: with batches that are worth less than their samples, more than one pass."""
    model, optimizer = models.adaptive(lr=1e-3)
    made = models.loader(16, samples=64, epoch="progress")
    made.autoscale_batch_size(32, (32, 32))
    made._limits = None  # so that it stays at twice the initial batch
    made._choose = lambda: None
    samples = []
    for _ in range(3):
        samples.append(0)
        for inputs, targets in made:
            optimizer.zero_grad()
            models.loss_of(model, inputs, targets).backward()
            optimizer.step()
            samples[-1] += len(inputs)

    assert made.current_batch_size == 32
    assert 1 < model.gain < 2
    assert model.progress >= 3 * 64 / 16
    assert sum(samples) > 3 * 64
    assert made.state_dict()["pass"] > 2


@pytest.mark.parametrize("length", [64, 65, 70, 79, 203])
def test_an_epoch_of_progress_at_the_initial_batch_is_one_pass(world, alone, length):
    model, optimizer = models.adaptive(lr=1e-3)
    made = models.loader(16, samples=length, epoch="progress")
    for epoch in range(3):
        seen = 0
        for inputs, targets in made:
            optimizer.zero_grad()
            models.loss_of(model, inputs, targets).backward()
            optimizer.step()
            seen += len(inputs)

        assert (seen, made.epoch) == (length, epoch + 1)


def test_a_batch_is_divided_exactly_also_by_a_number_of_ranks_that_does_not_divide_it(world):
    world.become(3, 0)
    made = AdaptiveDataLoader(Numbers(1000), 128)

    assert (made.current_batch_size, made.current_local_batch_size) == (128, 43)
    assert len(made) == 8


class Points:
    """Times of a synthetic job: compute grows by the sample, the network costs a constant."""

    def __init__(self, made):
        for local in (4, 8, 16, 32):
            for replicas in (1, 2, 4):
                compute = 0.1 + 0.001 * local
                step = compute + (0.2 if replicas > 1 else 0.0)
                for _ in range(4):
                    made._profiles.add(
                        (1, replicas, local), step, synced=True, sync_s=step - compute
                    )


@pytest.mark.parametrize(("var", "grows"), [(1e3, True), (1e-3, False)])
def test_the_batch_grows_where_noise_pays_for_it_at_the_begin_of_a_pass(world, var, grows):
    world.become(4, 0)
    made = AdaptiveDataLoader(Numbers(4096), 32)
    made.autoscale_batch_size(1024, (4, 128), gradient_accumulation=True)
    list(made)
    assert made.current_batch_size == 32
    Points(made)
    made._noise = (1.0, var, False)
    for _batch in made:
        first = made.current_batch_size
        break

    assert (first > 64) is grows
    assert first <= 1024
    assert made.current_local_batch_size <= 128


def test_hints_say_what_is_known_and_can_be_believed(world):
    world.become(4, 0)
    made = AdaptiveDataLoader(Numbers(64), 32)
    made.autoscale_batch_size(256, (4, 64), gradient_accumulation=True)
    assert made.job_hints() is None
    list(made)
    made._noise = (2.0, 3.0, True)
    Points(made)
    hints = made.job_hints()
    check(hints)

    assert (hints.initial_batch, hints.batch, hints.batch_max) == (32, 32, 256)
    assert (hints.local_min, hints.local_max, hints.accumulates) == (4, 64, True)
    assert (hints.sqr, hints.var, hints.biased) == (2.0, 3.0, True)
    assert len(hints.points) == 12
    assert hints is made.job_hints(), "made anew only after a while"
    world.become(4, 1)
    other = AdaptiveDataLoader(Numbers(64), 32)
    list(other)
    assert other.job_hints() is None


BAD = {
    "batch_size=0": lambda: AdaptiveDataLoader(Numbers(8), 0),
    "epoch='steps'": lambda: AdaptiveDataLoader(Numbers(8), 1, epoch="steps"),
    "IterableDataset": lambda: AdaptiveDataLoader(Stream(), 1),
    "no samples": lambda: AdaptiveDataLoader(Numbers(0), 1),
    "drop_last=": lambda: AdaptiveDataLoader(Numbers(8), 1, drop_last=True),
    "local_min 9 is more than local_max 8": lambda: AdaptiveDataLoader(
        Numbers(8), 4
    ).autoscale_batch_size(64, (9, 8)),
    "minimum 4 is more than maximum 2": lambda: AdaptiveDataLoader(
        Numbers(8), 4
    ).autoscale_batch_size(2),
}


@pytest.mark.parametrize(("said", "make"), BAD.items(), ids=BAD)
def test_what_cannot_be_is_refused_by_name(world, said, make):
    with pytest.raises(InvalidRequestError, match=said):
        make()


def test_more_ranks_than_a_batch_has_samples_for_are_refused_with_the_numbers(world):
    world.become(4, 0)
    with pytest.raises(InvalidRequestError, match="batch of 3 cannot be divided among 4 ranks"):
        AdaptiveDataLoader(Numbers(8), 3)
    made = AdaptiveDataLoader(Numbers(800), 8)
    with pytest.raises(InvalidRequestError, match="4 ranks with at least 32 samples each"):
        made.autoscale_batch_size(64, (32, 64))


def test_another_order_or_initial_batch_is_refused_inside_a_pass(world):
    made = AdaptiveDataLoader(Numbers(24), 8, shuffle=True)
    for _batch in made:
        state = made.state_dict()
        break
    for other, said in (
        (AdaptiveDataLoader(Numbers(25), 8, shuffle=True), "24 samples"),
        (AdaptiveDataLoader(Numbers(24), 8, shuffle=True, seed=1), "seed="),
        (AdaptiveDataLoader(Numbers(24), 8), "shuffle="),
        (AdaptiveDataLoader(Numbers(24), 6, shuffle=True), "batch_size=8"),
    ):
        with pytest.raises(InvalidRequestError, match=said):
            other.load_state_dict(state)


def test_an_order_of_ones_own_is_an_elastic_samplers(world):
    class Backwards(ElasticSampler):
        def order(self, epoch):
            return range(self.length - 1, -1, -1)

    numbers = Numbers(12)
    made = AdaptiveDataLoader(numbers, 4, sampler=Backwards(numbers, 1, 0))

    assert [s for batch in made for s in batch[0].tolist()] == list(range(11, -1, -1))


def test_a_data_set_that_gives_many_at_once_is_asked_once_for_a_batch(world):
    class Many(TensorDataset):
        asked = 0

        def __getitems__(self, indices):
            Many.asked += 1
            return [self[index] for index in indices]

    list(AdaptiveDataLoader(Many(torch.arange(12)), 4))

    assert Many.asked == 3
