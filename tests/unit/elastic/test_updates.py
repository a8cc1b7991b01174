"""Updates of a pass cover its samples once, whoever takes part (F81)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.elastic.updates import Batching, micro_batches, micro_batches_count, split, updates
from holdfast.errors import InvalidRequestError


@st.composite
def batchings(draw):
    replicas, micro = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    size = replicas * micro + draw(st.integers(0, 60))
    return Batching(size=size, replicas=replicas, micro_batches=micro)


@given(batchings(), st.integers(0, 300), st.integers(0, 300))
def test_each_sample_is_in_one_micro_batch_of_one_rank(batching, begin, more):
    length = begin + more
    seen = []
    for update in updates(begin, length, batching):
        parts = [list(micro_batches(update, r, batching)) for r in range(batching.replicas)]
        for part in parts:
            assert [micro.index for micro in part] == list(range(part[0].count))
            assert [micro.last for micro in part] == [False] * (len(part) - 1) + [True]
            assert all(1 <= micro.end - micro.begin <= max(batching.local, 2) for micro in part)
            assert all(micro.of == update for micro in part)
            if not part[0].spare:
                assert sum(micro.end - micro.begin for micro in part) == part[0].samples
        assert len({len(part) for part in parts}) == 1, "a forward may be a collective"
        seen += [
            at
            for part in parts
            for micro in part
            if not micro.spare
            for at in range(micro.begin, micro.end)
        ]

    assert seen == list(range(begin, length))


@given(batchings(), st.integers(0, 300), st.integers(0, 300))
def test_a_rank_knows_how_many_micro_batches_it_will_do(batching, begin, more):
    length = begin + more
    for rank in range(batching.replicas):
        done = [
            m for u in updates(begin, length, batching) for m in micro_batches(u, rank, batching)
        ]

        assert len(done) == micro_batches_count(begin, length, batching)


@given(batchings(), st.integers(0, 300))
def test_a_rank_is_spare_only_where_fewer_samples_than_ranks_are_left_at_all(batching, length):
    spare = [
        micro
        for update in updates(0, length, batching)
        for rank in range(batching.replicas)
        for micro in micro_batches(update, rank, batching)
        if micro.spare
    ]

    assert bool(spare) is (0 < length < batching.replicas)


def test_what_is_left_over_joins_the_last_update_unless_it_is_half_of_one():
    """A sample alone would end training that has batch norms."""
    batching = Batching(size=8, replicas=4)

    assert list(updates(0, 18, batching)) == [range(8), range(8, 18)]
    assert list(updates(0, 20, batching)) == [range(8), range(8, 16), range(16, 20)]
    for rank, sizes in enumerate([[2, 1], [2, 1], [1, 1], [1, 1]]):
        done = micro_batches(range(8, 18), rank, batching)
        assert [micro.end - micro.begin for micro in done] == sizes


@given(batchings(), st.integers(0, 300))
def test_no_micro_batch_is_smaller_than_half_of_the_others(batching, length):
    sizes = [
        micro.end - micro.begin
        for update in updates(0, length, batching)
        for rank in range(batching.replicas)
        for micro in micro_batches(update, rank, batching)
    ]
    least = batching.size // (batching.replicas * batching.micro_batches)

    assert length < batching.size or min(sizes) >= least // 2


def test_a_split_is_even():
    assert split(128, 3) == [43, 43, 42]
    assert Batching(size=128, replicas=3).local == 43
    assert Batching(size=12, replicas=3, micro_batches=2).gradients_count == pytest.approx(3)


def test_a_batch_with_less_than_a_sample_for_each_rank_is_refused_with_the_numbers():
    with pytest.raises(InvalidRequestError, match="batch of 3 cannot be divided among 4 ranks"):
        Batching(size=3, replicas=4)
    with pytest.raises(InvalidRequestError, match="4 ranks in 2 micro-batches"):
        Batching(size=7, replicas=4, micro_batches=2)
    with pytest.raises(InvalidRequestError, match="needs ranks"):
        Batching(size=7, replicas=4, micro_batches=0)
