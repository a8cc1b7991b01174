"""What an agent says of itself: its inventory, and what of it cannot wait."""

from __future__ import annotations

from dataclasses import replace

from tests.said import agent_session, session_update, tcp

from holdfast.core.announcements import SaveReason
from holdfast.core.budget import Reservation
from holdfast.core.decision import Decision, DecisionState
from holdfast.core.ids import ShardId
from holdfast.core.inventory import HeldState, Peer
from holdfast.core.node_view import NodeView, RunView, Want, WantReason
from holdfast.core.shard import Shard
from holdfast.core.slot_names import SlotName, SlotState
from holdfast.core.sources import Memory
from holdfast_services.agent.domain import (
    Content,
    Slot,
    State,
    handle,
    inventory,
    pressing,
    session_view,
)
from holdfast_services.agent.domain import events as ev

ME = Peer(node="a", rpc_address="a:1", endpoints=tcp("a:2"))
PEER = Peer(node="b", rpc_address="b:1", endpoints=tcp("b:2"))
KIB = 1024


def shard(step, rank=0):
    return Shard(
        id=ShardId("r1", step, 1, rank), job="job", world_size=1, plan_hash="p",
        length_bytes=KIB, root_digest=b"d" * 16,
    )  # fmt: skip


def sealed(name, step, *, held=HeldState.SEALED, rank=0):
    content = Content(shard=shard(step, rank), owner="a", digests=b"", held=held)
    return Slot(name=SlotName(name, 1, SlotState.SEALED), length_bytes=KIB, content=content)


def state(*slots):
    return State(me=ME, budget_bytes=16 * KIB, slots={slot.name.slot: slot for slot in slots})


def session(generation=1, **fields):
    return agent_session(id=f"{1:032x}", generation=generation, **fields)


def test_the_inventory_shows_a_good_copy_before_a_quarantined_one():
    bad = sealed("s1", 5, held=HeldState.QUARANTINED)
    shown = inventory(state(bad, sealed("s2", 5)), incarnation=1, sequence=1)
    assert [HeldState.SEALED] == [held.state for held in shown.shards]
    shown = inventory(state(bad), incarnation=1, sequence=1)
    assert [HeldState.QUARANTINED] == [held.state for held in shown.shards]


def test_what_is_said_of_a_rank_names_its_attempt():
    """P2: another catalogue may give its number again."""
    now, _ = handle(state(), ev.SessionOpened(session(nonce=b"mine")))

    assert [b"mine"] == [rank.nonce for rank in inventory(now, incarnation=1, sequence=1).ranks]


def test_what_cannot_wait_until_the_next_report():
    """Progress is of every step, and what was freed is freed by the catalogue's word."""
    one = session_update(session=session().id, step=4, saving=(4,), step_s=0.1)
    begun, _ = handle(state(sealed("s1", 3)), ev.SessionOpened(session()))
    trains, _ = handle(begun, ev.Updated(one))
    told, _ = handle(
        begun, ev.Updated(session_update(session=session().id, step=4, wants_save=SaveReason.USER))
    )
    ended, _ = handle(begun, ev.SessionEnded(session().id))
    more = replace(begun, slots={**begun.slots, "s2": sealed("s2", 4)})
    bad = replace(begun, slots={"s1": sealed("s1", 3, held=HeldState.QUARANTINED)})
    fewer = replace(begun, slots={})
    seen = replace(begun, seen={"r1": shard(3).id.checkpoint})
    at_once = {
        name: pressing(*(inventory(s, incarnation=1, sequence=1) for s in (begun, after)))
        for name, after in {
            "trains": trains, "told": told, "ended": ended, "more": more, "bad": bad,
            "fewer": fewer, "seen": seen,
        }.items()
    }  # fmt: skip

    assert [name for name, now in at_once.items() if not now] == ["trains", "fewer"]
    assert pressing(None, inventory(begun, incarnation=1, sequence=1))


def test_what_a_rank_has_begun_is_reported_with_it():
    before = state()
    before.sessions = {session().id: session()}
    update = session_update(session=session().id, step=7, saving=(5, 6))
    after, _ = handle(before, ev.Updated(update))

    assert (5, 6) == inventory(after, incarnation=1, sequence=1).ranks[0].report.saving


def test_a_restore_of_many_shards_looks_none_of_them_up_by_going_through_all_slots(monkeypatch):
    """One event took 87 ms with 512 shards here: each of them is asked for by each rank."""
    monkeypatch.delattr(State, "held")
    shards = tuple(shard(5, rank) for rank in range(4))
    slots = [sealed(f"t{rank}", 5, rank=rank) for rank in range(3)]
    decision = Decision(
        number=1, state=DecisionState.CONFIRMED, generation=2, checkpoint=shards[0].id.checkpoint,
        shards=shards, shards_count=4,
    )  # fmt: skip
    run = RunView(run="r1", job="job", generation=2, world_size=4, decision=decision, attempt=2)
    wants = (Want(shard=shards[3], sources=(Memory("a"), Memory("b")), reason=WantReason.RESTORE),)
    news = NodeView(version="1", nodes=(ME, PEER), runs=(run,), wants=wants)
    now, _ = handle(state(*slots), ev.SessionOpened(session(generation=2)))
    now, _ = handle(now, ev.ViewArrived(news))
    now, actions = handle(now, ev.SlotCreated("s1"))
    (fetch,) = (action for action in actions if isinstance(action, ev.Fetch))

    now, _ = handle(now, ev.FetchDone(fetch.name, Content(shard=shards[3], owner="b", digests=b"")))
    for slot in slots:
        now, _ = handle(now, ev.SlotVerified(slot.name, intact=True, decision=1))

    told = session_view(now, now.sessions[session().id]).restore
    assert shards == tuple(segment.shard for segment in told.segments)


def test_a_session_is_told_why_its_slots_are_not_sealed_until_they_are():
    """P4: other files have filled the arena, and the rank's warning says so."""
    slot = Slot(name=SlotName("s1", 1, SlotState.CLOSED), length_bytes=KIB, session=session().id)
    now, _ = handle(state(slot), ev.SessionOpened(session()))
    now, _ = handle(now, ev.SealBlocked(slot.name, "no room, 8 B free"))
    now, _ = handle(now, ev.Tick(1.0))
    now, _ = handle(now, ev.SealBlocked(slot.name, "no room, 9 B free"))
    assert "no room, 8 B free" == session_view(now, session()).hindrance

    content = Content(shard=shard(5), owner="a", digests=b"")
    now, _ = handle(now, ev.SlotSealed(slot.name, content))
    assert "" == session_view(now, session()).hindrance


def test_a_session_is_told_why_its_slots_are_not_made_until_all_are():
    asked = Reservation(plan_hash="p", length_bytes=KIB, slots=2, restored_bytes=0)
    now, _ = handle(state(), ev.SessionOpened(session()))
    now, made = handle(now, ev.Reserved(session().id, asked))
    now, _ = handle(now, ev.SlotRefused(made[0].name.slot, "the file system is full"))
    assert "the file system is full" == session_view(now, now.sessions[session().id]).hindrance

    now, made = handle(now, ev.Tick(10.0), now_s=10.0)
    now, made = handle(now, ev.SlotCreated(made[0].name.slot))
    now, _ = handle(now, ev.SlotCreated(created(made)))
    assert "" == session_view(now, now.sessions[session().id]).hindrance


def created(actions):
    return next(action.name.slot for action in actions if isinstance(action, ev.CreateSlot))
