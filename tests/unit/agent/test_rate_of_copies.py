"""At a rate for copies: what a restore waits for goes without, and slow is not failed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.agent.test_machine import (
    KIB,
    B,
    kinds,
    run_view,
    sealed,
    session,
    shard,
    state,
    view,
)

from holdfast.core.budget import Reservation
from holdfast.core.ids import CheckpointId
from holdfast.core.node_view import Committed, Want, WantReason
from holdfast.core.protection import Copies, Parity
from holdfast.core.reports import RankReport
from holdfast.core.session import SessionUpdate
from holdfast.core.slot_names import SlotName, SlotState
from holdfast.core.sources import Memory
from holdfast_services.agent.domain import Content, Slot, handle
from holdfast_services.agent.domain import events as ev


def test_no_fetch_keeps_the_rate_for_copies_while_a_restore_waits_for_one():
    """4.5: for the copy under way too, since the restore may want it, or its room."""
    free = [Slot(name=SlotName(f"s{i}", 0, SlotState.FREE), length_bytes=KIB) for i in (1, 2)]
    repair = Want(shard=shard(9), sources=(Memory("b"),), reason=WantReason.REPAIR)
    now, actions = handle(state(*free), view(run_view(), (repair,)))
    copying = kinds(actions, ev.Fetch)[0]
    assert [] == kinds(actions, ev.PaceFetches)

    restore = replace(repair, reason=WantReason.RESTORE)
    now, actions = handle(now, view(run_view(), (restore,), version="2"))
    assert [ev.PaceFetches(limited=False)] == actions
    now, actions = handle(now, ev.Tick(1.0))
    assert [] == actions, "said once"

    content = Content(shard=shard(9), owner="b", digests=b"")
    _, actions = handle(now, ev.FetchDone(copying.name, content))
    assert [ev.PaceFetches(limited=True)] == kinds(actions, ev.PaceFetches)


def test_a_copy_that_is_still_coming_is_asked_for_again_and_nobody_is_told():
    """At a rate for copies it is slow by order."""
    held, _ = handle(state(sealed("s1", 1)), view(run_view(ring=("a", "b"), copies=Copies(1))))
    held, actions = handle(held, ev.HoldAnswered(shard(1).id, B, coming=True))
    assert [] == actions
    held, actions = handle(held, ev.Tick(1.0))
    assert [B] == [a.peer for a in kinds(actions, ev.AskHold)]

    _, actions = handle(held, ev.HoldAnswered(shard(1).id, B, "unavailable", "no"))
    assert ["replication_failed"] == [a.event.kind for a in kinds(actions, ev.Emit)]


RATE = 4 << 20


def saving(*, sealed_s=100.0, rate=RATE, length=32 << 20, **spec):
    """A rank whose step 1 was sealed and is local; its copy is to come at the rate."""
    asked = {"replicas": 1, **spec}
    reservation = Reservation(plan_hash="p", length_bytes=length, slots=2, restored_bytes=0)
    rank = session(reservation=reservation, sealed_steps=(1,), sealed_s=sealed_s, **asked)
    made = state(sealed("s1", 1), copies_bytes_per_s=rate)
    made.sessions = {rank.id: rank}
    return made, rank


def told(made, rank, *, wants=2, now_s=105.0, **fields):
    """Return what people hear once the rank has found no slot, and the state after."""
    facts = {"committed": (Committed(checkpoint=CheckpointId("r1", 1, 1)),), **fields}
    made, _ = handle(made, view(run_view(ring=("a", "b"), copies=Copies(1), **facts)))
    update = SessionUpdate(session=rank.id, report=RankReport(), wants_slot=wants)
    made, actions = handle(made, ev.Updated(update), now_s=now_s)
    return made, [a.event for a in kinds(actions, ev.Emit)]


def test_a_rate_that_is_lower_than_what_is_saved_is_told_once():
    """32 MiB at 4 MiB/s are 8 s, and the next save came after 5."""
    made, rank = saving()
    made, [event] = told(made, rank)

    assert ("copies_fall_behind", "warning", "job") == (event.kind, event.severity, event.job)
    assert "32 MiB to receive elsewhere, which takes 8 s" in event.message
    assert "HOLDFAST_REPLICATE_RATE=4 MiB" in event.message
    assert [] == told(made, rank, wants=3, now_s=107.0)[1]


def test_of_parity_as_much_is_received_as_losses_are_outlived():
    made, rank = saving(replicas=0, parity=Parity(4, 2), length=16 << 20)
    _, [event] = told(made, rank)
    assert "with Parity(4, 2) is 32 MiB" in event.message


ENOUGH = {
    "the rate keeps up": ({}, {"now_s": 109.0}),
    "no rate": ({"rate": 0}, {}),
    "the rank has its slot": ({}, {"wants": 0}),
    "it has its copies": (
        {},
        {"committed": (Committed(checkpoint=CheckpointId("r1", 1, 1), replicated=True),)},
    ),
    "another rank is late": ({}, {"committed": ()}),
    "too few nodes": ({}, {"shortage": "1 node of 2"}),
    "no copies asked for": ({"replicas": 0}, {}),
}


@pytest.mark.parametrize("why", ENOUGH)
def test_a_pass_that_is_not_due_to_the_rate_is_no_news_of_it(why):
    before, after = ENOUGH[why]
    assert [] == told(*saving(**before), **after)[1]


def test_what_all_ranks_of_the_node_save_has_to_keep_up():
    made, rank = saving(length=16 << 20)
    assert [] == told(made, rank)[1]
    other = replace(rank, id="b" * 32, spec=replace(rank.spec, rank=1))
    older = replace(other, id="c" * 32, seat=replace(rank.seat, generation=0))
    made.sessions |= {other.id: other, older.id: older}

    _, [event] = told(made, rank)
    assert "is 32 MiB to receive" in event.message
