"""Lanes are dealt out so that each sample is read once, whatever ranks and workers come and go.

F81, for iterable data sets. Readers are pretended; ``test_elastic_lanes`` has real ones.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.state.dealing import Tail
from holdfast.state.lanes import Batching, LaneDeal

LENGTHS = st.lists(st.integers(0, 9), max_size=7)
DEALS = st.builds(
    LaneDeal,
    ranges=st.just(()),
    ranks=st.integers(1, 4),
    batching=st.builds(Batching, batch_size=st.integers(1, 4), workers=st.integers(1, 3)),
)


def whole(lengths: list[int]) -> list[tuple[int, int, int]]:
    return [(lane, 0, length) for lane, length in enumerate(lengths)]


def samples(ranges: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    return [(lane, at) for lane, start, stop in ranges for at in range(start, stop)]


def batches(deal: LaneDeal, rank: int) -> list[list[tuple[int, int]]]:
    """Return what the loader of a rank gives: a batch of each worker in turn, as torch has it."""
    cut = []
    for worker in range(deal.batching.workers):
        share = samples(deal.share(rank, worker))
        size = deal.batching.batch_size
        cut.append([share[at : at + size] for at in range(0, len(share), size)])
        if deal.batching.drop_last:
            cut[-1] = [batch for batch in cut[-1] if len(batch) == size]
    found, turn = [], 0
    while any(cut):
        if cut[turn % deal.batching.workers]:
            found.append(cut[turn % deal.batching.workers].pop(0))
        turn += 1
    return found


def a_deal(ranks: int, batch_size: int, workers: int) -> LaneDeal:
    return LaneDeal(
        ranges=(), ranks=ranks, batching=Batching(batch_size=batch_size, workers=workers)
    )


@given(lengths=LENGTHS, deals=st.lists(st.tuples(DEALS, st.integers(0, 6)), min_size=1, max_size=5))
@example(  # the worker that comes first read what was repeated, long before the end
    lengths=[9, 9, 9],
    deals=[(a_deal(2, 3, 2), 1), (a_deal(3, 1, 1), 0)],
)
def test_each_sample_is_read_once_whatever_ranks_workers_and_batches(lengths, deals):
    """Before the last batch nothing comes twice; then fewer than there are ranks do."""
    left, seen = whole(lengths), []
    for made, steps in [*deals, (deals[-1][0], 99)]:
        deal = replace(made, ranges=left)
        of_ranks = [batches(deal, rank) for rank in range(deal.ranks)]
        assert {len(of_rank) for of_rank in of_ranks} == {deal.batches()}
        assert {deal.batches(rank) for rank in range(deal.ranks)} == {deal.batches()}
        assert {deal.count(rank) for rank in range(deal.ranks)} == {sum(map(len, of_ranks[0]))}
        ends = [of_rank[-1][-1] for of_rank in of_ranks if of_rank]
        first = samples(left) * deal.ranks
        over = deal.length % deal.ranks
        assert not over or ends[over:] == first[: deal.ranks - over], "the first ones come again"
        seen += [one for of_rank in of_ranks for batch in of_rank[:steps] for one in batch]
        left = deal.rest(min(steps, deal.batches()))
        if not left:
            break
        assert len(seen) == len(set(seen))

    assert set(seen) == set(samples(whole(lengths)))
    assert len(seen) - len(set(seen)) < deal.ranks


@given(
    lengths=LENGTHS,
    made=DEALS,
    drop_last=st.booleans(),
    tail=st.sampled_from(Tail),
    given_=st.integers(0, 9),
)
def test_what_is_left_is_read_as_it_would_have_been_by_as_many_readers(
    lengths, made, drop_last, tail, given_
):
    """So a restart on the same ranks may go on behind what was used: batch for batch the same."""
    batching = replace(made.batching, drop_last=drop_last)
    deal = replace(made, ranges=whole(lengths), batching=batching, tail=tail)
    rest = replace(deal, ranges=deal.rest(given_))
    assert len(set(samples(rest.ranges))) == rest.length, "what is repeated is not left"
    for rank in range(deal.ranks):
        expected = batches(deal, rank)
        assert tail is Tail.UNEVEN or len(expected) == deal.batches()
        if given_ >= deal.batches():
            assert not rest.ranges, "what an epoch has left out is not dealt out to others"
        else:
            *alike, last = expected[given_:] or [[]]
            assert batches(rest, rank)[: len(alike)] == alike
            repeats = tail is Tail.REPEAT and deal.length % deal.ranks
            assert [last] == batches(rest, rank)[len(alike) :] or repeats or not last


@given(lengths=LENGTHS, made=DEALS, given_=st.integers(0, 9))
def test_what_cannot_be_dealt_out_equally_is_left_out_or_uneven(lengths, made, given_):
    """``drop_last``: fewer than ranks are lost; ``even=False``: none, and none comes twice."""
    for tail in (Tail.DROP, Tail.UNEVEN):
        deal = replace(made, ranges=whole(lengths), tail=tail)
        seen = [one for rank in range(deal.ranks) for b in batches(deal, rank) for one in b]
        lost = deal.length - len(seen)
        assert len(set(seen)) == len(seen)
        assert 0 <= lost < deal.ranks
        assert lost == 0 or tail is Tail.DROP
        rest = deal.rest(given_)
        used = [
            one for rank in range(deal.ranks) for b in batches(deal, rank)[:given_] for one in b
        ]
        if given_ < deal.batches():
            assert Counter([*used, *samples(rest)]) == Counter(samples(whole(lengths)))
