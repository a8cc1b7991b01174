"""Ranks that name what they need of a checkpoint: each is ready by that alone (4.8)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.said import agent_session, session_update
from tests.unit.agent.test_machine import KIB, run_view, sealed, shard, state, view

from holdfast.core.decision import Decision, DecisionState
from holdfast.core.needs import ByteRange, Needs, ShardNeed
from holdfast.core.slot_names import SlotName, SlotState
from holdfast_services.agent.domain import Slot, handle, inventory, session_view
from holdfast_services.agent.domain import events as ev

KEY = shard(5).id.checkpoint


def held(rank):
    """A slot with shard ``rank`` of step 5."""
    content = replace(sealed("x", 5).content, shard=shard(5, rank=rank))
    name = SlotName(f"s{rank}", 1, SlotState.SEALED)
    return Slot(name=name, length_bytes=KIB, content=content)


def session(rank, **said):
    return agent_session(id=f"{rank:032x}", rank=rank, world_size=2, names_needs=True, **said)


def decision(*ranks, stage=DecisionState.PROPOSED, count=3):
    return Decision(
        number=1, state=stage, generation=1, checkpoint=KEY,
        shards=tuple(shard(5, rank=rank) for rank in ranks), shards_count=count,
    )  # fmt: skip


def needs(*ranks, checkpoint=KEY):
    return Needs(checkpoint=checkpoint, shards=tuple(ShardNeed(rank=rank) for rank in ranks))


def after(slots, said, told):
    """A node that holds ``slots`` once its ranks have said what they need and it was told."""
    now = state(*slots)
    for rank, named in said.items():
        now, _ = handle(now, ev.SessionOpened(session(rank)))
        update = session_update(session=session(rank).id, needs=named)
        now, _ = handle(now, ev.Updated(update))
    now, _ = handle(now, view(run_view(decision=told)))
    for slot in slots:
        now, _ = handle(now, ev.SlotVerified(slot.name, intact=True, decision=1))
    return now


def ready(now):
    return {s.spec.rank for s in now.sessions.values() if s.ready_decision == 1}


def test_a_rank_is_ready_by_what_it_named():
    now = after([held(0)], {0: needs(0), 1: needs(0, 1)}, decision(0, 1))

    assert ready(now) == {0}


def test_a_rank_that_names_nothing_of_a_checkpoint_is_ready_at_once():
    assert ready(after([], {0: needs()}, decision())) == {0}


@pytest.mark.parametrize(
    ("named", "listed"),
    [
        (None, (0,)),
        (needs(0, checkpoint=replace(KEY, step=4)), (0,)),
        (needs(0, 1), (0,)),
        (needs(0), ()),
    ],
    ids=["not named", "of another", "not told of all", "told before it was named"],
)
def test_no_rank_is_ready_by_what_it_did_not_name_or_the_node_was_not_told(named, listed):
    assert ready(after([held(0)], {0: named}, decision(*listed))) == set()


def test_no_rank_is_ready_by_a_decision_whose_catalogue_was_lost():
    """It lists no shard and counts none: who names nothing would begin without its state."""
    assert ready(after([], {0: needs()}, decision(count=0))) == set()


def test_who_needs_all_is_not_ready_by_the_shards_that_others_named():
    now = after([held(0)], {0: needs(0)}, decision(0))
    whole = agent_session(id="f" * 32, rank=1, world_size=2)
    now, _ = handle(now, ev.SessionOpened(whole))

    assert ready(now) == {0}


def test_each_rank_is_shown_and_reads_its_own_shards():
    confirmed = decision(0, 1, stage=DecisionState.CONFIRMED)
    now = after([held(0), held(1)], {0: needs(0), 1: needs(1, 0)}, confirmed)
    shown = [session_view(now, now.sessions[session(rank).id]).restore for rank in (0, 1)]

    assert [[s.file_name for s in view.segments] for view in shown] == [
        ["s0.1.seg"],
        ["s1.1.seg", "s0.1.seg"],
    ]
    assert [len(s.reading) for s in now.sessions.values()] == [1, 2]
    assert [view.decision.shards for view in shown] == [(), ()]


@pytest.mark.parametrize("late", [None, needs(0)], ids=["none", "before"])
def test_an_update_that_comes_late_takes_nothing_back(late):
    """Else the rank waits for an answer to what it named last, and its agent does not know it."""
    last = replace(needs(0, 1), number=2)
    now = after([], {0: last}, decision())
    now, _ = handle(now, ev.Updated(session_update(session=session(0).id, needs=late)))

    assert now.sessions[session(0).id].needs == last


def test_the_catalogue_hears_which_shards_and_not_which_bytes():
    part = ByteRange(begin=0, end=10)
    named = Needs(checkpoint=KEY, shards=(ShardNeed(rank=0, ranges=(part,)),))
    now = after([], {0: named}, decision())
    [status] = inventory(now, incarnation=1, sequence=1).ranks

    assert status.needs == needs(0)
