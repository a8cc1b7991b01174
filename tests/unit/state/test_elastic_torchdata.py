"""An ``ElasticSampler`` in a pipeline of torchdata's: its own state goes on with any ranks. F81."""

from __future__ import annotations

import copy
from itertools import zip_longest
from typing import Any

import pytest
from torch.utils.data import DistributedSampler
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast import ElasticSampler
from holdfast.errors import InvalidRequestError
from holdfast.state.capture import Capture

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata 0.11
    pytest.mark.filterwarnings("ignore:The 'repr' parameter"),
]
SIZE = 37
PREFETCHED = 3


def pipeline(sampler: ElasticSampler, batch_size: int) -> Any:
    """Return a loader that is ahead by threads that map and by one that fetches."""
    node: Any = nodes.SamplerWrapper(sampler)
    node = nodes.ParallelMapper(node, int, num_workers=2, method="thread")
    node = nodes.Batcher(node, batch_size, drop_last=False)
    return nodes.Loader(nodes.Prefetcher(node, PREFETCHED))


def loader(sampler: ElasticSampler, batch_size: int, workers: int) -> Any:
    return StatefulDataLoader(
        range(SIZE), batch_size, sampler=sampler, num_workers=workers, collate_fn=list
    )


MAKES = {
    "nodes": pipeline,
    "StatefulDataLoader": lambda sampler, size: loader(sampler, size, 0),
    "StatefulDataLoader, 2 workers": lambda sampler, size: loader(sampler, size, 2),
}


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_what_was_fetched_ahead_is_dealt_out_once_more_to_other_ranks(make):
    """By its ``state_dict`` alone: nothing of Holdfast looks at the loader."""
    states: list[Any] = []
    seen: list[int] = []
    for ranks, batch_size, steps in [(3, 2, 2), (2, 3, 1), (2, 3, 1), (4, 2, SIZE)]:
        taken, new = [], []
        for rank in range(ranks):
            made = make(ElasticSampler(range(SIZE), ranks, rank, seed=3), batch_size)
            if states:
                made.load_state_dict(copy.deepcopy(states[rank % len(states)]))
            batches, iterator = [], iter(made)
            while len(batches) < steps and (batch := next(iterator, None)) is not None:
                batches.append(batch)
            taken.append(batches)
            new.append(made.state_dict())
        states = new
        assert len(set(map(len, taken))) == 1, "a collective would wait for ever"
        in_turn = [turn for step in zip(*taken, strict=True) for turn in zip_longest(*step)]
        seen += [sample for turn in in_turn for sample in turn if sample is not None]

    order = list(DistributedSampler(range(SIZE), 1, 0, seed=3))
    assert seen[:SIZE] == order
    assert seen[SIZE:] == order[: len(seen) - SIZE]
    assert len(seen) < SIZE + 4


def test_a_pipeline_of_nodes_is_saved_as_it_is():
    """It says where it is, so it goes into the state like anything that does."""
    made = pipeline(ElasticSampler(range(SIZE), 2, 1, seed=3), 2)
    iterator = iter(made)
    next(iterator)
    capture = Capture({"loader": made}, rank=1, world_size=2)
    text = capture.live(capture.survey()).text

    assert b'"index":4' in text.replace(b" ", b"")


@pytest.mark.parametrize("kills", [1, 2])
def test_an_epoch_that_was_begun_is_refused_in_another_order_however_often_it_was_loaded(kills):
    """Killed again before it has begun it is no longer live, and its place still is one of then."""
    first = ElasticSampler(range(SIZE), 2, 0, seed=3)
    next(iter(first))
    saved = first.state_dict()
    for _ in range(kills - 1):
        again = ElasticSampler(range(SIZE), 2, 0, seed=3)
        again.load_state_dict(saved)
        saved = again.state_dict()

    for other, what in [(ElasticSampler(range(SIZE), 2, 0, seed=4), "seed=4 now"),
                        (ElasticSampler(range(9), 2, 0, seed=3), "has 9 now")]:  # fmt: skip
        with pytest.raises(InvalidRequestError, match=what):
            other.load_state_dict(saved)
        assert len(list(other)) == len(other), "it was left as it was"
