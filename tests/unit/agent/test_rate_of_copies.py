"""At a rate for copies: what a restore waits for goes without, and slow is not failed."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.agent.test_machine import KIB, B, kinds, run_view, sealed, shard, state, view

from holdfast.core.node_view import Want, WantReason
from holdfast.core.protection import Copies
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
