"""Room in the arena: who is refused it, what gives way for a restore, and what never does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.said import changed_session
from tests.unit.agent.test_machine import (
    KIB,
    B,
    asked,
    freed,
    kinds,
    reserved,
    run_view,
    sealed,
    session,
    shard,
    state,
    view,
    writing,
)

from holdfast.core.decision import Decision, DecisionState
from holdfast.core.ids import CheckpointId
from holdfast.core.inventory import HeldState
from holdfast.core.node_view import Committed, Want, WantReason
from holdfast.core.slot_names import SlotName, SlotState
from holdfast.core.sources import Memory
from holdfast.errors import ExhaustedError
from holdfast_services.agent.domain import (
    Slot,
    Work,
    handle,
    inventory,
    making_room,
    session_view,
    slot_rules,
)
from holdfast_services.agent.domain import events as ev
from holdfast_services.agent.domain.state import Tries


def full(*slots):
    """A node whose budget these slots take."""
    made = state(*slots)
    made.budget_bytes = made.used_bytes
    return made


def told(*, wants=(), spares=(), **fields):
    arrived = view(run_view(**fields), wants)
    return ev.ViewArrived(replace(arrived.view, spares=tuple(shard(s).id for s in spares)))


def wanted(step, reason=WantReason.RESTORE):
    return (Want(shard=shard(step), sources=(Memory("b"),), reason=reason),)


@pytest.mark.parametrize(
    ("held", "news", "fits"),
    [
        ((1,), {}, True),
        ((1, 2), {}, False),
        ((1, 2), {"pinned": (CheckpointId("r1", 1, 1),)}, True),
        ((1, 2), {"drained": (shard(1).id,)}, True),
        ((1, 2), {"saving_slots": 3}, True),
        ((1, 2), {"saving_slots": 1}, False),
        ((1, 2), {"spares": (2,)}, True),
        ((1, 2, 3), {"spares": (2,)}, False),
    ],
    ids=[
        "one",
        "two",
        "pinned",
        "drains",
        "three slots",
        "one slot",
        "spare",
        "two beside a spare",
    ],
)
def test_of_a_peers_rank_as_many_steps_are_held_as_it_has_slots_for(held, news, fits):
    """P8: the sum leaves what is beside them for a restore, which waited for ever without it."""
    now, _ = handle(state(*(sealed(f"s{step}", step, owner="b") for step in held)), told(**news))

    if fits:
        making_room.check_holdable(now, shard(9))
        return
    with pytest.raises(ExhaustedError, match="2 steps of rank 0 are held here"):
        making_room.check_holdable(now, shard(9))


def test_copies_on_their_way_count_as_held_and_those_of_others_do_not():
    """P8: owners ask for several at once; own steps, other ranks and attempts have their own."""
    now, _ = handle(state(sealed("s1", 1, owner="b"), sealed("s2", 2), sealed("s3", 3, 2)), told())
    other = replace(shard(4), id=replace(shard(4).id, rank=1))
    now, _ = handle(now, ev.HoldAsked(other, B))
    making_room.check_holdable(now, shard(9))

    now, _ = handle(now, ev.HoldAsked(shard(8), B))

    with pytest.raises(ExhaustedError, match="2 steps of rank 0 are held here"):
        making_room.check_holdable(now, shard(9))


def test_a_copy_that_a_later_one_replaces_is_no_hindrance_to_it():
    """4.7: metadata is out and two steps are held; the committed one stays, the other goes."""
    kept = CheckpointId("r1", 1, 1)
    committed = (Committed(checkpoint=kept),)
    held = state(sealed("s1", 1, owner="b"), sealed("s2", 2, owner="b"))
    now, _ = handle(held, told(free_before=kept, committed=committed))
    now, _ = handle(now, ev.MetadataLost("no answer"))

    making_room.check_holdable(now, shard(3))

    assert [2] == [
        slot.content.shard.id.step for slot in slot_rules.passed_copies(now, shard(3).id)
    ]


@pytest.mark.parametrize(
    ("held", "lost", "fits"),
    [((1, 2), "no answer", True), ((1, 2), "", False), ((1, 2, 3), "no answer", False)],
    ids=["out", "answers", "three"],
)
def test_a_commit_that_metadata_does_not_know_was_heard_costs_a_backup_one_more_step(
    held, lost, fits
):
    """P5; 4.5: neither 2 nor 1 may go while metadata is out, so the owner has a third slot too."""
    kept = CheckpointId("r1", 1, 1)
    committed = tuple(Committed(checkpoint=CheckpointId("r1", step, 1)) for step in held)
    copies = state(*(sealed(f"s{step}", step, owner="b") for step in held))
    now, _ = handle(copies, told(free_before=kept, committed=committed))
    now = replace(now, lost=lost)

    if fits:
        making_room.check_holdable(now, shard(9))
        return
    with pytest.raises(ExhaustedError, match="2 steps of rank 0 are held here"):
        making_room.check_holdable(now, shard(9))


@pytest.mark.parametrize("bad", [False, True], ids=["spare", "quarantined"])
def test_what_others_keep_or_nobody_can_use_gives_its_slot_when_room_is_wanted(bad):
    """P8: restores and repairs leave such copies; before the next one nothing else lets them go."""
    held = HeldState.QUARANTINED if bad else HeldState.SEALED
    before = full(sealed("s1", 5), sealed("s2", 1, owner="b", held=held))
    news = {} if bad else {"spares": (1,)}
    now, actions = handle(before, told(**news))
    assert set() == freed(actions), "nobody wants room"
    making_room.check_holdable(now, shard(9))
    _, actions = handle(replace(now, budget_bytes=3 * KIB), told(wants=wanted(9), **news))
    assert set() == freed(actions), "there is room beside it"

    _, actions = handle(now, told(wants=wanted(9), **news))

    assert {"s2"} == freed(actions)
    assert ["s2"] == [fetch.name.slot for fetch in kinds(actions, ev.Fetch)]


def test_a_quarantined_segment_takes_none_of_the_slots_of_its_rank():
    """P5; 4.7: with two slots and an older step that is kept nothing would be saved any more."""
    kept = CheckpointId("r1", 10, 1)
    before = state(sealed("s1", 10), sealed("s2", 20, held=HeldState.QUARANTINED))
    before.sessions = {session().id: reserved(1)}
    after, actions = handle(before, told(free_before=kept))
    assert set() == freed(actions), "there is room beside it"
    assert 1 == sum(slot.work is Work.CREATING for slot in after.slots.values())

    _, actions = handle(replace(before, budget_bytes=2 * KIB), told(free_before=kept))

    assert {"s2"} == freed(actions)


@pytest.mark.parametrize("kept", ["", "out", "read", "busy"])
def test_a_spare_copy_stays_while_metadata_is_out_and_while_it_is_used(kept):
    """A5, S3: that others keep it is what metadata said last; a rank may be loading from it."""
    work = Work.VERIFYING if kept == "busy" else Work.NONE
    before = full(replace(sealed("s1", 1, owner="b"), work=work))
    before.view = told(wants=wanted(9), spares=(1,)).view
    before.lost = "no answer" if kept == "out" else ""
    if kept == "read":
        before.sessions = {session().id: session(reading=frozenset({shard(1).id}))}

    _, actions = handle(before, ev.Tick(1.0))

    assert (set() if kept else {"s1"}) == freed(actions)


BAD = sealed("s2", 1, held=HeldState.QUARANTINED)


def begun(*slots, **fields):
    """A node with these slots and no room, whose rank has leased what is open."""
    made = full(*slots)
    made.sessions = {session().id: changed_session(reserved(), **fields)}
    return made


def test_a_lease_that_nobody_has_written_is_taken_back_for_a_restore_without_room():
    """P8; A2: once its rank has let go of the lock; another one too if that takes long."""
    now, _ = handle(begun(writing("s1"), writing("s2")), told(wants=wanted(9)))
    leases = session_view(now, now.sessions[session().id]).leases
    assert ["s2"] == [lease.slot for lease in leases]
    name = now.slots["s1"].name

    now, actions = handle(now, ev.Tick(1.0))
    assert [(a.name, a.replace) for a in kinds(actions, ev.ReclaimSlot)] == [(name, False)]
    now, _ = handle(now, ev.WorkBlocked(name))
    now, actions = handle(now, ev.Tick(2.0))
    assert name in [a.name for a in kinds(actions, ev.ReclaimSlot)], "its rank held it still"
    now, actions = handle(now, ev.Reclaimed(name, replaced=False))

    assert ["s1"] == [fetch.name.slot for fetch in kinds(actions, ev.Fetch)]
    assert () == session_view(now, now.sessions[session().id]).leases


@pytest.mark.parametrize(
    ("stage", "loaded", "taken"),
    [
        (DecisionState.PENDING, False, False),
        (DecisionState.PROPOSED, False, True),
        (DecisionState.CONFIRMED, False, True),
        (DecisionState.CONFIRMED, True, False),
    ],
)
def test_so_it_is_for_a_repair_until_ranks_have_loaded(stage, loaded, taken):
    """P5: it makes room for a restore on another node, or lets what is older go."""
    chosen = Decision(
        number=1, state=stage, generation=1, checkpoint=shard(9).id.checkpoint, shards_count=1
    )
    before = begun(writing("s1"), loaded=loaded)
    told_so = view(run_view(decision=chosen), wanted(8, WantReason.REPAIR))

    now, _ = handle(before, told_so)
    _, actions = handle(now, ev.Tick(1.0))

    assert taken == bool(kinds(actions, ev.ReclaimSlot))


def free(name, length, work=Work.NONE):
    return Slot(name=SlotName(name, 1, SlotState.FREE), length_bytes=length, work=work)


def training(*slots, live=True):
    """A node with these slots and room, whose rank has reserved two; it may have ended."""
    made = state(*slots)
    made.sessions = {session().id: replace(reserved(), live=live)}
    return made


ROOM = {
    "nothing is held": (state(), 16),
    "a segment": (state(sealed("s1", 1)), 15),
    "a free slot is dropped": (state(sealed("s1", 1), free("s2", 3 * KIB)), 15),
    "one that is made is not": (state(free("s1", 3 * KIB, Work.CREATING)), 13),
    "what a rank writes, and will write next": (training(writing("s1")), 14),
    "of a rank that has ended": (training(sealed("s1", 1), live=False), 15),
    "a rank that lacks nothing": (training(writing("s1"), writing("s2")), 14),
    "a budget that has become smaller": (replace(state(sealed("s1", 1)), budget_bytes=KIB // 2), 0),
}


@pytest.mark.parametrize(("now", "kibs"), ROOM.values(), ids=ROOM)
def test_a_node_says_what_more_fits_if_nothing_is_given_up_for_it(now, kibs):
    """No early copy takes the room of a lease, or of a copy that is held (ADR 0077)."""
    assert kibs * KIB == inventory(now, incarnation=1, sequence=1).room_bytes


@pytest.mark.parametrize(
    "reason", [WantReason.REPAIR, WantReason.RESTORE], ids=lambda reason: reason.name
)
def test_a_copy_on_its_way_is_room_for_who_takes_it_off_itself(reason):
    """Else the same copy would be wanted, then not, while it comes, and its tries forgotten."""
    coming = replace(free("s1", 3 * KIB, Work.FETCHING), filling=shard(9).id)
    now = replace(state(coming), view=told(wants=wanted(9, reason)).view)

    expected = 16 if reason is WantReason.REPAIR else 13
    assert expected * KIB == inventory(now, incarnation=1, sequence=1).room_bytes


def test_what_more_fits_is_no_news_by_itself():
    """Metadata tells nobody of it: it changes with each slot that is leased."""
    told = inventory(state(), incarnation=1, sequence=1)

    assert told.lasting() == replace(told, room_bytes=0).lasting()


def closed(name):
    slot = writing(name)
    return replace(slot, name=slot.name.to(SlotState.CLOSED))


STAYS = {
    "its rank trains": (begun(writing("s1"), loaded=True), WantReason.RESTORE),
    "a repair": (begun(writing("s1")), WantReason.REPAIR),
    "written": (begun(closed("s1")), WantReason.RESTORE),
    "bad bytes": (begun(writing("s1"), BAD), WantReason.RESTORE),
    "a free slot": (begun(writing("s1"), free("s2", 2 * KIB)), WantReason.RESTORE),
    "one is made": (begun(writing("s1"), free("s2", KIB, Work.CREATING)), WantReason.RESTORE),
    "one is reclaimed": (begun(writing("s1"), writing("s2", plan="q")), WantReason.RESTORE),
}


@pytest.mark.parametrize(("before", "reason"), STAYS.values(), ids=STAYS)
def test_a_lease_stays_with_its_rank_if_it_trains_or_nothing_needs_to_be_taken(before, reason):
    """P4: a save that has begun is not stopped by a restore."""
    now, _ = handle(before, told(wants=wanted(9, reason)))
    assert session().id == now.slots["s1"].session

    _, actions = handle(now, ev.Tick(1.0))

    assert [] == kinds(actions, ev.ReclaimSlot)


def test_what_a_catalogue_from_a_backup_keeps_frees_nothing_of_a_later_attempt():
    """P5, P6: it restored an earlier step, and may be below what its elder had reached."""
    kept = CheckpointId("r1", 20, 1)
    before = state(sealed("s1", 10), sealed("s2", 20), sealed("s3", 10, 2))

    now, actions = handle(before, told(free_before=kept))

    assert {"s1"} == freed(actions)
    making_room.check_holdable(now, shard(11, 2))


def test_room_that_a_restore_waits_for_is_not_leased_to_the_rank_that_waits_for_it():
    """P8: its fetch failed and is tried again later; a rank that trains saves meanwhile."""
    before = begun(free("s1", KIB))
    before.view = told(wants=wanted(9)).view
    before.fetches = {shard(9).id: Tries(next_s=100.0)}
    now, _ = handle(before, ev.Tick(1.0))
    assert "" == now.slots["s1"].session

    trains = replace(now, sessions={session().id: changed_session(reserved(), loaded=True)})
    later, _ = handle(trains, ev.Tick(2.0))
    assert session().id == later.slots["s1"].session

    now, _ = handle(now, told())
    assert session().id == now.slots["s1"].session, "nothing is wanted any more"


def two_that_reserve(*answers):
    """Two ranks reserve a slot each, one after the other; return why each was refused, and all."""
    now = state()
    for number, (length, refused) in enumerate(answers, 1):
        one = changed_session(session(), id=str(number) * 32, rank=number, world_size=4)
        now.sessions[one.id] = one
        now, actions = handle(now, ev.Reserved(one.id, asked(length, slots=1)))
        made = kinds(actions, ev.CreateSlot)[0].name.slot
        event = ev.SlotRefused(made, refused) if refused else ev.SlotCreated(made)
        now, _ = handle(now, event)
    return [one.refused for one in now.sessions.values()], now


def test_a_slot_that_the_file_system_refused_is_a_fact_of_the_rank_that_lacks_it():
    """Two ranks that reserve at once: neither raises the other's refusal."""
    assert ["full", ""] == two_that_reserve((2 * KIB, "full"), (3 * KIB, ""))[0]
    assert ["", "full"] == two_that_reserve((KIB, ""), (KIB, "full"))[0]


def test_a_refusal_stands_until_its_rank_reserves_again():
    """Nor does one clear the other's: the first to ask would wait for its deadline."""
    refused, now = two_that_reserve((2 * KIB, "full"), (2 * KIB, "full, too"))
    assert ["full, too", "full, too"] == refused

    now, _ = handle(now, ev.Reserved("2" * 32, asked(2 * KIB, slots=1)))
    assert ["full, too", ""] == [one.refused for one in now.sessions.values()]


def test_each_rank_has_one_slot_before_any_has_two():
    """Making one takes seconds; of eight ranks with three slots the last would wait for 22."""
    now, actions = state(), []
    for rank in range(3):
        one = changed_session(session(), id=f"{rank}" * 32, rank=rank, world_size=4)
        now.sessions[one.id] = one
        now, made = handle(now, ev.Reserved(one.id, asked(KIB, slots=2)))
        actions += made
    leased = []
    for _ in range(6):
        [made] = kinds(actions, ev.CreateSlot)
        now, actions = handle(now, ev.SlotCreated(made.name.slot))
        leased.append(now.slots[made.name.slot].session[0])

    assert set("012") == set(leased[:3]) == set(leased[3:])
