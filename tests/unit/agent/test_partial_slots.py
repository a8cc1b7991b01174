"""Parts of a segment, for ranks that named byte ranges: a slot for them alone (4.8)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.said import agent_session, session_update
from tests.unit.agent.test_machine import B, C, kinds, run_view, state, view

from holdfast.core.decision import Decision, DecisionState
from holdfast.core.ids import ShardId
from holdfast.core.needs import ByteRange, Needs, ShardNeed
from holdfast.core.node_view import Want, WantReason
from holdfast.core.shard import Shard
from holdfast.core.slot_names import SlotName, SlotState
from holdfast.core.sources import Memory
from holdfast.format.digest import PART_BYTES
from holdfast_services.agent.domain import Content, Slot, handle, inventory, session_view
from holdfast_services.agent.domain import events as ev
from holdfast_services.agent.domain.wanted_parts import length_of, parts_of, ranges_of

LENGTH = 5 * PART_BYTES + 100
SHARD = Shard(
    id=ShardId("r1", 5, 1, 0), job="job", world_size=2, plan_hash="p", length_bytes=LENGTH,
    root_digest=b"d" * 16,
)  # fmt: skip
KEY = SHARD.id.checkpoint
FIRST = ByteRange(begin=10, end=20)
LAST = ByteRange(begin=LENGTH - 1, end=LENGTH)
BUDGET = 16 * PART_BYTES


def needs(*ranges, number=1, whole=False):
    return Needs(
        checkpoint=KEY, shards=(ShardNeed(rank=0, ranges=ranges),), number=number, whole=whole
    )


def session(rank=0, **said):
    return agent_session(id=f"{rank:032x}", rank=rank, world_size=2, names_needs=True, **said)


def decision(number=1, stage=DecisionState.PROPOSED):
    return Decision(
        number=number, state=stage, generation=1, checkpoint=KEY, shards=(SHARD,), shards_count=2,
    )  # fmt: skip


def told(number=1, stage=DecisionState.PROPOSED, reason=WantReason.RESTORE):
    """What the catalogue says: the decision, and that node b has the shard."""
    want = Want(shard=SHARD, sources=(Memory("b"),), reason=reason)
    return view(run_view(decision=decision(number, stage)), (want,), version=f"{number}{stage}")


def waiting(*named, slots=(), budget_bytes=BUDGET):
    """A node whose ranks have named these needs, told of the decision; and what it does then."""
    now = replace(state(*slots), budget_bytes=budget_bytes)
    for rank, said in enumerate(named):
        now, _ = handle(now, ev.SessionOpened(session(rank)))
        now, _ = handle(now, ev.Updated(session_update(session=session(rank).id, needs=said)))
    return handle(now, told())


def content():
    return Content(shard=SHARD, owner="b", digests=b"", source="peer")


def fetched(now, actions):
    """The same node once the parts that it fetches have come."""
    [fetch] = kinds(actions, ev.Fetch)
    return handle(now, ev.FetchDone(fetch.name, content()))


def ready(now, rank=0):
    return now.sessions[session(rank).id].ready_decision == 1


def partials(now):
    return [slot for slot in now.slots.values() if slot.parts]


def test_parts_are_those_that_hold_the_bytes():
    part = PART_BYTES
    across = ByteRange(begin=part - 1, end=part + 1)

    assert parts_of([FIRST], LENGTH) == {0}
    assert parts_of([across, LAST], LENGTH) == {0, 1, 5}
    assert parts_of([ByteRange(begin=0, end=1 << 62)], LENGTH) == set(range(6))
    assert ranges_of({0, 1, 5}, LENGTH) == (
        ByteRange(begin=0, end=2 * part), ByteRange(begin=5 * part, end=LENGTH),
    )  # fmt: skip
    assert length_of({0, 5}, LENGTH) == part + 100


def test_only_the_parts_that_ranks_named_are_fetched_and_take_room():
    now, actions = waiting(needs(FIRST), needs(LAST))
    [fetch] = kinds(actions, ev.Fetch)

    assert fetch.parts == {0, 5}
    assert fetch.name.state is SlotState.PARTIAL
    assert now.used_bytes == PART_BYTES + 100


@pytest.mark.parametrize(
    "other",
    [needs(), needs(FIRST, whole=True), needs(ByteRange(begin=0, end=LENGTH))],
    ids=["the shard", "the checkpoint", "every byte"],
)
def test_if_one_rank_needs_all_of_it_all_of_it_is_fetched(other):
    now, actions = waiting(needs(FIRST), other)
    now, actions = handle(now, ev.SlotCreated(next(iter(now.slots))))
    [fetch] = kinds(actions, ev.Fetch)

    assert (fetch.parts, fetch.name.state) == (frozenset(), SlotState.WRITING)


def test_a_rank_is_ready_by_its_parts_and_reads_them():
    now, actions = waiting(needs(FIRST), None)
    assert not ready(now)
    now, _ = fetched(now, actions)
    assert ready(now)
    assert not ready(now, rank=1)
    now, actions = handle(now, told(stage=DecisionState.CONFIRMED))
    [shown] = session_view(now, now.sessions[session().id]).restore.segments

    assert kinds(actions, ev.Fetch) == []
    assert shown.ranges == (ByteRange(begin=0, end=PART_BYTES),)
    assert shown.file_name == partials(now)[0].name.file_name
    assert now.sessions[session().id].reading == {SHARD.id}


def test_parts_are_no_copy_to_anybody_else():
    now, _ = fetched(*waiting(needs(FIRST)))

    assert inventory(now, incarnation=1, sequence=1).shards == ()
    assert now.held(SHARD.id) is None
    assert now.copies() == {}


def test_parts_go_once_they_are_loaded_and_are_not_fetched_again():
    """The want stays in the view until the catalogue has heard that the rank has loaded."""
    now, _ = fetched(*waiting(needs(FIRST)))
    now, _ = handle(now, told(stage=DecisionState.CONFIRMED))
    [slot] = partials(now)
    update = session_update(session=session().id, needs=needs(FIRST), loaded=True)
    now, actions = handle(now, ev.Updated(update))

    assert kinds(actions, ev.DropSlot) == [ev.DropSlot(slot.name)]
    assert kinds(actions, ev.Fetch) == []
    assert now.used_bytes == 0


def test_parts_stay_while_they_are_read_whatever_the_catalogue_says():
    now, _ = fetched(*waiting(needs(FIRST)))
    now, _ = handle(now, told(stage=DecisionState.CONFIRMED))
    now, actions = handle(now, view(run_view(), version="3"))

    assert kinds(actions, ev.DropSlot) == []
    assert partials(now)


def test_parts_go_with_the_ranks_that_waited():
    now, _ = fetched(*waiting(needs(FIRST)))
    [slot] = partials(now)
    now, actions = handle(now, ev.SessionEnded(session().id))

    assert ev.DropSlot(slot.name) in actions


def test_parts_serve_one_proposal():
    """Nothing is loaded that was not hashed since it was proposed (P3)."""
    now, _ = fetched(*waiting(needs(FIRST)))
    [slot] = partials(now)
    now, actions = handle(now, told(number=2))

    assert ev.DropSlot(slot.name) in actions
    assert not ready(now)
    assert [fetch.parts for fetch in kinds(actions, ev.Fetch)] == [{0}]


def test_a_rank_that_needs_more_gets_more():
    now, _ = fetched(*waiting(needs(FIRST)))
    [slot] = partials(now)
    more = needs(FIRST, LAST, number=2)
    now, actions = handle(now, ev.Updated(session_update(session=session().id, needs=more)))

    assert not ready(now)
    assert ev.DropSlot(slot.name) in actions
    assert [fetch.parts for fetch in kinds(actions, ev.Fetch)] == [{0, 5}]
    assert ready(fetched(now, actions)[0])


def test_parts_that_come_are_not_the_copy_that_an_owner_asked_for():
    """Its owner would count a copy that nobody can fetch from (P1)."""
    now, actions = waiting(needs(FIRST))
    now, _ = handle(now, ev.HoldAsked(SHARD, C))
    now, actions = fetched(now, actions)

    assert SHARD.id in now.holds
    assert kinds(actions, ev.CreateSlot), "the whole of it is next"


def test_a_repair_is_fetched_whole():
    now, _ = handle(replace(state(), budget_bytes=BUDGET), ev.SessionOpened(session()))
    now, _ = handle(now, ev.Updated(session_update(session=session().id, needs=needs(FIRST))))
    _, actions = handle(now, told(reason=WantReason.REPAIR))

    assert kinds(actions, ev.CreateSlot)


def test_of_what_was_loaded_in_parts_the_copy_comes_into_the_last_slot_before_an_older_one():
    """P5: once all its copies lie there the newest step lets older ones go, not the other way."""
    older = replace(SHARD, id=replace(SHARD.id, step=4))
    now, actions = waiting(needs(FIRST), budget_bytes=LENGTH)
    now, _ = fetched(now, actions)
    restore = told(stage=DecisionState.CONFIRMED).view
    lost = (
        Want(shard=shard, sources=(Memory("b"),), reason=WantReason.REPAIR)
        for shard in (SHARD, older)
    )
    both = replace(restore, wants=(*restore.wants, *lost))
    now, actions = handle(now, ev.ViewArrived(both))
    assert not kinds(actions, ev.CreateSlot), "the parts lie in the only slot's room"

    loaded = session_update(session=session().id, needs=needs(FIRST), loaded=True)
    now, actions = handle(now, ev.Updated(loaded))
    now, actions = handle(now, ev.SlotCreated(kinds(actions, ev.CreateSlot)[0].name.slot))

    assert [fetch.shard for fetch in kinds(actions, ev.Fetch)] == [SHARD]


def test_parts_that_do_not_come_leave_nothing():
    now, actions = waiting(needs(FIRST))
    [fetch] = kinds(actions, ev.Fetch)
    now, actions = handle(now, ev.FetchFailed(fetch.name, SHARD.id, "out of reach"))

    assert ev.DropSlot(fetch.name) in actions
    assert now.used_bytes == 0
    assert kinds(actions, ev.Fetch) == [], "after a while"
    now, actions = handle(now, ev.Tick(60.0), now_s=60.0)
    assert [again.parts for again in kinds(actions, ev.Fetch)] == [{0}]


def test_without_room_for_the_parts_people_are_told():
    _, actions = waiting(needs(FIRST), budget_bytes=PART_BYTES - 1)

    assert kinds(actions, ev.Fetch) == []
    assert [emitted.event.kind for emitted in kinds(actions, ev.Emit)] == ["budget_exhausted"]


def test_a_free_slot_of_any_length_makes_room_for_parts():
    free = Slot(name=SlotName("s1", 1, SlotState.FREE), length_bytes=PART_BYTES)
    _, actions = waiting(needs(FIRST), slots=(free,), budget_bytes=PART_BYTES)

    assert ev.DropSlot(free.name) in actions
    assert len(kinds(actions, ev.Fetch)) == 1


def test_a_whole_copy_that_is_here_serves_ranges_too():
    name = SlotName("s1", 1, SlotState.SEALED)
    held = Slot(name=name, length_bytes=LENGTH, content=content())
    now, actions = waiting(needs(FIRST), slots=(held,))

    assert kinds(actions, ev.Fetch) == []
    now, _ = handle(now, ev.SlotVerified(name, intact=True, decision=1))
    assert ready(now)
    now, _ = handle(now, told(stage=DecisionState.CONFIRMED))
    [shown] = session_view(now, now.sessions[session().id]).restore.segments
    assert shown.ranges == ()


def test_what_nobody_waits_for_is_not_fetched_where_ranks_name_what_they_need():
    now, _ = waiting(needs(FIRST))
    now, _ = handle(now, ev.SessionEnded(session().id))
    now, actions = handle(replace(now, fetches={}, slots={}), told(number=1))

    assert kinds(actions, ev.Fetch) == []
    assert kinds(actions, ev.CreateSlot) == []


def test_the_giver_is_asked_where_it_is_now():
    _, actions = waiting(needs(FIRST))

    assert [fetch.sources for fetch in kinds(actions, ev.Fetch)] == [(B,)]


def test_who_names_something_else_reads_no_more():
    """Parts that did not suffice would take the room of the whole segment that follows."""
    now, _ = fetched(*waiting(needs(FIRST)))
    now, _ = handle(now, told(stage=DecisionState.CONFIRMED))
    [slot] = partials(now)
    more = needs(FIRST, number=2, whole=True)
    now, actions = handle(now, ev.Updated(session_update(session=session().id, needs=more)))

    assert ev.DropSlot(slot.name) in actions
    assert not partials(now)


def test_what_a_process_of_an_attempt_before_reads_is_fetched_again():
    """It may be stopped and never end: the next attempt would wait for parts of its own for ever.

    And nothing is loaded that was hashed for a decision of another attempt (P3).
    """
    now, _ = fetched(*waiting(needs(FIRST)))
    now, _ = handle(now, told(stage=DecisionState.CONFIRMED))
    [old] = partials(now)
    newer = replace(session(rank=1), seat=replace(session().seat, generation=2))
    chosen = replace(decision(), generation=2)
    run = replace(run_view(decision=chosen), generation=2, attempt=2)
    want = Want(shard=SHARD, sources=(Memory("b"),), reason=WantReason.RESTORE)
    now, _ = handle(now, ev.SessionOpened(newer))
    now, _ = handle(now, view(run, (want,), version="2"))
    update = session_update(session=newer.id, needs=needs(FIRST))
    now, actions = handle(now, ev.Updated(update))

    assert not now.sessions[newer.id].ready_decision
    assert [fetch.parts for fetch in kinds(actions, ev.Fetch)] == [{0}]
    assert old.name.slot in now.slots, "it is read"
    now, _ = fetched(now, actions)
    assert ready(now, rank=1)


def test_what_a_rank_said_of_another_checkpoint_says_nothing_of_this_one():
    other = replace(needs(whole=True), checkpoint=replace(KEY, step=4))
    _, actions = waiting(other)

    assert kinds(actions, ev.CreateSlot) == []


@pytest.mark.parametrize("ranges", [(LAST,), (FIRST, LAST), ()], ids=["other", "more", "all"])
def test_parts_that_another_rank_reads_do_not_make_one_ready_that_needs_others(ranges):
    """They stay while they are read, beside those that come (P3)."""
    now, _ = fetched(*waiting(needs(FIRST), None))
    now, _ = handle(now, told(stage=DecisionState.CONFIRMED))
    [read] = partials(now)
    update = session_update(session=session(1).id, needs=needs(*ranges))
    now, _ = handle(now, ev.Updated(update))

    assert read.name.slot in now.slots
    assert not ready(now, rank=1)
    assert session_view(now, now.sessions[session(1).id]).restore.segments == ()


def test_all_of_it_is_fetched_for_a_rank_that_names_nothing():
    """Its state is not its own, as that of the others is."""
    now, _ = handle(replace(state(), budget_bytes=BUDGET), ev.SessionOpened(session()))
    now, _ = handle(now, ev.Updated(session_update(session=session().id, needs=needs(FIRST))))
    shared = session(1)
    shared = replace(shared, spec=replace(shared.spec, names_needs=False))
    now, _ = handle(now, ev.SessionOpened(shared))
    now, actions = handle(now, told())

    assert kinds(actions, ev.Fetch) == []
    assert len(kinds(actions, ev.CreateSlot)) == 1


def test_parts_count_as_verified_for_the_decision_they_came_for():
    now, actions = waiting(needs(FIRST))
    now, _ = handle(now, told(number=2))
    now, _ = fetched(now, actions)

    assert now.sessions[session().id].ready_decision == 2


def test_as_many_spare_copies_go_as_parts_need_room():
    held = [
        replace(
            Slot(name=SlotName(f"s{n}", 1, SlotState.SEALED), length_bytes=PART_BYTES),
            content=replace(content(), shard=replace(SHARD, id=replace(SHARD.id, step=n))),
        )
        for n in (1, 2, 3)
    ]
    spares = tuple(slot.content.shard.id for slot in held)
    now = replace(state(*held), budget_bytes=3 * PART_BYTES)
    now, _ = handle(now, ev.SessionOpened(session()))
    across = needs(ByteRange(begin=0, end=PART_BYTES + 1))
    now, _ = handle(now, ev.Updated(session_update(session=session().id, needs=across)))
    arrived = told()
    now, actions = handle(now, replace(arrived, view=replace(arrived.view, spares=spares)))

    assert len(kinds(actions, ev.DropSlot)) == 2
    assert [fetch.parts for fetch in kinds(actions, ev.Fetch)] == [{0, 1}]
    assert now.used_bytes == 3 * PART_BYTES
