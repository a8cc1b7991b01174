"""Slots that ranks fill for copies: when they are lent, what waits for them, who takes them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.said import agent_session, changed_session
from tests.unit.agent.test_machine import KIB, B, C, freed, kinds, run_view, state, view
from tests.unit.agent.test_machine import shard as own_shard

from holdfast.core.budget import Reservation
from holdfast.core.node_view import Want, WantReason
from holdfast.core.slot_names import SlotName, SlotState
from holdfast.core.sources import Memory
from holdfast_services.agent.domain import (
    Content,
    Slot,
    Work,
    admit,
    handle,
    making_room,
    session_view,
    slot_rules,
    twin_slots,
)
from holdfast_services.agent.domain import events as ev
from holdfast_services.agent.domain.state import Twin

FREE = SlotName("s2", 4, SlotState.FREE)
LENT = FREE.to(SlotState.WRITING)
CLOSED = LENT.to(SlotState.CLOSED)
TAKEN = CLOSED.to(SlotState.FREE).to(SlotState.WRITING)


def shard(step, rank=1):
    return own_shard(step, rank=rank)


def copy_of(step, rank=1):
    return Content(shard=shard(step, rank), owner="b", digests=b"")


def held(name, step, rank=1):
    content = copy_of(step, rank)
    return Slot(name=SlotName(name, 1, SlotState.SEALED), length_bytes=KIB, content=content)


def spare(step=1):
    return Slot(name=FREE, length_bytes=KIB, last=copy_of(step))


def rank(number=0, *, twins=True, loaded=True, **said):
    asked = Reservation(plan_hash="mine", length_bytes=1, slots=2, restored_bytes=0, twins=twins)
    return agent_session(
        id=f"rank-{number}", rank=number, world_size=4, loaded=loaded, reservation=asked, **said
    )


def node(*slots, sessions=(), budget_bytes=None):
    """A node whose ranks have the slots that they save into, and without room for more."""
    sessions = sessions or (rank(),)
    own = [_own(f"s{9 - i}{one.spec.rank}", one.id) for one in sessions for i in range(2)]
    made = state(*slots, *own)
    made.next_slot = 200
    made.sessions = {one.id: one for one in sessions}
    made.budget_bytes = made.used_bytes if budget_bytes is None else budget_bytes
    made, _ = handle(made, view(run_view()))
    return made


def _own(name, session):
    opened = SlotName(name, 1, SlotState.WRITING)
    return Slot(name=opened, length_bytes=1, session=session, plan_hash="mine")


def lent(*more, sessions=(), **fields):
    """A node that has lent the slot of step 1 of rank 1, which has a copy of step 2 here."""
    made = node(held("s1", 2), spare(), *more, sessions=sessions, **fields)
    assert made.slots["s2"].twin == Twin(of=shard(1).id, session="rank-0")
    return made


def closed(**fields):
    """The same, and its rank has filled it in."""
    now, _ = handle(lent(**fields), ev.SlotClosed(CLOSED))
    return now


def hold(now, step, now_s=None):
    return handle(now, ev.HoldAsked(shard(step), B), now_s=now_s)


def seal(now, step, session="rank-0"):
    """A step of its own that a rank here has sealed."""
    number = int(session[-1])
    mine = [slot for slot in now.slots.values() if slot.session == session]
    name = mine[0].name.to(SlotState.CLOSED)
    now, _ = handle(now, ev.SlotClosed(name))
    content = Content(shard=own_shard(step, rank=number), owner="a", digests=b"")
    return handle(now, ev.SlotSealed(name, content))


def fetches(actions):
    return kinds(actions, ev.Fetch)


def test_a_free_slot_of_a_copy_is_lent_to_a_rank_here_that_has_twins():
    before = node(spare())
    without, _ = handle(before, ev.Tick(1.0))
    now = lent()

    assert without.slots["s2"].name == FREE, "nothing tells that its owner copies here still"
    assert now.slots["s2"].name == LENT
    [lease] = session_view(now, now.sessions["rank-0"]).twins
    assert (lease.slot, lease.incarnation, lease.plan_hash) == ("s2", 5, "p")
    leases = session_view(now, now.sessions["rank-0"]).leases
    assert "s2" not in [lease.slot for lease in leases]


@pytest.mark.parametrize(
    "sessions",
    [
        (rank(twins=False),),
        (rank(loaded=False),),
        (rank(live=False),),
        (rank(fenced=True),),
        (replace(rank(), reservation=None),),
        (rank(run="r2"),),
    ],
    ids=["has none", "restores", "died", "fenced", "no plan", "another run"],
)
def test_it_is_lent_to_nobody_else(sessions):
    now = node(held("s1", 2), spare(), sessions=sessions)

    assert now.slots["s2"].name == FREE


def test_no_more_is_lent_than_copies_are_kept():
    """P8: two steps of each rank, with the one that is to come."""
    full = node(held("s1", 2), held("s3", 3), spare())
    one = node(held("s1", 3), spare(), replace(spare(2), name=replace(FREE, slot="s4")))

    assert full.slots["s2"].twin is None
    assert [slot.name.slot for slot in one.slots.values() if slot.twin] == ["s2"]


@pytest.mark.parametrize(("of", "expected"), [(8, "rank-0"), (9, "rank-1"), (11, "rank-1")])
def test_of_several_ranks_that_in_the_same_place_on_its_node_fills(of, expected):
    """HSDP: what replicates over nodes is alike in the same place."""
    slots = held("s1", 2, of), replace(spare(), last=copy_of(1, of))
    now = node(*slots, sessions=(rank(1), rank(0)))

    assert expected == now.slots["s2"].twin.session


def test_what_a_rank_has_filled_in_is_what_the_copy_is_fetched_into():
    now, actions = hold(closed(), 3)

    [fetch] = fetches(actions)
    assert (fetch.name, fetch.filled) == (TAKEN, True)
    assert fetch.last == copy_of(1)
    between = CLOSED.to(SlotState.FREE)
    names = [(action.old, action.new) for action in kinds(actions, ev.RenameSlot)]
    assert names == [(CLOSED, between), (between, TAKEN)]
    assert now.slots["s2"].twin is None
    assert session_view(now, now.sessions["rank-0"]).twins == ()


def test_a_filled_slot_is_sealed_by_nobody():
    """P3: it is no segment before its digests are compared."""
    now, actions = handle(lent(), ev.SlotClosed(CLOSED))
    _, later = handle(now, ev.Tick(9.0))

    assert [] == kinds(actions + later, ev.SealSlot)


def test_a_copy_waits_a_moment_for_the_rank_that_fills_its_slot():
    """No longer than ``WAIT_S_MAX``, nor once the rank has sealed that step itself."""
    now, actions = hold(lent(), 3, now_s=100.0)
    assert [] == fetches(actions)
    assert now.slots["s2"].name == LENT

    filled, _ = handle(now, ev.SlotClosed(CLOSED), now_s=100.2)
    assert filled.slots["s2"].name == TAKEN
    assert filled.slots["s2"].work is Work.FETCHING

    before, actions = seal(now, 2)
    assert [] == kinds(actions, ev.ReclaimSlot), "of the step before: it is still to fill this one"
    _, actions = seal(before, 3)
    assert [LENT] == [action.name for action in kinds(actions, ev.ReclaimSlot)]


def test_a_copy_of_step_0_waits_too_for_who_has_saved_nothing_yet():
    _, actions = hold(lent(), 0, now_s=100.0)

    assert [] == kinds(actions, ev.ReclaimSlot)


def test_a_slot_that_was_taken_back_gets_the_copy():
    now, _ = hold(lent(), 3, now_s=100.0)
    now, actions = seal(now, 3)
    assert [] == fetches(actions)

    _, actions = handle(now, ev.Reclaimed(LENT, replaced=False))

    [fetch] = fetches(actions)
    assert (fetch.name, fetch.filled, fetch.last) == (TAKEN, False, copy_of(1))


def test_a_rank_that_does_not_let_go_holds_up_its_own_slot_and_no_copy():
    """A stopped process: where there is room the copy goes elsewhere after a while.

    Later if it has begun to save that step.
    """
    now, _ = hold(lent(budget_bytes=8 * KIB), 3, now_s=100.0)
    now, _ = seal(now, 3)
    now, _ = handle(now, ev.WorkBlocked(LENT), now_s=100.5)
    _, soon = handle(now, ev.Tick(101.0), now_s=101.0)
    _, late = handle(now, ev.Tick(102.5), now_s=102.5)

    assert [] == kinds(soon, ev.CreateSlot)
    assert 1 == len(kinds(late, ev.CreateSlot))
    now.sessions["rank-0"] = changed_session(now.sessions["rank-0"], saving=(3,))
    assert [] == kinds(handle(now, ev.Tick(102.5), now_s=102.5)[1], ev.CreateSlot)
    assert 1 == len(kinds(handle(now, ev.Tick(111.0), now_s=111.0)[1], ev.CreateSlot))


def test_a_rank_that_ended_gives_its_slots_back():
    _, actions = handle(lent(), ev.SessionEnded("rank-0"))
    assert (LENT, True) in [(a.name, a.replace) for a in kinds(actions, ev.ReclaimSlot)]

    _, actions = handle(closed(), ev.SessionEnded("rank-0"))
    assert {"s2"} == freed(actions)

    asked, _ = hold(lent(), 3)
    filled, _ = handle(asked, ev.SlotClosed(CLOSED))
    _, actions = handle(filled, ev.SessionEnded("rank-0"))
    assert set() == freed(actions), "the copy is under way"


def test_what_no_copy_has_asked_for_is_filled_anew_for_the_next_step():
    """A step that was given up: its filling is two of the rank's steps old."""
    now, _ = seal(closed(), 3)
    assert now.slots["s2"].name == CLOSED

    now, actions = seal(now, 4)

    assert {"s2"} == freed(actions)
    assert now.slots["s2"].name == TAKEN, "lent again"
    assert now.slots["s2"].twin is not None


def test_a_filling_that_is_of_no_use_three_times_is_not_asked_for_any_more():
    now = closed()
    for turn in range(twin_slots.UNLIKE_COUNT_MAX):
        now = now.copy()
        twin_slots.learn(now, shard(3 + turn), 0)
    now, _ = hold(now, 3)
    now, _ = handle(now, ev.FetchDone(TAKEN, copy_of(3), alike_bytes=0))
    older = now.copy()
    older.slots["s1"] = replace(spare(2), name=SlotName("s1", 2, SlotState.FREE))
    now, _ = handle(older, ev.Tick(1.0))
    assert now.slots["s1"].twin is None

    older = older.copy()
    twin_slots.learn(older, shard(3), KIB)
    now, _ = handle(older, ev.Tick(1.0))
    assert now.slots["s1"].twin is not None


@pytest.mark.parametrize("filled", [False, True])
def test_a_lent_slot_makes_room_for_whatever_is_wanted(filled):
    """4.5: a repair, another rank's copy: nobody is refused for it, nobody waits for ever."""
    now = closed() if filled else lent()
    making_room.check_holdable(now, replace(own_shard(3, rank=2), length_bytes=KIB))
    wants = (Want(shard=shard(9, 3), sources=(Memory("c"),), reason=WantReason.RESTORE),)

    now, actions = handle(now, view(run_view(), wants, nodes=(now.me, B, C)))

    if filled:
        [fetch] = fetches(actions)
        assert fetch.name.slot == "s2"
        return
    assert [] == fetches(actions)
    now, actions = handle(now, ev.Tick(1.0))
    assert [LENT] == [action.name for action in kinds(actions, ev.ReclaimSlot)]
    assert session_view(now, now.sessions["rank-0"]).twins == ()
    _, actions = handle(now, ev.Reclaimed(LENT, replaced=False))
    [fetch] = fetches(actions)
    assert fetch.name.slot == "s2"


def test_a_lent_slot_is_none_of_the_slots_that_a_rank_saves_into():
    """P8, 4.7: its quota is that of its own segments, and a job is admitted as it was."""
    now = lent()
    asked = now.sessions["rank-0"].reservation

    assert 0 == slot_rules.quota_left(now, now.sessions["rank-0"])
    assert 0 == slot_rules.quota_left(closed(), now.sessions["rank-0"])
    admit(replace(now, budget_bytes=8 * KIB), now.sessions["rank-0"], asked)
