"""The residency machine with an object tier: what is fetched from it, kept for it, told of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.said import agent_session, session_update, tcp

from holdfast.core.abandoned_step import AbandonedStep
from holdfast.core.budget import Reservation
from holdfast.core.ids import CheckpointId, ShardId
from holdfast.core.inventory import Peer
from holdfast.core.node_view import Committed, NodeView, RunView, SupersedeRule, Want, WantReason
from holdfast.core.persistence_rules import PersistRule
from holdfast.core.protection import Copies
from holdfast.core.reports import NOTE_BYTES_MAX, NOTES_COUNT_MAX, StepNote, checked
from holdfast.core.shard import Shard
from holdfast.core.slot_names import SlotName, SlotState
from holdfast.core.sources import Memory, Object
from holdfast.errors import PreconditionError
from holdfast_services.agent import sidecar
from holdfast_services.agent.domain import (
    Content,
    Slot,
    State,
    handle,
    inventory,
    making_room,
    session_view,
)
from holdfast_services.agent.domain import events as ev
from holdfast_services.agent.domain.session_views import STEPS_COUNT_MAX

ME = Peer(node="a", rpc_address="a:1", endpoints=tcp("a:2"))
B = Peer(node="b", rpc_address="b:1", endpoints=tcp("b:2"))
KIB = 1024


def shard(step, rank=0):
    return Shard(
        id=ShardId("r1", step, 1, rank), job="job", world_size=1, plan_hash="p",
        length_bytes=KIB, root_digest=b"d" * 16,
    )  # fmt: skip


def checkpoint(step):
    return CheckpointId("r1", step, 1)


def sealed(name, step, owner="a"):
    content = Content(shard=shard(step), owner=owner, digests=b"")
    return Slot(name=SlotName(name, 1, SlotState.SEALED), length_bytes=KIB, content=content)


def free(*names):
    return [Slot(name=SlotName(name, 0, SlotState.FREE), length_bytes=KIB) for name in names]


def state(*slots):
    made = State(me=ME, budget_bytes=16 * KIB)
    made.slots = {slot.name.slot: slot for slot in slots}
    made.next_slot = len(slots) + 1
    return made


def session(**fields):
    return agent_session(id="1" * 32, **fields)


def view(wants=(), version="1", **run):
    made = RunView(run="r1", job="job", generation=1, world_size=1, **run)
    return ev.ViewArrived(NodeView(version=version, nodes=(ME, B), runs=(made,), wants=wants))


def want(step, *sources, reason=WantReason.RESTORE):
    return Want(shard=shard(step), sources=sources, reason=reason)


def kinds(actions, kind):
    return [action for action in actions if isinstance(action, kind)]


def said(actions, kind):
    return [a.event.message for a in kinds(actions, ev.Emit) if a.event.kind == kind]


def freed(actions):
    return {a.old.slot for a in kinds(actions, ev.RenameSlot) if a.new.state is SlotState.FREE}


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ((Object(),), [(Object(),)]),
        ((Memory("b"), Object()), [(B, Object())]),
        ((Memory("b"),), [(B,)]),
        ((), []),
        ((Memory("gone"), Object()), [(Object(),)]),
    ],
    ids=["object", "both", "peer", "nobody", "peer unknown here"],
)
def test_a_copy_that_no_peer_has_is_fetched_if_the_object_store_has_it(sources, expected):
    """F67: never dropped for want of a peer."""
    _, actions = handle(state(*free("s1")), view((want(7, *sources),)))
    assert expected == [a.sources for a in kinds(actions, ev.Fetch)]


def test_several_shards_are_fetched_side_by_side_and_never_more_than_the_limit():
    """F72"""
    wants = tuple(replace(want(7, Object()), shard=shard(7, rank)) for rank in range(6))
    _, actions = handle(state(*free("s1", "s2", "s3", "s4", "s5", "s6")), view(wants))
    assert 4 == len(kinds(actions, ev.Fetch))


def fetching():
    now, actions = handle(state(*free("s1")), view((want(7, Object()),)))
    return now, kinds(actions, ev.Fetch)[0]


def test_an_object_without_good_bytes_is_accused_under_the_name_of_the_store():
    """F70: metadata must choose something else; the event says what is meant."""
    now, fetch = fetching()
    now, actions = handle(now, ev.FetchFailed(fetch.name, shard(7).id, "truncated", (Object(),)))
    listed = inventory(now, incarnation=1, sequence=1).bad_sources
    assert [(Object(), shard(7).id)] == [(bad.source, bad.shard) for bad in listed]
    assert ["the object store has no good copy of shard r1/7/1/0/0"] == said(actions, "bad_source")


def test_a_store_that_cannot_be_read_is_tried_again_unaccused_and_says_once_what_to_do():
    now, fetch = fetching()
    failed = ev.FetchFailed(fetch.name, shard(7).id, "503", (), "the store is down; start it")
    now, actions = handle(now, failed)
    assert ["the store is down; start it"] == said(actions, "object_store_failed")
    assert () == now.bad_sources

    now, actions = handle(now, ev.Tick(60.0))
    again = kinds(actions, ev.Fetch)
    assert [(Object(),)] == [a.sources for a in again]
    now, actions = handle(now, replace(failed, name=again[0].name))
    assert [] == said(actions, "object_store_failed")


def drained(*steps):
    return tuple(shard(step).id for step in steps)


def test_what_drains_keeps_its_slot_here_until_it_is_durable_and_a_copy_for_others_goes():
    """F28, 4.7: of each shard one node is told to keep it, and that is another's business here."""
    held = state(sealed("s1", 5), sealed("s2", 5, owner="b"), sealed("s3", 6))
    held.slots["s2"] = replace(
        held.slots["s2"],
        content=replace(held.slots["s2"].content, shard=shard(5, rank=1)),
    )
    keep = {"free_before": checkpoint(6)}
    now, actions = handle(held, view(drained=drained(5), **keep))
    assert {"s2"} == freed(actions)
    _, actions = handle(now, view(version="2", **keep))
    assert {"s1"} == freed(actions)


def test_what_drains_is_not_copied_once_a_newer_step_is_kept():
    """It has one keeper; a copy of it would take the room of a later step's."""
    run = {"free_before": checkpoint(6), "ring": ("a", "b"), "copies": Copies(1)}
    _, actions = handle(state(sealed("s1", 5)), view(drained=drained(5), **run))
    assert [] == kinds(actions, ev.AskHold)

    now, _ = handle(state(*free("s1")), view(**run))
    with pytest.raises(PreconditionError, match="no longer wanted"):
        making_room.check_holdable(now, shard(5))


def test_a_superseded_checkpoint_is_not_copied_though_it_is_still_pinned():
    rule = SupersedeRule(after_step=4, below_generation=2)
    run = {"ring": ("a", "b"), "copies": Copies(1), "superseded": (rule,)}
    _, actions = handle(state(sealed("s1", 5)), view(pinned=(checkpoint(5),), **run))
    assert [] == kinds(actions, ev.AskHold)
    assert set() == freed(actions)


def leases(now):
    return [item.slot for item in session_view(now, now.sessions["1" * 32]).leases]


def saving(*slots, slots_count=3):
    reservation = Reservation(
        plan_hash="p", length_bytes=KIB, slots=slots_count, restored_bytes=KIB
    )
    made = state(*slots)
    asks = session(reservation=reservation, persist=PersistRule(steps=1))
    made.sessions = {"1" * 32: asks}
    return made


def test_the_third_slot_is_what_a_rank_writes_while_an_older_step_drains():
    """F88: one drains, one is the newest, one is written; not a fourth."""
    before = saving(sealed("s1", 5), sealed("s2", 9), *free("s3", "s4"))
    keep = {"free_before": checkpoint(9)}
    now, _ = handle(before, view(drained=drained(5), **keep))
    assert ["s3"] == leases(now)

    now, actions = handle(now, view(version="2", **keep))
    assert {"s1"} == freed(actions)
    assert ["s3"] == leases(now), "what drained is gone, and its slot is for the next that does"


def test_while_nothing_drains_no_more_steps_wait_for_their_copies_than_backups_have_room_for():
    """P5, P8: 8 is kept, 9 waits; with 10 beside them one backup had 9 and another 10, for ever."""
    before = saving(sealed("s1", 8), sealed("s2", 9), *free("s3"))
    now, _ = handle(before, view(free_before=checkpoint(8)))

    assert [] == leases(now)


def test_with_two_slots_what_drains_takes_what_is_left_of_the_budget():
    """F43, F88: a save waits for no upload as long as there is memory."""
    before = saving(sealed("s1", 5), sealed("s2", 9), *free("s3"), slots_count=2)
    now, _ = handle(before, view(drained=drained(5), free_before=checkpoint(9)))

    assert ["s3"] == leases(now)


def test_levels_of_steps_on_their_way_are_listed_however_many_came_after_them():
    newer = tuple(Committed(checkpoint=checkpoint(s)) for s in range(100, 108))
    slow = (
        Committed(checkpoint=checkpoint(3), replicated=True, draining=True),
        Committed(checkpoint=checkpoint(2), durable=True),
    )
    lost = tuple(AbandonedStep(run="r1", step=s, generation=1) for s in range(40, 90))
    now, _ = handle(state(), ev.SessionOpened(session()))
    now, _ = handle(now, view(committed=(*newer, *slow), abandoned=lost))

    steps = session_view(now, now.sessions["1" * 32]).steps
    assert STEPS_COUNT_MAX + 2 == len(steps)
    assert [(3, True, False), (2, False, True)] == [
        (s.step, s.draining, s.durable) for s in steps[-2:]
    ]
    assert all(s.local and s.sealed for s in steps[-2:])
    assert not any(s.draining or s.durable for s in steps[:-2])


def notes(*steps, json='{"loss":1}'):
    return tuple(StepNote(step=step, json=json) for step in steps)


def updated(made, sent):
    before = state()
    before.sessions = {made.id: made}
    update = session_update(session=made.id, notes=sent)
    after, _ = handle(before, ev.Updated(replace(update, report=checked(update.report))))
    return inventory(after, incarnation=1, sequence=1).ranks[0].report.notes


def test_notes_of_rank_0_go_into_the_inventory_within_their_limits():
    assert notes(1, 2) == updated(session(), notes(1, 2))
    assert NOTES_COUNT_MAX == len(updated(session(), notes(*range(20))))
    long = notes(1, json='"' + "x" * NOTE_BYTES_MAX + '"')
    assert notes(2) == updated(session(), long + notes(2))
    assert () == updated(session(rank=1, world_size=2), notes(1))


@pytest.mark.parametrize("source", ["memory", "peer", "object"])
def test_where_a_copy_came_from_survives_in_its_sidecar(source):
    """What a restore says of its sources does not depend on whether the agent was restarted."""
    from holdfast.format.digest import part_digests, root_digest

    data = bytes(KIB)
    digests = part_digests(data)
    whole = replace(shard(7), root_digest=root_digest(KIB, digests))
    content = Content(shard=whole, owner="a", digests=b"".join(digests), source=source)
    assert content == sidecar.decode(sidecar.encode(content), KIB)
