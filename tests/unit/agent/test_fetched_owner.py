"""Whose copy it is that a node fetches because the catalogue asks for it."""

import pytest
from tests.said import tcp
from tests.unit.agent.test_machine import KIB, kinds, run_view, shard, state, view

from holdfast.core.decision import Decision, DecisionState
from holdfast.core.inventory import Peer
from holdfast.core.node_view import Want, WantReason
from holdfast.core.protection import Copies
from holdfast.core.slot_names import SlotName, SlotState
from holdfast.core.sources import Memory
from holdfast_services.agent.domain import Content, Slot, handle
from holdfast_services.agent.domain import events as ev


def test_an_owner_that_gets_its_shard_back_asks_its_backups_as_before():
    """F55: by the name of whoever gave it nobody would, and the copies stay where a ring was."""
    free = Slot(name=SlotName("s1", 0, SlotState.FREE), length_bytes=KIB)
    wants = (Want(shard=shard(5), sources=(Memory("b"),), reason=WantReason.REPAIR, owner="a"),)
    run = run_view(ring=("a", "c", "b"), copies=Copies(1))
    held, actions = handle(state(free), view(run, wants))
    [fetch] = kinds(actions, ev.Fetch)
    assert ("a", False) == (fetch.owner, fetch.asked)

    content = Content(shard=shard(5), owner=fetch.owner, digests=b"", source="peer")
    _, actions = handle(held, ev.FetchDone(fetch.name, content))

    assert [(5, "c")] == [(a.shard.id.step, a.peer.node) for a in kinds(actions, ev.AskHold)]


def test_a_copy_that_its_owner_asks_for_is_the_owners():
    """4.5: and to a restore it is memory, since it was here before anything failed."""
    free = Slot(name=SlotName("s1", 0, SlotState.FREE), length_bytes=KIB)
    owner = Peer(node="b", rpc_address="b:1", endpoints=tcp("b:2"))
    held, _ = handle(state(free), view(run_view(ring=("a", "b"), copies=Copies(1))))

    _, actions = handle(held, ev.HoldAsked(shard(5), owner))

    [fetch] = kinds(actions, ev.Fetch)
    assert ("b", True) == (fetch.owner, fetch.asked)


def planned_copy(decision=None):
    """Return a node that was told to fetch a copy by metadata, and what it fetches."""
    free = Slot(name=SlotName("s1", 0, SlotState.FREE), length_bytes=KIB)
    wants = (Want(shard=shard(5), sources=(Memory("b"),), reason=WantReason.REPAIR, owner="b"),)
    run = run_view(ring=("a", "b"), copies=Copies(1), decision=decision)
    fetching, actions = handle(state(free), view(run, wants))
    [fetch] = kinds(actions, ev.Fetch)
    return fetching, ev.FetchDone(fetch.name, content_of("peer"))


def content_of(source):
    return Content(shard=shard(5), owner="b", digests=b"", source=source)


ASKED = ev.HoldAsked(shard(5), Peer(node="b", rpc_address="b:1", endpoints=tcp("b:2")))


@pytest.mark.parametrize("asked", ["while it comes", "once it is here", "never"])
def test_a_copy_that_metadata_planned_before_its_owner_asked_is_memory(asked):
    """F80: both plan the copies of a step, and a busy owner may be the later one."""
    node, done = planned_copy()
    for event in {"while it comes": [ASKED, done], "once it is here": [done, ASKED]}.get(
        asked, [done]
    ):
        node, _ = handle(node, event)

    held = node.held(shard(5).id)
    assert held.content.source == ("peer" if asked == "never" else "memory")
    assert not node.holds


@pytest.mark.parametrize("late", [False, True])
def test_what_comes_while_a_restore_is_decided_came_from_a_peer_whoever_asks_for_it(late):
    """An owner that was restored first asks for its copies, and a rank here has yet to load."""
    at = shard(5).id.checkpoint
    proposed = Decision(
        number=1, state=DecisionState.PROPOSED, generation=2, checkpoint=at, shards=(shard(5),)
    )
    node, done = planned_copy(proposed)
    for event in [done, ASKED] if late else [ASKED, done]:
        node, _ = handle(node, event)

    assert node.held(shard(5).id).content.source == "peer"
