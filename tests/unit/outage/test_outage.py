"""Saves while nobody commits: what stays, what gives way, what is committed afterwards (4.7)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.outage.cluster import RUN, Cluster, replaced

from holdfast.core.decision import Decision, DecisionState, Start
from holdfast.core.ids import CheckpointId, Generation, Step
from holdfast.core.persistence_rules import PersistRule
from holdfast.core.slot_names import SlotState
from holdfast_services.agent.domain import Slot, session_view, slot_rules
from holdfast_services.agent.domain import events as ev


@pytest.mark.parametrize(("saves", "replicas"), [(1, 0), (10, 0), (1, 1), (10, 1), (1000, 1)])
def test_an_outage_of_many_saves_keeps_the_committed_step_and_the_newest(saves, replicas):
    """P5, X0; interleaving 3: every save finds a slot, the newest is committed afterwards."""
    cluster = Cluster("a", "b", replicas=replicas)
    cluster.commit(8)
    last = 8 + saves
    for step in range(9, last + 1):
        cluster.report(heard=False)
        assert [node.save(step) for node in cluster.nodes.values()] == [True, True]
        assert all(node.steps() == {8, step} for node in cluster.nodes.values())
    if replicas:
        assert all(len(node.held()) == 4 for node in cluster.nodes.values()), "copies went along"

    for _ in range(3):
        cluster.report()

    assert cluster.kept == last
    assert cluster.committed() == {8, last}
    assert all(node.steps() == {last} for node in cluster.nodes.values())


def test_the_last_save_of_a_run_is_committed_after_its_trainers_have_ended():
    """X0: metadata comes back when nobody trains any more."""
    cluster = Cluster("a", "b")
    cluster.commit(8)
    for step in (9, 10):
        cluster.report(heard=False)
        assert all(node.save(step) for node in cluster.nodes.values())
    for node in cluster.nodes.values():
        node.feed(ev.SessionEnded(node.session))

    cluster.report()

    assert 10 in cluster.committed()


def test_a_node_lost_during_an_outage_costs_no_save_that_its_neighbour_has():
    """P5: copies go on between agents; the newest step is whole without the lost node."""
    cluster = Cluster("a", "b", replicas=1)
    cluster.commit(8)
    for step in range(9, 20):
        cluster.report(heard=False)
        assert all(node.save(step) for node in cluster.nodes.values())
    cluster.lose("b")
    cluster.now_s += 60.0
    cluster.launch(b"second")

    assert cluster.run.decision.checkpoint.step == 19


def test_a_step_that_one_agent_knows_as_committed_lets_no_older_one_go():
    """4.7: a reported 9 and never heard that it is committed, so it may give 9 up for 10."""
    cluster = Cluster("a", "b")
    cluster.commit(8)
    assert all(node.save(9) for node in cluster.nodes.values())
    cluster.report("a", answered=False)
    cluster.report("b", "b")
    assert 9 in cluster.committed()
    assert cluster.kept == 8, "a has not said that it knows"
    assert cluster.nodes["a"].save(10)
    assert replaced(cluster, "a", 9)
    assert cluster.nodes["b"].steps() == {8, 9}

    cluster.report("b", heard=False)
    assert cluster.nodes["b"].save(10), "in what is left of the budget"
    assert cluster.nodes["b"].steps() == {8, 9, 10}
    for _ in range(3):
        cluster.report()

    assert cluster.kept == 10
    assert all(node.steps() == {10} for node in cluster.nodes.values())


def test_copies_go_along_though_metadata_went_before_it_heard_who_knows_of_a_commit():
    """P5; 4.5: backups refused a third step, so a node that was lost took all since 9 with it."""
    cluster = Cluster("a", "b", replicas=1, spare=2)
    cluster.commit(8)
    assert all(node.save(9) for node in cluster.nodes.values())
    cluster.report("a", "b", "a")
    assert cluster.kept == 8, "nobody has said that it knows of 9"
    for step in (10, 11, 12):
        cluster.report(heard=False)
        assert all(node.save(step) for node in cluster.nodes.values())
        steps = [{int(key.step) for key in node.held()} for node in cluster.nodes.values()]
        assert steps == [{8, 9, step}] * 2
        assert all(len(node.held()) == 6 for node in cluster.nodes.values()), "both ranks' steps"

    cluster.lose("b")
    cluster.now_s += 60.0
    cluster.launch(b"second")

    assert cluster.run.decision.checkpoint.step == 12


def test_a_copy_takes_no_room_that_a_rank_here_goes_on_with_in_such_an_outage():
    """P5: with memory for one slot more each rank saves into it; a copy would leave 10 in parts."""
    cluster = Cluster("a", "b", replicas=1, spare=1)
    cluster.commit(8)
    assert all(node.save(9) for node in cluster.nodes.values())
    cluster.report("a", "b", "a")
    for step in (10, 11):
        cluster.report(heard=False)
        assert [node.save(step) for node in cluster.nodes.values()] == [True, True]

    cluster.launch(b"second")

    assert cluster.run.decision.checkpoint.step == 11


def test_what_an_outage_has_left_in_parts_makes_room_for_the_restore_after_it():
    """P8: 9 was committed, b had replaced its part, and it took the room of 12 for ever."""
    cluster = Cluster("a", "b", "c", spare=2)
    cluster.commit(8)
    assert all(node.save(9) for node in cluster.nodes.values())
    cluster.report("a", "b", "c", "a")
    cluster.report("b", heard=False)
    for step in (10, 11, 12):
        cluster.report(heard=False)
        assert all(node.save(step) for node in cluster.nodes.values())
    assert [node.steps() for node in cluster.nodes.values()] == [{8, 9, 12}, {8, 12}, {8, 9, 12}]

    cluster.launch(b"second")
    for _ in range(2):
        cluster.report()

    assert (cluster.run.decision.state, cluster.run.parent.step) == (DecisionState.CONFIRMED, 12)


@pytest.mark.parametrize(("nodes", "replicas"), [("ab", 0), ("ab", 1), ("abc", 1), ("abc", 2)])
def test_a_step_replaced_as_it_was_committed_stops_no_later_save(nodes, replicas):
    """P4, P5: only the answer to a was lost, so the others have no outage to save through.

    They hold 9, of which a has given its part up, beside 8: with just the memory that the job
    needs they had no slot for any later step.
    """
    cluster = Cluster(*nodes, replicas=replicas, spare=0)
    cluster.commit(8)
    assert all(node.save(9) for node in cluster.nodes.values())
    cluster.report("a", answered=False)
    cluster.report(*nodes[1:], *nodes[1:])
    assert 9 in cluster.committed()
    assert cluster.nodes["a"].save(10)
    for name in nodes[1:]:
        assert not cluster.nodes[name].save(10)
        cluster.nodes[name].abandon(10)

    for step in (11, 12, 13):
        cluster.settle_down()
        assert {key.step for key in cluster.whole()} >= {cluster.kept}
        for node in cluster.nodes.values():
            if not node.save(step):
                node.abandon(step)
    cluster.settle_down()

    assert cluster.kept == 13


def test_a_copy_that_a_backup_has_replaced_is_brought_back_once_its_step_is_committed():
    """P4; ADR 0021: owners ask once, so 9 was never acknowledged, and nobody had a slot."""
    cluster = Cluster("a", "b", replicas=1, spare=0)
    cluster.commit(8)
    a, b = cluster.nodes.values()
    assert a.save(9)
    assert b.save(9)
    copy = next(s for s in b.state.slots.values() if s.content and s.content.owner == "a"
                and s.content.shard.id.step == 9)  # fmt: skip
    free = copy.name.to(SlotState.FREE)
    b.state.slots[copy.name.slot] = Slot(name=free, length_bytes=copy.length_bytes)

    cluster.settle_down()

    assert cluster.kept == 9


@pytest.fixture
def piled() -> Cluster:
    """Two committed steps beside 8, none acknowledged: b holds both, a has replaced 9 for 10.

    b has no room for the copy of a's 10 that would let all older ones go.
    """
    cluster = Cluster("a", "b", replicas=1, spare=1)
    cluster.commit(8)
    a, b = cluster.nodes.values()
    assert a.save(9)
    assert b.save(9)
    cluster.report("a", answered=False)
    cluster.report("b")
    cluster.report("b", heard=False)
    assert b.save(10), "in what is left of the budget"
    assert a.save(10)
    assert (a.steps(), b.steps()) == ({8, 10}, {8, 9, 10})
    return cluster


def test_committed_steps_that_piled_up_give_way_once_a_later_one_is_whole_for_good(piled):
    """P4; ADR 0021: 9 and 10 took all room for copies, so no step was acknowledged any more."""
    for _ in range(6):
        piled.report()

    assert piled.kept == 10
    assert [node.save(11) for node in piled.nodes.values()] == [True, True]


def test_no_committed_step_gives_way_for_one_that_a_holder_may_still_replace(piled):
    """P5: a has not heard that 10 is committed, and gives it up for 11: then 9 is the newest."""
    piled.report("b")
    piled.report("a", answered=False)
    piled.report("b")
    assert {9, 10} <= piled.committed()
    assert not piled.run.dropped(CheckpointId(RUN, Step(9), Generation(1)))
    assert piled.nodes["a"].save(11)

    assert max(int(key.step) for key in piled.whole()) == 9


def test_steps_that_wait_for_their_copies_stay_as_long_as_there_are_slots_for_them():
    """P5: with a third slot two may wait; if 9 went for 10, and 10 for 11, none would get there."""
    cluster = Cluster("a", "b", replicas=1, slots=3)
    cluster.commit(8)
    for node in cluster.nodes.values():
        node.others = {}
    for step in (9, 10):
        assert all(node.save(step) for node in cluster.nodes.values())
        for _ in range(3):
            cluster.report()

    assert cluster.kept == 8
    assert all(node.steps() == {8, 9, 10} for node in cluster.nodes.values())


def test_a_step_that_its_owner_has_replaced_gives_way_once_a_later_one_is_whole_for_good():
    """P4; ADR 0021: b held 9 beside 8, which nobody could acknowledge, and 11 found no room there

    for its copy: so 11 was not acknowledged either, and b had no slot for any later step.
    """
    cluster = Cluster("a", "b", replicas=1, slots=3, spare=0)
    cluster.commit(8)
    a, b = cluster.nodes.values()
    assert a.save(9)
    cluster.report("a", heard=False)
    assert b.save(9)
    assert b.save(10)
    cluster.report("b")
    assert 9 in cluster.committed()
    assert a.save(10)
    cluster.report("b", heard=False)
    assert b.save(11)
    assert a.save(11)
    assert replaced(cluster, "a", 9)

    cluster.settle_down(pauses_s=6.0)

    assert cluster.kept == 11
    assert all(node.save(12) for node in cluster.nodes.values())


def test_steps_that_wait_in_all_slots_of_their_ranks_get_their_copies_in_the_sum_of_p8():
    """P5, P8: 9 and 10 wait beside 8, and each is whole on both nodes or on its way there.

    With memory for copies of two steps only, a had no room for b's part of 10 for ever.
    """
    cluster = Cluster("a", "b", replicas=1, slots=3, spare=0)
    cluster.commit(8)
    assert all(node.save(9) for node in cluster.nodes.values())
    cluster.report("b", answered=False)
    assert all(cluster.nodes[name].save(10) for name in "ba")

    cluster.settle_down(pauses_s=6.0)

    assert cluster.kept == 10
    assert all(node.save(11) for node in cluster.nodes.values())


def test_the_slot_for_what_drains_is_for_no_step_that_waits_for_its_copies():
    """P5, P8: with 10 in it a had b's part of 9 and b had a's of 10, and no room for the others."""
    cluster = Cluster("a", "b", replicas=1, slots=3, spare=0, persist=PersistRule(steps=1))
    cluster.commit(8)
    assert all(node.save(9) for node in cluster.nodes.values())
    cluster.report("b", answered=False)

    assert not cluster.nodes["a"].save(10), "8 is kept, and 9 waits"
    cluster.settle_down(pauses_s=6.0)

    assert cluster.kept == 9
    assert all(node.save(11) for node in cluster.nodes.values())


@pytest.mark.parametrize("known", ["copied_at_s", "durable_at_s", "drain_at_s"])
def test_what_older_slots_went_for_or_lies_elsewhere_is_not_given_up_with_its_segments(known):
    """M5: a rank went on and no node holds its part of 9; only if 9 is in memory alone it goes."""
    cluster = Cluster("a", "b")
    cluster.commit(8)
    assert all(node.save(9) for node in cluster.nodes.values())
    cluster.report("a", answered=False)
    cluster.report("b", "b")
    assert cluster.nodes["a"].save(10)
    rows = (
        replace(row, **{known: 1.0}) if row.id.step == 9 else row for row in cluster.run.checkpoints
    )
    cluster.run = replace(cluster.run, checkpoints=tuple(rows))

    cluster.report("a")

    assert 9 not in {given_up.step for given_up in cluster.run.abandoned}


@pytest.mark.parametrize("reason", ["", "pinned", "named", "read", "older attempt"])
def test_only_what_nothing_else_needs_gives_way_in_an_outage(reason):
    """A5, M7: an uncommitted step that is pinned, named by a decision or read stays."""
    cluster = Cluster("a", "b", spare=0)
    cluster.commit(8)
    node = cluster.nodes["a"]
    assert node.save(9)
    cluster.report(heard=False)
    slot = next(s for s in node.state.slots.values() if s.content and s.content.shard.id.step == 9)
    shard = slot.content.shard
    session = node.state.sessions[node.session]
    view = node.state.view.runs[0]
    proposed = Decision(
        number=9, state=DecisionState.PROPOSED, generation=2, checkpoint=shard.id.checkpoint
    )
    changed = {
        "pinned": replace(view, pinned=(shard.id.checkpoint,)),
        "named": replace(view, decision=proposed),
        "older attempt": replace(view, generation=view.generation + 1),
    }.get(reason, view)
    node.state.view = replace(node.state.view, runs=(changed,))
    reading = frozenset({shard.id} if reason == "read" else ())
    node.state.sessions[session.id] = replace(session, reading=reading)

    assert slot_rules.replaceable(node.state, slot) is (reason == "")


def test_while_metadata_answers_an_uncommitted_step_waits_for_the_slowest():
    """G28: replacing it would leave a slow rank for ever behind; a step is passed instead."""
    cluster = Cluster("a", "b")
    cluster.commit(8)
    fast, slow = cluster.nodes.values()
    assert fast.save(9)
    cluster.report("a", "b")
    assert not fast.save(10)
    assert fast.steps() == {8, 9}

    assert slow.save(9)
    for _ in range(3):
        cluster.report()

    assert cluster.kept == 9
    assert all(node.save(11) for node in cluster.nodes.values())


def test_a_wish_takes_one_slot_and_no_more():
    """The step just saved stays although news of its slot is still on the way."""
    cluster = Cluster("a", "b")
    cluster.commit(8)
    node = cluster.nodes["a"]
    for step in (9, 10):
        cluster.report(heard=False)
        assert node.save(step)
    node.tell(10, wants_slot=10)
    node.tell(10, wants_slot=10)

    assert node.steps() == {8, 10}


def test_with_a_third_slot_the_newest_uncommitted_step_stays_while_the_next_is_written():
    """A job that persists has room for it: the oldest uncommitted step gives way."""
    cluster = Cluster("a", "b", slots=3)
    cluster.commit(8)
    cluster.report(heard=False)
    for step in (9, 10, 11):
        assert all(node.save(step) for node in cluster.nodes.values())

    assert all(node.steps() == {8, 10, 11} for node in cluster.nodes.values())


def test_a_replaced_step_is_said_to_its_rank_and_once_to_people():
    """Its handle ends with the reason; the outage's end says how many there were."""
    cluster = Cluster("a", "b")
    cluster.commit(8)
    node = cluster.nodes["a"]
    for step in (9, 10, 11):
        cluster.report(heard=False)
        assert node.save(step)
    levels = {s.step: s for s in session_view(node.state, node.state.sessions[node.session]).steps}
    assert {step for step, level in levels.items() if level.abandoned} == {9, 10}
    assert "replaced by a later save" in levels[9].reason

    cluster.report("a")
    assert node.said.count("metadata_back") == 1
    assert node.state.replaced_count == 0


def test_an_old_view_that_arrives_late_takes_back_no_acknowledgement():
    """4.7: what was said to be kept is kept, in whatever order views arrive."""
    cluster = Cluster("a", "b")
    cluster.commit(8)
    node = cluster.nodes["a"]
    old = cluster.view("a")
    assert all(node.save(9) for node in cluster.nodes.values())
    for _ in range(2):
        cluster.report()
    node.feed(ev.ViewArrived(old))
    cluster.report("a", heard=False)
    node.save(10)

    assert 9 in node.steps()
    assert node.state.seen[RUN].step == 9


def test_an_old_view_that_arrives_late_frees_nothing_that_was_restored_since():
    """4.7, M3: views come by report and by watch; the answer of before the restore kept from 8."""
    cluster = Cluster("a", "b")
    cluster.commit(7)
    assert all(node.save(8) for node in cluster.nodes.values())
    cluster.report()
    cluster.report()
    cluster.report(answered=False)
    assert cluster.kept == 8
    old = cluster.view("a")
    cluster.launch(b"second", Start(name="back", step=7))
    assert cluster.kept == 7

    cluster.nodes["a"].feed(ev.ViewArrived(old))

    assert 7 in cluster.nodes["a"].steps()
    assert {key.step for key in cluster.whole()} == {7}
