"""The residency machine, decision by decision: state and event in, state and actions out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.said import agent_session, changed_session, tcp

from holdfast.core.abandoned_step import AbandonedStep
from holdfast.core.announcements import Announcement, SaveReason
from holdfast.core.budget import Reservation
from holdfast.core.decision import Decision, DecisionState
from holdfast.core.ids import CheckpointId, ShardId
from holdfast.core.inventory import HeldState, Peer
from holdfast.core.node_view import Committed, NodeView, RunView, SupersedeRule, Want, WantReason
from holdfast.core.protection import Copies
from holdfast.core.shard import Shard
from holdfast.core.slot_names import SlotName, SlotState
from holdfast.core.sources import Memory
from holdfast.errors import ExhaustedError, InvalidRequestError, PreconditionError
from holdfast_services.agent.domain import (
    Content,
    Slot,
    State,
    Work,
    admit,
    handle,
    inventory,
    making_room,
    session_view,
    slot_rules,
)
from holdfast_services.agent.domain import events as ev

ME = Peer(node="a", rpc_address="a:1", endpoints=tcp("a:2"))
B = Peer(node="b", rpc_address="b:1", endpoints=tcp("b:2"))
C = Peer(node="c", rpc_address="c:1", endpoints=tcp("c:2"))
KIB = 1024


def shard(step, generation=1, rank=0):
    return Shard(
        id=ShardId("r1", step, generation, rank),
        job="job",
        world_size=1,
        plan_hash="p",
        length_bytes=KIB,
        root_digest=b"d" * 16,
    )


def sealed(name, step, generation=1, *, owner="a", held=HeldState.SEALED):
    content = Content(shard=shard(step, generation), owner=owner, digests=b"", held=held)
    return Slot(name=SlotName(name, 1, SlotState.SEALED), length_bytes=KIB, content=content)


def state(*slots, **fields):
    made = State(me=ME, budget_bytes=16 * KIB, **fields)
    made.slots = {slot.name.slot: slot for slot in slots}
    made.next_slot = len(slots) + 1
    return made


def run_view(**fields):
    return RunView(run="r1", job="job", generation=1, world_size=1, **fields)


def view(run=None, wants=(), version="1", nodes=(ME, B, C)):
    return ev.ViewArrived(
        NodeView(version=version, nodes=nodes, runs=(run,) if run else (), wants=wants)
    )


def session(generation=1, **fields):
    name = f"{generation:032x}"
    return agent_session(
        id=name, job="job", run="r1", generation=generation, rank=0, world_size=1, **fields
    )


def kinds(actions, kind):
    return [action for action in actions if isinstance(action, kind)]


def freed(actions):
    return {a.old.slot for a in kinds(actions, ev.RenameSlot) if a.new.state is SlotState.FREE}


def test_nothing_is_freed_before_the_catalogue_has_spoken():
    _, actions = handle(state(sealed("s1", 1), sealed("s2", 2)), ev.Tick(1.0))
    assert set() == freed(actions)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"free_before": CheckpointId("r1", 2, 1)}, {"s1"}),
        ({"superseded": (SupersedeRule(after_step=1, below_generation=2),)}, {"s2", "s3"}),
        ({"abandoned": (AbandonedStep(run="r1", step=3, generation=1),)}, {"s3"}),
        (
            {"free_before": CheckpointId("r1", 3, 1), "pinned": (CheckpointId("r1", 1, 1),)},
            {"s2"},
        ),
        (
            {
                "free_before": CheckpointId("r1", 3, 1),
                "decision": Decision(
                    number=1,
                    state=DecisionState.PROPOSED,
                    generation=1,
                    checkpoint=CheckpointId("r1", 2, 1),
                ),
            },
            {"s1"},
        ),
    ],
    ids=["older", "superseded", "abandoned", "pinned", "named"],
)
def test_slots_are_freed_by_the_rule_of_4_7_and_nothing_else(fields, expected):
    """F44: pinned never, named by an open decision never."""
    held = state(sealed("s1", 1), sealed("s2", 2), sealed("s3", 3))
    _, actions = handle(held, view(run_view(**fields)))
    assert expected == freed(actions)


def test_an_older_view_that_comes_late_frees_nothing():
    """A5: reports and watches are answered side by side; what was pinned since stays."""
    held = state(sealed("s1", 1), sealed("s2", 2))
    pinned = view(
        run_view(free_before=CheckpointId("r1", 2, 1), pinned=(CheckpointId("r1", 1, 1),))
    ).view
    now, _ = handle(held, ev.ViewArrived(replace(pinned, taken_sequence=2)))

    older = view(run_view(free_before=CheckpointId("r1", 2, 1))).view
    late, actions = handle(now, ev.ViewArrived(replace(older, taken_sequence=1)))
    assert (late.view, freed(actions)) == (now.view, set())

    _, actions = handle(now, ev.ViewArrived(replace(older, taken_sequence=3)))
    assert {"s1"} == freed(actions)


def test_a_newer_attempt_fences_the_older_at_once():
    """G12: by the catalogue's word or by a session that opened here."""
    now, _ = handle(state(), ev.SessionOpened(session(1)))
    by_session, _ = handle(now, ev.SessionOpened(session(2)))
    by_view, _ = handle(now, view(replace(run_view(), generation=5)))
    assert by_session.sessions[session(1).id].fenced
    assert not by_session.sessions[session(2).id].fenced
    assert by_view.sessions[session(1).id].fenced


def test_a_rank_learns_that_the_catalogue_has_lost_the_attempt_it_trains_in():
    """P6: from a catalogue that answers; one that has just come to be restored is not told yet."""
    told = {}
    for loaded in (False, True):
        now, _ = handle(state(), ev.SessionOpened(session(2, loaded=loaded)))
        gone, _ = handle(now, view())
        older, _ = handle(now, view(run_view(attempt=1)))
        known, _ = handle(now, view(run_view(attempt=2, seats=(0,))))
        mates, _ = handle(now, view(run_view(attempt=2, seats=(1,))))
        out, _ = handle(gone, ev.MetadataLost("no answer"))
        told[loaded] = [
            session_view(one, one.sessions[f"{2:032x}"]).forgotten
            for one in (now, gone, older, known, mates, out)
        ]

    assert told == {
        False: [False, False, False, False, False, False],
        True: [False, True, True, False, True, False],
    }


@pytest.mark.parametrize(("nonce", "told"), [(b"old", False), (b"new", True), (b"", True)])
def test_the_decision_of_a_forgotten_attempt_is_not_that_of_its_namesake(nonce, told):
    """M1, P2; defect A1: the last view of a lost catalogue, a rank of a new attempt with the same
    number. b"": a metadata service from before the field."""
    fresh = Decision(number=1, state=DecisionState.CONFIRMED, generation=1, fresh=True)
    now, _ = handle(state(), view(run_view(attempt=1, nonce=nonce, decision=fresh)))

    now, _ = handle(now, ev.SessionOpened(session(nonce=b"new")))

    shown = session_view(now, now.sessions[session().id])
    assert (shown.restore is not None) is told


@pytest.mark.parametrize(("nonce", "expected"), [(b"mine", set()), (b"other", {"s1"})])
def test_what_was_confirmed_is_kept_for_the_attempt_that_loads_it(nonce, expected):
    """4.7; defect A1: not for its namesake."""
    chosen = Decision(
        number=1,
        state=DecisionState.CONFIRMED,
        generation=1,
        checkpoint=CheckpointId("r1", 1, 1),
    )
    now, _ = handle(state(sealed("s1", 1)), ev.SessionOpened(session(nonce=b"mine")))

    keep = CheckpointId("r1", 3, 1)
    _, actions = handle(now, view(run_view(nonce=nonce, free_before=keep, decision=chosen)))

    assert expected == freed(actions)


def test_a_rank_learns_that_another_attempt_has_its_number():
    """P2: else both would commit under it."""
    now, _ = handle(state(), ev.SessionOpened(session(nonce=b"first", loaded=True)))

    mine, _ = handle(now, view(run_view(attempt=1, nonce=b"first", seats=(0,))))
    other, _ = handle(now, view(run_view(attempt=1, nonce=b"second")))

    assert not session_view(mine, mine.sessions[session().id]).forgotten
    assert session_view(other, other.sessions[session().id]).forgotten


def test_own_shards_go_to_the_next_nodes_of_the_ring_newest_first():
    held = state(sealed("s1", 1), sealed("s2", 2), sealed("s3", 3, owner="c"))
    _, actions = handle(held, view(run_view(ring=("c", "a", "b"), copies=Copies(1))))
    asked = [(a.shard.id.step, a.peer.node) for a in kinds(actions, ev.AskHold)]
    assert [(2, "b"), (1, "b")] == asked


def test_a_failed_copy_is_tried_again_later_and_a_final_refusal_never():
    """F57."""
    held, _ = handle(state(sealed("s1", 1)), view(run_view(ring=("a", "b"), copies=Copies(1))))
    key = shard(1).id
    later, actions = handle(held, ev.HoldAnswered(key, B, "unavailable", "no"))
    assert [] == kinds(actions, ev.AskHold)
    _, actions = handle(later, ev.Tick(10.0))
    assert 1 == len(kinds(actions, ev.AskHold))
    final, _ = handle(held, ev.HoldAnswered(key, B, "precondition", "not wanted"))
    _, actions = handle(final, ev.Tick(1000.0))
    assert [] == kinds(actions, ev.AskHold)


def test_a_backup_that_came_back_elsewhere_is_asked_again():
    """F55: the predecessor replicates again."""
    run = run_view(ring=("a", "b"), copies=Copies(1))
    held, _ = handle(state(sealed("s1", 1)), view(run))
    held, _ = handle(held, ev.HoldAnswered(shard(1).id, B))
    moved = replace(B, endpoints=tcp("b:9"))
    _, actions = handle(held, view(run, nodes=(ME, moved), version="2"))
    assert [moved] == [a.peer for a in kinds(actions, ev.AskHold)]


def test_restores_are_fetched_before_repairs():
    free = [Slot(name=SlotName(f"s{i}", 0, SlotState.FREE), length_bytes=KIB) for i in range(1, 7)]
    wants = tuple(
        Want(shard=shard(step), sources=(Memory("b"),), reason=reason)
        for step, reason in [(i, WantReason.REPAIR) for i in range(1, 5)]
        + [(9, WantReason.RESTORE)]
    )
    _, actions = handle(state(*free), view(run_view(), wants))
    fetched = [a.shard.id.step for a in kinds(actions, ev.Fetch)]
    assert 9 == fetched[0]
    assert 4 == len(fetched), "bounded"


def test_a_source_that_served_bad_bytes_is_asked_last():
    free = [Slot(name=SlotName(f"s{i}", 0, SlotState.FREE), length_bytes=KIB) for i in (1, 2)]
    wants = (Want(shard=shard(9), sources=(Memory("b"), Memory("c")), reason=WantReason.RESTORE),)
    held, actions = handle(state(*free), view(run_view(), wants))
    name = kinds(actions, ev.Fetch)[0].name
    held, _ = handle(held, ev.FetchFailed(name, shard(9).id, "bad", (Memory("b"),)))
    _, actions = handle(held, ev.Tick(10.0))
    assert [C, B] == list(kinds(actions, ev.Fetch)[0].sources)


def test_free_slots_of_a_length_nobody_needs_make_room():
    big = Slot(name=SlotName("s1", 3, SlotState.FREE), length_bytes=16 * KIB)
    wants = (Want(shard=shard(9), sources=(Memory("b"),), reason=WantReason.RESTORE),)
    _, actions = handle(state(big), view(run_view(), wants))
    assert [big.name] == [a.name for a in kinds(actions, ev.DropSlot)]
    assert [KIB] == [a.length_bytes for a in kinds(actions, ev.CreateSlot)]


def proposal(number=1, stage=DecisionState.PROPOSED):
    return Decision(
        number=number,
        state=stage,
        generation=1,
        checkpoint=CheckpointId("r1", 5, 1),
        shards=(shard(5),),
        shards_count=1,
    )


def test_held_shards_are_hashed_once_per_decision_number_before_the_rank_is_ready():
    """P3, 4.8."""
    now, _ = handle(state(sealed("s1", 5)), ev.SessionOpened(session()))
    now, actions = handle(now, view(run_view(decision=proposal())))
    assert [1] == [a.decision for a in kinds(actions, ev.VerifySlot)]
    assert 0 == now.sessions[session().id].ready_decision
    now, actions = handle(now, ev.SlotVerified(sealed("s1", 5).name, intact=True, decision=1))
    assert 1 == now.sessions[session().id].ready_decision
    assert [] == kinds(actions, ev.VerifySlot)
    now, actions = handle(now, view(run_view(decision=proposal(2)), version="2"))
    assert [2] == [a.decision for a in kinds(actions, ev.VerifySlot)]
    assert 0 == now.sessions[session().id].ready_decision


def test_segments_are_shown_only_once_confirmed_with_the_times_it_took():
    now, _ = handle(state(sealed("s1", 5)), ev.SessionOpened(session()), now_s=10.0)
    now, _ = handle(now, view(run_view(decision=proposal())), now_s=12.0)
    verified = ev.SlotVerified(sealed("s1", 5).name, intact=True, decision=1)
    now, _ = handle(now, verified, now_s=15.0)
    shown = session_view(now, now.sessions[session().id]).restore
    assert (True, ()) == (shown.ready, shown.segments)
    confirmed = proposal(stage=DecisionState.CONFIRMED)
    now, _ = handle(now, view(run_view(decision=confirmed), version="2"))
    shown = session_view(now, now.sessions[session().id]).restore
    assert ["s1.1.seg"] == [s.file_name for s in shown.segments]
    assert (2.0, 3.0) == (shown.decide_s, shown.fetch_s)


def test_levels_and_announced_steps_come_from_the_catalogue():
    now, _ = handle(state(), ev.SessionOpened(session()))
    run = run_view(
        announcement=Announcement(step=12, reason=SaveReason.USER),
        committed=(Committed(checkpoint=CheckpointId("r1", 7, 1), replicated=True),),
        abandoned=(AbandonedStep(run="r1", step=6, generation=1, reason="late"),),
        shortage="one node is missing",
    )
    now, _ = handle(now, view(run))
    shown = session_view(now, now.sessions[session().id])
    assert (12, "one node is missing") == (shown.announcement.step, shown.shortage)
    assert [(7, True, False), (6, False, True)] == [
        (s.step, s.replicated, s.abandoned) for s in shown.steps
    ]
    assert "late" == shown.steps[1].reason


def asked(length=KIB, slots=2, checkpoint=0):
    return Reservation(plan_hash="p", length_bytes=length, slots=slots, restored_bytes=checkpoint)


def test_the_first_rank_is_refused_and_not_the_last():
    """P8: local ranks that have not reserved yet count as like this one."""
    with pytest.raises(ExhaustedError, match=r"2 slots x 12 KiB own = 24 KiB"):
        admit(state(), session(local_world_size=4), asked(3 * KIB))
    admit(state(), session(local_world_size=1), asked(3 * KIB))


def test_other_runs_count_in_the_sum():
    now = state()
    other = agent_session(id="f" * 32, job="else", run="r2", reservation=asked(6 * KIB))
    now.sessions[other.id] = other
    with pytest.raises(ExhaustedError, match="beside 12 KiB of other runs"):
        admit(now, session(), asked(3 * KIB))


def left_by(name, job):
    """A sealed slot of a job that has ended."""
    slot = sealed(name, 1)
    made = replace(slot.content.shard, id=ShardId(job, 1, 1, 0), job=job)
    return replace(slot, length_bytes=4 * KIB, content=replace(slot.content, shard=made))


def test_what_ended_jobs_have_left_counts_and_is_named():
    """P8; defect B5: else training would begin and save nothing."""
    now = state(left_by("s1", "sweep/1"), left_by("s2", "sweep/2"), left_by("s3", "sweep/2"))

    with pytest.raises(ExhaustedError, match=r"sweep/2: 8 KiB, sweep/1: 4 KiB\).*holdfast rm JOB"):
        admit(now, session(), asked(3 * KIB))
    admit(now, session(), asked(2 * KIB))


def test_what_may_be_freed_and_what_the_job_itself_has_left_does_not_count():
    """P8: a restart is not refused for its own checkpoints, nor for what goes anyway."""
    gone = RunView(run="r2", job="r2", generation=2, world_size=1)
    gone = replace(gone, superseded=(SupersedeRule(after_step=0, below_generation=2),))
    now, _ = handle(state(left_by("s1", "job"), left_by("s2", "job")), view(gone, nodes=(ME,)))
    now.slots["s3"] = left_by("s3", "r2")

    admit(now, session(), asked(8 * KIB))


@pytest.mark.parametrize(("length", "slots"), [(0, 2), (-1, 2), (KIB, 0), (KIB, 17)])
def test_a_reservation_without_sense_is_refused(length, slots):
    with pytest.raises(InvalidRequestError):
        admit(state(), session(), asked(length, slots))


def test_a_copy_that_nobody_wants_is_refused():
    now, _ = handle(state(), view(run_view(free_before=CheckpointId("r1", 5, 1))))
    with pytest.raises(PreconditionError):
        making_room.check_holdable(now, shard(4))
    making_room.check_holdable(now, shard(5))


def writing(name, *, plan="p", length=KIB):
    made = Slot(name=SlotName(name, 1, SlotState.WRITING), length_bytes=length)
    return replace(made, session=session().id, plan_hash=plan)


def reserved(generation=1, plan="p"):
    asked = Reservation(plan_hash=plan, length_bytes=KIB, slots=2, restored_bytes=KIB)
    return session(generation, reservation=asked)


def test_slots_of_an_older_plan_are_taken_back_though_they_are_as_long():
    """And as often as needed: the trainer may still hold one, mapping it or writing it."""
    before = state(writing("s1"), writing("s2", plan="q"))
    before.sessions = {session().id: reserved(plan="q")}
    after, actions = handle(before, ev.Tick(1.0))

    assert [(a.name.slot, a.replace) for a in kinds(actions, ev.ReclaimSlot)] == [("s1", False)]
    leases = session_view(after, after.sessions[session().id]).leases
    assert ["s2"] == [item.slot for item in leases]

    after, actions = handle(after, ev.WorkBlocked(SlotName("s1", 1, SlotState.WRITING)))
    assert [] == kinds(actions, ev.ReclaimSlot)
    _, actions = handle(after, ev.Tick(2.0))
    assert ["s1"] == [a.name.slot for a in kinds(actions, ev.ReclaimSlot)]


def test_what_was_restored_counts_as_one_of_the_slots_whosever_rank_it_was():
    """P8: leased on top, no room would be left for the copies that let it go."""
    other_rank = replace(sealed("s1", 5).content, shard=shard(5, 1, rank=1), owner="b")
    held = replace(sealed("s1", 5), content=other_rank)
    before = state(held)
    before.sessions = {session(2).id: reserved(2)}
    kept = run_view(free_before=CheckpointId("r1", 5, 1))
    after, _ = handle(before, view(replace(kept, generation=2)))
    assert 1 == slot_rules.quota_left(before, before.sessions[session(2).id])

    newer = replace(kept, generation=2, free_before=CheckpointId("r1", 6, 2))
    after, actions = handle(after, view(newer, version="2"))

    assert {"s1"} == freed(actions)
    creating = [slot for slot in after.slots.values() if slot.work is Work.CREATING]
    open_slots = [slot for slot in after.slots.values() if slot.name.state is SlotState.WRITING]
    assert 2 == len(creating) + len(open_slots)


@pytest.mark.parametrize("slots", [2, 3])
def test_a_drain_that_does_not_end_leaves_a_slot_to_save_into(slots):
    """F88: the store is gone for hours; also without persist=, after a restart or a user's pin."""
    ten, twenty, thirty = (CheckpointId("r1", *key) for key in ((10, 1), (20, 1), (30, 2)))
    kept = replace(run_view(free_before=twenty, pinned=(ten,)), generation=2)
    asked = Reservation(plan_hash="p", length_bytes=KIB, slots=slots, restored_bytes=KIB)
    mine = session(2, reservation=asked)
    before = state(sealed("s1", 10), sealed("s2", 20))
    before.sessions = {mine.id: mine}
    after, _ = handle(before, view(kept))
    assert 1 == sum(slot.work is Work.CREATING for slot in after.slots.values())

    before = state(sealed("s1", 10), sealed("s2", 20), sealed("s3", 30, 2))
    before.sessions = {mine.id: mine}
    after, actions = handle(before, view(replace(kept, free_before=thirty)))

    assert {"s2"} == freed(actions)
    assert 1 == sum(slot.name.state is SlotState.WRITING for slot in after.slots.values())


def test_a_checkpoint_that_drains_and_is_the_newest_counts_as_a_slot():
    """P8: it is kept anyway; nothing is leased on top of it."""
    ten = CheckpointId("r1", 10, 1)
    before = state(sealed("s1", 10))
    before.sessions = {session().id: reserved(1)}
    after, _ = handle(before, view(run_view(free_before=ten, pinned=(ten,))))

    assert 1 == slot_rules.quota_left(after, after.sessions[session().id])


def test_a_registration_says_the_newest_generation_that_anything_here_is_of():
    """P6, M1; defect A1: a catalogue that was lost asks no inventory before it numbers."""
    assert 0 == slot_rules.generation_seen(state(), "job")
    held = state(sealed("s1", 5, 3), sealed("s2", 6, 2))
    held.sessions = {"x": session(4), "y": changed_session(session(9), job="another")}
    assert 4 == slot_rules.generation_seen(held, "job")

    held, _ = handle(held, view(replace(run_view(), generation=6)))

    assert (6, 9) == tuple(slot_rules.generation_seen(held, job) for job in ("job", "another"))


def test_ended_sessions_are_told_until_a_newer_attempt_is_known():
    """Defect C4: a node does not speak of dead trainers for ever; a stopped one is not dead."""
    now = state()
    for generation in (1, 2, 3):
        now, _ = handle(now, ev.SessionOpened(session(generation)))
    for generation in (1, 3):
        now, _ = handle(now, ev.SessionEnded(session(generation).id))
    assert [1, 2, 3] == sorted(one.generation for one in now.sessions.values())

    now, _ = handle(now, view(replace(run_view(), generation=3)))

    assert [2, 3] == sorted(one.generation for one in now.sessions.values())
    told = inventory(now, incarnation=1, sequence=1, leaving=False).ranks
    assert [2, 3] == sorted(status.generation for status in told)
