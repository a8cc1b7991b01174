"""Whose copy it is that a node fetches because the catalogue asks for it."""

from tests.said import tcp
from tests.unit.agent.test_machine import KIB, kinds, run_view, shard, state, view

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
