"""Given: what another framework has planned goes into a segment as it is, and comes back by box."""

from __future__ import annotations

import pytest
import torch
from tests.unit.training.savers import attempt

from holdfast.errors import InvalidRequestError
from holdfast.format import blob as blobs
from holdfast.format.boxes import Box
from holdfast.format.segment import TensorSpec
from holdfast.snapshot.plan import make_plan
from holdfast.state.given import Given

RANK, WORLD = 1, 2


def spec(name="w", rows=(2, 4), dtype="F32"):
    box = Box((rows[0], 0), (rows[1] - rows[0], 3))
    return TensorSpec(fqn=name, dtype=dtype, shape=(4, 3), box=box)


def plan_of(given):
    return make_plan(given, job="j", run="r", generation=1, rank=RANK, world_size=WORLD)


def given_of(*tensors, tree=None):
    given = Given(rank=RANK, world_size=WORLD)
    given.give(tensors, tree or {})
    return given


def test_a_tensor_keeps_its_name_and_its_box():
    """F37: it is of all ranks, not this rank's own."""
    plan = plan_of(given_of((spec(), torch.zeros(2, 3))))
    stored = {entry.spec.fqn: entry.spec for entry in plan.template.entries}

    assert spec() == stored["w"]
    assert plan.live_entries["w"].spec == stored["w"]


def test_the_plan_stays_while_the_structure_does_whatever_memory_it_lies_in():
    """Second and later saves plan nothing: state dicts bring new tensors each time."""
    given = given_of((spec(), torch.zeros(2, 3)))
    plan = plan_of(given)
    fresh = torch.ones(2, 3)
    given.give([(spec(), fresh)], {"n": 5})

    assert plan.is_current()
    text, tensors = plan.take_live()
    assert tensors["w"] is fresh
    assert {"n": 5} == blobs.decode(text).live.tree
    for other in (
        [(spec(rows=(0, 2)), fresh)],
        [(spec("v"), fresh)],
        [(spec(dtype="I32"), fresh.to(torch.int32))],
        [(spec(), fresh), (spec("v"), fresh)],
        [],
    ):
        given.give(other, {})
        assert not plan.is_current(), other


def test_ranks_with_other_tensors_share_out_nothing_and_agree_on_that():
    """The second half of a plan hash says what ranks share: here it is the same on all."""
    here = plan_of(given_of((spec(), torch.zeros(2, 3))))
    there = plan_of(given_of((spec("v"), torch.zeros(2, 3))))

    assert here.plan_hash != there.plan_hash
    assert here.plan_hash.partition(".")[2] == there.plan_hash.partition(".")[2]


def test_what_is_reserved_is_what_was_given_and_what_is_loaded():
    given = Given(rank=RANK, world_size=WORLD)
    given.give([(spec(), torch.zeros(2, 3))], {}, held_bytes=10_000)
    estimate = given.estimate()

    assert 24 < estimate.own_bytes < 2_000
    assert 10_000 == estimate.loaded_bytes
    assert attempt(rank=RANK, world_size=WORLD).world_size * estimate.own_bytes == (
        estimate.whole_bytes
    )


@pytest.mark.parametrize(("length", "fits"), [(18_000, True), (30_000, False)])
def test_a_text_that_no_reader_would_take_is_not_saved(monkeypatch, length, fits):
    """P1: neither is room reserved for one. A reader refuses both, so the save would be lost."""
    monkeypatch.setattr(blobs, "BLOB_BYTES_MAX", 20_000)
    given = given_of(tree={"text": "x" * length})
    if fits:
        assert 20_000 == plan_of(given).blob_capacity_bytes
        return
    with pytest.raises(InvalidRequestError, match="keep big values as tensors"):
        plan_of(given)
