"""Sums over ranks and restarts are what they would have been (F82)."""

import math
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.state import worlds

from holdfast.elastic.accumulator import Accumulator
from holdfast.errors import InvalidRequestError, PreconditionError
from holdfast.state.capture import Capture


def captured(accumulator, rank, world_size):
    return Capture({"stats": accumulator}, rank=rank, world_size=world_size, rng=False)


def restarted(folder, held, world_size, step=1):
    """What so many ranks hold, by what others held before."""
    folder.mkdir()
    before = [captured(one, r, len(held)) for r, one in enumerate(held)]
    after = [Accumulator() for _ in range(world_size)]
    with worlds.save_all(folder, before, step=step) as segments:
        for rank, one in enumerate(after):
            captured(one, rank, world_size).load(segments, step=step)
    return after


def sums(held):
    """What ``synchronized`` would make of all ranks, without a group."""
    names = {name for one in held for name in (*one._total, *one._own)}
    return {n: held[0]._total.get(n, 0) + sum(o._own.get(n, 0) for o in held) for n in names}


def test_sums_are_read_inside_and_only_there():
    stats = Accumulator()
    stats["loss"] += 3.5
    stats["loss"] -= 1
    stats.update({"seen": 4}, right=2)
    stats.subtract(seen=1)

    with stats.synchronized() as known:
        assert known == dict(stats) == dict(stats.items())
        assert known == {"loss": 2.5, "seen": 3.0, "right": 2.0}
        assert len(stats) == 3
        del stats["right"]
        assert "right" not in stats
    with pytest.raises(PreconditionError, match="synchronized"):
        dict(stats)
    with pytest.raises(PreconditionError, match="synchronized"):
        len(stats)


def test_what_is_added_later_joins_what_is_known():
    stats = Accumulator()
    for _ in range(3):
        stats["n"] += 1
        with stats.synchronized():
            pass

    with stats.synchronized():
        assert stats["n"] == 3
    stats.clear()
    with stats.synchronized():
        assert not stats


def test_a_tensor_is_added_where_it_is_in_double_precision():
    stats = Accumulator()
    stats["x"] += torch.tensor(2**24, dtype=torch.float32)
    stats["x"] += torch.tensor([1.0])

    assert isinstance(stats._own["x"], torch.Tensor)
    with stats.synchronized():
        assert stats["x"] == 2**24 + 1


def test_what_looks_through_a_state_does_not_read_it():
    """Else a Checkpointer could not be made."""
    assert not isinstance(Accumulator(), Mapping)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda s: s.__setitem__("x", 3.0), InvalidRequestError, r"use \+= or -="),
        (lambda s: s.__setitem__("x", s["y"]), InvalidRequestError, r"use \+= or -="),
        (lambda s: s.update(x="3"), InvalidRequestError, "'3' is no number"),
        (lambda s: s.update(x=torch.ones(2)), InvalidRequestError, r"tensor of \(2,\)"),
        (lambda s: s.__delitem__("x"), PreconditionError, "inside synchronized"),
    ],
)
def test_what_is_no_sum_is_refused_by_name(change, error, said):
    with pytest.raises(error, match=said):
        change(Accumulator())


def test_inside_nothing_is_changed():
    stats = Accumulator()
    with stats.synchronized(), pytest.raises(PreconditionError, match="each rank would add"):
        stats["x"] = 3


def test_a_loss_that_is_no_number_stays_one():
    stats = Accumulator()
    stats["loss"] += math.nan
    other = Accumulator()
    other.load_state_dict(stats.state_dict())

    with other.synchronized():
        assert math.isnan(other["loss"])


@settings(max_examples=20)
@given(
    st.lists(st.integers(1, 5), min_size=2, max_size=5),
    st.lists(st.integers(-100, 100), min_size=5, max_size=5),
)
def test_sums_outlive_any_change_of_ranks(tmp_path_factory, worlds_sizes, values):
    """Known answer 7: equal before and after, whoever is left, also what nobody was told yet."""
    folder = tmp_path_factory.mktemp("sums")
    held = [Accumulator() for _ in range(worlds_sizes[0])]
    expected = 0
    for number, ranks in enumerate(worlds_sizes):
        held = restarted(folder / str(number), held, ranks)
        for rank, one in enumerate(held):
            one["x"] += values[rank]
            expected += values[rank]

        assert sums(held) == {"x": expected}


def test_on_the_same_ranks_each_has_its_own_again(tmp_path):
    held = [Accumulator() for _ in range(3)]
    for rank, one in enumerate(held):
        one["x"] += rank + 0.1
        one._total["x"] = 7.0

    after = restarted(tmp_path / "saved", held, 3)

    assert [one.state_dict() for one in after] == [one.state_dict() for one in held]
