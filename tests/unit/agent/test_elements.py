"""Elements of parity in the residency machine: made, kept, spared, freed; a shard made again."""

from __future__ import annotations

from dataclasses import replace

from tests.said import tcp

from holdfast.core.ids import CheckpointId, ShardId
from holdfast.core.inventory import Peer
from holdfast.core.node_view import ElementWant, NodeView, RunView, Want, WantReason
from holdfast.core.shard import Shard
from holdfast.core.slot_names import SlotName, SlotState
from holdfast.core.sources import Memory, Object, Rebuilt
from holdfast.core.stripes import Element, Piece, Stripe
from holdfast_services.agent.domain import HeldSum, Slot, State, Work, elements, handle, inventory
from holdfast_services.agent.domain import events as ev
from holdfast_services.agent.domain.state import Rebuilding

ME = Peer(node="c", rpc_address="c:1", endpoints=tcp("c:2"))
A = Peer(node="a", rpc_address="a:1", endpoints=tcp("a:2"))
B = Peer(node="b", rpc_address="b:1", endpoints=tcp("b:2"))
KIB = 1024


def shard(rank, step=5):
    return Shard(
        id=ShardId("r1", step, 1, rank), job="job", world_size=2, plan_hash="p",
        length_bytes=KIB - 24 * rank, root_digest=b"d" * 16,
    )  # fmt: skip


def element(step=5, number=0):
    stripe = Stripe(members=(shard(0, step), shard(1, step)), elements_count=2)
    return Element(stripe=stripe, number=number)


def held(step=5, number=0):
    return HeldSum(
        element=element(step, number), root_digest=b"r" * 16, digests=b"e" * 16,
        member_digests=(b"0" * 16, b"1" * 16),
    )  # fmt: skip


def slot(name, step=5, number=0):
    return Slot(
        name=SlotName(name, 1, SlotState.ELEMENT), length_bytes=KIB, element=held(step, number)
    )


def wanted(step=5, number=0):
    pieces = (
        Piece(number=0, is_element=False, nodes=("a",), root_digest=b"d" * 16),
        Piece(number=1, is_element=False, nodes=("b",), root_digest=b"d" * 16),
    )
    return ElementWant(element=element(step, number), pieces=pieces)


def view(nodes=(ME, A, B), run=None, **fields):
    runs = (RunView(run="r1", job="job", generation=1, world_size=2, **(run or {})),)
    return ev.ViewArrived(NodeView(version="1", nodes=nodes, runs=runs, **fields))


def state(*slots, budget=4 * KIB):
    made = State(me=ME, budget_bytes=budget)
    made.slots = {one.name.slot: one for one in slots}
    made.next_slot = len(slots) + 1
    return made


def run(now, *events):
    """Feed events; slots are created at once. Return the state and what else was decided."""
    actions = []
    for event in events:
        now, decided = handle(now, event)
        for action in decided:
            actions.append(action)
            if isinstance(action, ev.CreateSlot):
                now, more = handle(now, ev.SlotCreated(action.name.slot))
                actions += more
    return now, actions


def of(kind, actions):
    return [action for action in actions if isinstance(action, kind)]


def test_a_wanted_element_is_made_once_and_reported_with_its_stripe():
    now, actions = run(state(), view(elements=(wanted(),)), ev.Tick(1.0))
    [make] = of(ev.MakeElement, actions)
    assert (make.element, now.slots[make.name.slot].work) == (element(), Work.MAKING)
    assert [piece.peers for piece in make.members.pieces] == [(A,), (B,)]

    now, actions = run(now, ev.ElementMade(make.name, held()), ev.Tick(2.0))
    assert [] == of(ev.MakeElement, actions)
    report = inventory(now, incarnation=1, sequence=1)
    assert (element(), b"r" * 16) == (
        report.elements[0].element,
        report.elements[0].root_digest,
    )
    assert () == report.shards


def test_one_element_is_made_at_a_time():
    both = (wanted(number=0), wanted(number=1))
    now, actions = run(state(), view(elements=both))
    [make] = of(ev.MakeElement, actions)
    now, actions = run(now, ev.ElementMade(make.name, held()))
    [following] = of(ev.MakeElement, actions)
    assert {0, 1} == {make.element.number, following.element.number}


def test_a_member_with_nobody_known_here_makes_no_element():
    _, actions = run(state(), view(nodes=(ME, A), elements=(wanted(),)))
    assert [] == of(ev.MakeElement, actions)


def test_what_failed_is_begun_again_later_and_told_once():
    now, actions = run(state(), view(elements=(wanted(),)))
    [make] = of(ev.MakeElement, actions)
    key = element().key
    now, actions = run(now, ev.ElementFailed(make.name, key, "b is gone"))
    assert [] == of(ev.MakeElement, actions)
    assert ["element_failed"] == [one.event.kind for one in of(ev.Emit, actions)]
    assert now.slots[make.name.slot].name.state is SlotState.FREE

    now, actions = run(now, ev.Tick(10.0))
    [again] = of(ev.MakeElement, actions)
    _, actions = run(now, ev.ElementFailed(again.name, key, "b is gone"))
    assert [] == of(ev.Emit, actions)


def test_an_element_is_freed_as_copies_of_its_step_are():
    old, kept = CheckpointId("r1", 5, 1), CheckpointId("r1", 6, 1)
    for fields, gone in [
        ({}, False),
        ({"free_before": old}, False),
        ({"free_before": kept}, True),
        ({"free_before": kept, "pinned": (old,)}, False),
    ]:
        now, _ = run(state(slot("s1")), view(run=fields))
        assert gone == (now.slots["s1"].element is None), fields


def test_a_bad_element_is_dropped_and_a_good_one_stays():
    now, actions = run(state(slot("s1")), ev.ElementSuspected(SlotName("s1", 1, SlotState.ELEMENT)))
    [verify] = of(ev.VerifyElement, actions)
    good, _ = run(now, ev.ElementVerified(verify.name, True))
    assert good.elements()
    bad, actions = run(now, ev.ElementVerified(verify.name, False))
    assert not bad.elements()
    assert ["quarantined"] == [one.event.kind for one in of(ev.Emit, actions)]


def test_a_spare_element_makes_room_while_metadata_answers():
    later = wanted(step=6)
    full = state(slot("s1"), budget=KIB)
    now, actions = run(full, view(elements=(later,)))
    assert [] == of(ev.MakeElement, actions)
    assert now.elements()

    spared = view(elements=(later,), spare_elements=(element().key,))
    now, actions = run(full, spared)
    [make] = of(ev.MakeElement, actions)
    assert make.element == element(step=6)
    assert "s1" == make.name.slot


def test_a_lost_shard_is_fetched_from_its_stripe_after_nodes_and_before_the_store():
    pieces = (
        Piece(number=1, is_element=False, nodes=("b",), root_digest=b"d" * 16),
        Piece(number=0, is_element=True, nodes=("a", "c"), root_digest=b"r" * 16),
    )
    source = Rebuilt(element().stripe, pieces)
    want = Want(shard=shard(0), sources=(source, Object()), reason=WantReason.REPAIR, owner="a")
    _, actions = run(state(), view(wants=(want,)))
    [fetch] = of(ev.Fetch, actions)
    rebuilding, store = fetch.sources
    assert isinstance(rebuilding, Rebuilding)
    assert [piece.peers for piece in rebuilding.pieces] == [(B,), (A, ME)]
    assert store == Object()

    fewer = replace(want, sources=(replace(source, pieces=pieces[:1]), Memory("b")))
    _, actions = run(state(), view(wants=(fewer,)))
    [fetch] = of(ev.Fetch, actions)
    assert fetch.sources == (B,)


def test_an_element_is_no_spare_while_metadata_is_out_or_it_is_worked_on():
    """Others that made it needless may have gone since; and who hashes it looks at its bytes."""
    now, _ = run(state(slot("s1")), view(spare_elements=(element().key,)))
    assert elements.spare(now) == slot("s1")
    lost, _ = handle(now, ev.MetadataLost("no answer"))
    assert elements.spare(lost) is None
    busy, _ = run(now, ev.ElementSuspected(slot("s1").name))
    assert elements.spare(busy) is None


def test_an_element_that_is_hashed_is_freed_once_that_is_over():
    busy, _ = run(state(slot("s1")), ev.ElementSuspected(slot("s1").name))
    now, _ = run(busy, view(run={"free_before": CheckpointId("r1", 6, 1)}))
    assert now.elements()
    done, _ = run(now, ev.ElementVerified(slot("s1").name, True))
    assert not done.elements()


def test_no_element_is_begun_while_a_restore_waits_for_room():
    """What a rank waits for comes first; an element would take the slot."""
    lost = Shard(
        id=ShardId("r1", 4, 1, 0), job="job", world_size=2, plan_hash="p",
        length_bytes=KIB, root_digest=b"d" * 16,
    )  # fmt: skip
    want = Want(shard=lost, sources=(Memory("a"),), reason=WantReason.RESTORE)
    full = state(slot("s1"), budget=KIB)
    free = replace(slot("s2"), name=SlotName("s2", 1, SlotState.FREE), element=None)
    waiting = replace(full, slots={**full.slots, "s2": replace(free, length_bytes=8)})
    spared = view(elements=(wanted(step=6),), wants=(want,), spare_elements=(element().key,))
    now, actions = run(waiting, spared)
    assert [] == of(ev.MakeElement, actions)
    [fetch] = of(ev.Fetch, actions)
    now, actions = run(now, ev.Tick(10.0))
    assert [] == of(ev.MakeElement, actions), "no room"
    assert fetch.shard == lost
