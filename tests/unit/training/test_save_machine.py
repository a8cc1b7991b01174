"""The save machine by tables: what happens, and what is told and done for it."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.core.announcements import Announcement, SaveReason
from holdfast.core.session import SessionView, SlotLease, StepLevels
from holdfast.core.slot_names import SlotName, SlotState
from holdfast.errors import (
    ExhaustedError,
    PreconditionError,
    StaleGenerationError,
    UnavailableError,
)
from holdfast.training.save_machine import events as ev
from holdfast.training.save_machine import rules
from holdfast.training.save_machine.rules import GATE_S_MAX, handle
from holdfast.training.save_machine.slot_wait import LOOK_S, RETURN_S_MAX, slot_wait_s
from holdfast.training.save_machine.state import BUSY_WAIT_S_MAX, Author, Claim, SaveState

NEW = SaveState(Author("j", "r", 3, 0))
READY = NEW._replace(reserved=1)
SLOT = SlotName("s1", 4, SlotState.CLOSED)
FULL = ExhaustedError("the arena is full")


def live(state: SaveState, *events: ev.SaveEvent, now_s: float = 100.0) -> tuple[SaveState, Any]:
    """Return the state after ``events``, and what was to be done after the last of them."""
    actions: list[ev.SaveAction] = []
    for event in events:
        state, actions = handle(state, event, now_s=now_s)
    return state, actions


def view(**fields: Any) -> ev.View:
    return ev.View(SessionView(version="1", **fields))


def copied(step: int) -> ev.View:
    return view(steps=(StepLevels(step=step, sealed=True, local=True, replicated=True),))


def typed(*actions):
    """Return the actions so that those of two kinds are never equal, as named tuples are."""
    return [(type(action), action) for action in actions]


def kinds(actions: list[ev.SaveAction]) -> list[str]:
    return [type(action).__name__ for action in actions]


def told(actions: list[ev.SaveAction], field: str) -> list[Any]:
    """Return what the agent is told in one field of its posts."""
    posts = [action for action in actions if isinstance(action, ev.Post)]
    return [getattr(post, field) for post in posts if getattr(post, field) is not None]


ENDING = Announcement(step=6, reason=SaveReason.PREEMPTION)
DUE, PREPARED, NO_SLOT = ev.Due(7), ev.Prepared(7, 1), ev.NoSlot(7)


@pytest.mark.parametrize(
    ("before", "event", "wanted"),
    [
        (READY, DUE, [ev.Post(saving=(7,)), ev.Prepare(7, GATE_S_MAX)]),
        (READY._replace(hanging=6), DUE, [ev.Post(saving=(7,)), ev.Prepare(7, 0.0)]),
        (READY, PREPARED, [ev.TakeSlot(7, 0.0)]),
        (NEW, PREPARED, [ev.Reserve(7, 1)]),
        (NEW, ev.Reserved(7, 1), [ev.TakeSlot(7, 0.0)]),
        (READY, ev.SlotReady(7), [ev.Begin(7, None, defer=True)]),
        (
            READY._replace(parent=(5, 2), wished=7),
            ev.SlotReady(7, eager=True),
            [ev.Post(wants_slot=0), ev.Begin(7, (5, 2), defer=False)],
        ),
        (READY, NO_SLOT, [ev.Post(wants_slot=7), ev.TakeSlot(7, BUSY_WAIT_S_MAX)]),
        (READY._replace(wished=7), NO_SLOT, [ev.KeepMoment(7)]),
        (READY._replace(patience_s=0.0), NO_SLOT, [ev.Post(wants_slot=7), ev.KeepMoment(7)]),
        (READY, ev.NoSlot(7, agent_lost=True), [ev.Post(wants_slot=7), ev.KeepMoment(7)]),
        (READY._replace(owed=7), NO_SLOT, []),
        (READY, ev.Copied(7), [ev.CloseSlot(7)]),
        (READY, ev.Closed(7, SLOT), [ev.Stage(7), ev.Post(closed_slot="s1")]),
        (READY._replace(owed=7), ev.Awaited(2.0), [ev.GoBack(7, 2.0)]),
        (READY._replace(owed=7, hanging=5), ev.Awaited(2.0), [ev.GoBack(7, 0.0)]),
        (READY._replace(owed=7, fenced=True), ev.Awaited(2.0), []),
        (READY, ev.Awaited(2.0), []),
        (READY, ev.WentBack(7, 1.5), [ev.TakeSlot(7, 1.5)]),
        (READY._replace(hanging=7), ev.CopyFailed(7, "it hung"), []),
        (READY._replace(copying=8), ev.CopyGivenUp(7, "it hung"), []),
        (READY, ev.Stepped(8), []),
        (READY._replace(answered=6), ev.HeardLate(8, ENDING, 6), []),
    ],
)  # fmt: skip
def test_what_is_to_be_done(before, event, wanted):
    assert typed(*wanted) == typed(*live(before, event)[1])


def test_a_save_is_told_as_begun_and_closed_and_waited_for_until_it_is_sealed():
    state, _ = live(READY, DUE, PREPARED, ev.SlotReady(7))
    assert (7, (Claim(7),)) == (state.copying, state.saving)

    state, _ = live(state, ev.Copied(7), ev.Closed(7, SLOT))
    assert (None, (Claim(7, SLOT),)) == (state.copying, state.saving)

    state, actions = live(state, copied(7))
    assert () == state.saving
    assert [()] == told(actions, "saving")


def test_slots_are_offered_after_all_that_a_view_says():
    """Whoever takes a slot knows by then what became of the step that lay in it."""
    lease = SlotLease(slot="s1", incarnation=5, length_bytes=1, plan_hash="p")
    busy, _ = live(READY, DUE)
    _, actions = live(
        busy, view(leases=(lease,), degraded="out", shortage="one node", steps=copied(7).view.steps)
    )

    assert typed(ev.Offer((lease,))) == typed(actions[-1])


@pytest.mark.parametrize(
    ("before", "event", "reason"),
    [
        (READY._replace(owed=6), DUE, f"no free slot: {rules.BEHIND}"),
        (READY._replace(owed=6), ev.Stepped(7), f"no free slot: {rules.BEHIND}"),
        (READY._replace(owed=6), ev.Stepped(7, agent_lost=True), f"no free slot: {rules.AWAY}"),
        (READY._replace(owed=6), ev.Awaited(1.0, changed=True), f"no free slot: {rules.BEHIND}"),
        (READY, ev.Stepped(7, ENDING), f"{rules.LATE} (a rank was told to end)"),
        (READY, ev.HeardLate(7, ENDING, 6), f"{rules.LATE} (a rank was told to end)"),
        (
            READY._replace(owed=6),
            ev.HeardLate(7 + rules.STEPS_LATE_MAX, ENDING, 6),
            f"{rules.LATE} (a rank was told to end){rules.LARGE}",
        ),
        (READY, ev.SlotsLost((6,)), rules.LOST),
        (READY._replace(copying=6), ev.CopyGivenUp(6, "it hung"), "it hung"),
        (READY._replace(copying=6), ev.CopyFailed(6, "boom"), "boom"),
        (READY._replace(owed=6), ev.Failed(6, "boom"), "boom"),
        (READY, ev.Refused(6, 2, FULL), str(FULL)),
        (READY._replace(fenced=True), ev.Due(6), "a newer attempt of this job trains"),
    ],
)
def test_a_step_is_given_up_for_all_ranks_its_handle_and_people(before, event, reason):
    claimed = before._replace(saving=(Claim(6),))
    after, actions = live(claimed, event)

    assert 6 not in after.steps_saving
    assert None is after.owed
    assert [(6, reason)] == [(a.step, a.reason) for a in told(actions, "abandoned")]
    assert [6] == [action.step for action in actions if isinstance(action, ev.Fail)]
    assert any(
        f"step 6 is not saved: {reason}" in a.text for a in actions if isinstance(a, ev.Warn)
    )
    assert (1, 2.0) == (after.lapse.lost_count, after.stretch)


def test_a_step_that_found_no_slot_is_given_up_for_what_the_agent_says():
    """4.4 of the failure model: others have filled the arena, and nothing commits of itself."""
    full = "no room for the digests of a segment"
    state, _ = live(READY._replace(owed=6), view(hindrance=full), ev.Stepped(7))
    assert f"no free slot: {full}" == state.failure.message

    state, _ = live(state._replace(owed=8), view(), ev.Stepped(9))
    assert f"no free slot: {rules.BEHIND}" == state.failure.message


def test_a_copy_that_hangs_costs_its_step_and_the_next_and_is_waited_for_once():
    """P4: the training thread waits GATE_S_MAX for it, and from then on not at all."""
    state, _ = live(READY, DUE, PREPARED, ev.SlotReady(7), ev.Due(8))
    state, actions = live(state, ev.CopyHangs(8))

    assert [7, 8] == [a.step for a in told(actions, "abandoned")]
    assert "GiveUpCopy" in kinds(actions)
    assert isinstance(state.failure, UnavailableError)
    for step in (9, 10):
        state, actions = live(state, ev.Due(step))
        assert typed(ev.Prepare(step, 0.0)) == typed(actions[-1])
        state, actions = live(state, ev.CopyHangs(step))
        assert [step] == [a.step for a in told(actions, "abandoned")]

    state, actions = live(state, ev.CopyFailed(7, "it ended at last"))
    assert [] == actions
    assert typed(ev.Prepare(11, GATE_S_MAX)) == typed(*live(state, ev.Due(11))[1][-1:])


def test_a_copy_that_ends_whole_as_it_is_given_up_is_waited_for_no_more():
    """P4: else each later save that meets a copy on its way would be lost, and that copy's too."""
    state, _ = live(READY, DUE, PREPARED, ev.SlotReady(7), ev.Due(8), ev.CopyHangs(8))

    state, _ = live(state, ev.Copied(7), ev.Closed(7, SLOT))

    assert typed(ev.Prepare(9, GATE_S_MAX)) == typed(*live(state, ev.Due(9))[1][-1:])


def test_a_reservation_that_was_interrupted_is_made_again():
    """Ctrl-C in the only RPC of a save: the plan is there, its slots are not."""
    state, _ = live(NEW, DUE, PREPARED)
    state, _ = live(state, ev.Failed(7, "KeyboardInterrupt"))

    assert typed(ev.Reserve(8, 1)) == typed(*live(state, ev.Due(8), ev.Prepared(8, 1))[1])


def test_a_refusal_is_repeated_for_a_while_and_a_new_plan_is_asked_for_at_once():
    state, _ = live(NEW, DUE, PREPARED, ev.Refused(7, 1, FULL), now_s=100.0)
    for now_s, plan, wanted in (
        (100.0 + rules.REFUSED_PLAN_S - 1, 1, FULL),
        (100.0 + rules.REFUSED_PLAN_S, 1, ev.Reserve(8, 1)),
        (101.0, 2, ev.Reserve(8, 2)),
    ):
        after, actions = live(state, ev.Due(8), ev.Prepared(8, plan), now_s=now_s)
        assert typed(wanted)[0] in typed(*actions, after.failure)


@pytest.mark.parametrize(
    ("before", "wait_s"),
    [
        (READY, BUSY_WAIT_S_MAX),
        (live(READY, ev.Due(6), view(steps=(StepLevels(step=6, local=True),)))[0], BUSY_WAIT_S_MAX),
        (live(READY, ev.Due(6), copied(6))[0], RETURN_S_MAX),
        (live(READY, ev.Due(6), copied(6), view(degraded="out"))[0], BUSY_WAIT_S_MAX),
        (live(READY, ev.Due(6), copied(6))[0]._replace(patience_s=0.0), 0.0),
        (
            live(
                READY, ev.Due(6), view(shortage="1 node", steps=(StepLevels(step=6, local=True),))
            )[0],
            RETURN_S_MAX,
        ),
    ],
    ids=["first", "copies on their way", "copied", "outage", "slow before", "no nodes for copies"],
)
def test_a_save_waits_longer_only_for_a_slot_that_is_on_its_way_back(before, wait_s):
    """4.1, G28: with all copies made it is a report away; of a slow rank's nobody knows when."""
    due, _ = live(before, DUE)

    assert wait_s == slot_wait_s(due, 7, agent_lost=False)
    assert 0.0 == slot_wait_s(due, 7, agent_lost=True)


def test_after_a_save_without_a_slot_none_waits_until_one_is_there():
    state, _ = live(READY, DUE, PREPARED, NO_SLOT, NO_SLOT)
    assert (7, 0.0) == (state.owed, state.patience_s)

    state, actions = live(state, ev.Due(8), ev.Prepared(8, 1), ev.NoSlot(8))
    assert ["Post", "KeepMoment"] == kinds(actions)

    state, _ = live(state, ev.Due(9), ev.Prepared(9, 1), ev.SlotReady(9))
    assert BUSY_WAIT_S_MAX == state.patience_s


def test_an_owed_step_that_is_paid_is_owed_no_more():
    state, _ = live(READY, DUE, PREPARED, NO_SLOT, NO_SLOT, ev.Awaited(9.0), ev.WentBack(7, 8.0))
    assert 7 == live(state, NO_SLOT)[0].owed, "nothing came free in time"

    state, actions = live(state, ev.SlotReady(7))
    assert (None, 7) == (state.owed, state.copying)
    assert [0] == told(actions, "wants_slot")


def test_an_announcement_is_declined_once_and_only_if_it_is_late_and_not_saved():
    late = ev.Stepped(7, ENDING)
    state, _ = live(READY, late)

    assert [] == live(state, late)[1]
    assert [] == live(READY, ev.Stepped(7, ENDING, known=True))[1]
    assert [] == live(READY, ev.Stepped(6, ENDING), ev.Stepped(7, ENDING))[1]
    assert [] == live(READY, ev.Stepped(5, ENDING))[1]


def test_a_newer_attempt_ends_all_waits_and_all_saves():
    state, actions = live(READY, view(fenced=True))

    assert ["FailAll", "Warn", "Offer"] == kinds(actions)
    assert isinstance(state.failure, StaleGenerationError)
    assert None is live(state, ev.FailureTaken())[0].failure
    assert ["Post", "Fail", "Post", "Warn"] == kinds(live(state, DUE)[1])


def test_a_save_that_is_not_deferred_is_told_once_after_a_few():
    state = READY
    events = []
    for step in range(1, 9):
        state, actions = live(state, ev.Due(step), ev.SlotReady(step, eager=True))
        events += told(actions, "event")

    assert [("save_eager", "4")] == [(e.kind, e.context["step"]) for e in events]


def test_closing_ends_all_waits():
    (action,) = live(READY, ev.Closing())[1]

    assert isinstance(action, ev.FailAll)
    assert isinstance(action.error, PreconditionError)


def test_the_state_before_is_not_changed_and_stays_small():
    """100,000 saves: what is remembered does not grow."""
    before = READY._replace(saving=(Claim(6),))
    live(before, DUE)
    assert READY._replace(saving=(Claim(6),)) == before

    state = READY
    for step in range(3000):
        state, _ = live(state, ev.Due(step), ev.Prepared(step, 1), ev.NoSlot(step), ev.NoSlot(step))
    assert len(state.saving) == 1
    assert len(state.lapse.said) <= 16


def test_the_first_save_waits_for_its_slot_as_long_as_its_memory_may_take():
    """Once: from then on a slot is there, or protection is behind."""
    state, _ = live(NEW, ev.Due(7), ev.Prepared(7, 1), ev.Reserved(7, 1, 60.0))
    late, waited_s = waits(state, 7)
    assert (7, rules.NEW_PLAN_S_MAX + 60.0) == (late.owed, waited_s)

    state, _ = live(state, NO_SLOT, ev.SlotReady(7))
    assert BUSY_WAIT_S_MAX == state.patience_s


HINDERED, FENCED = view(hindrance="the file system is full"), view(fenced=True)


@pytest.mark.parametrize(
    ("news", "lost", "more_s"),
    [
        (HINDERED, False, 0.0),
        (FENCED, False, 0.0),
        (view(), True, rules.NEW_PLAN_S_MAX),
        (view(), False, rules.NEW_PLAN_S_MAX + 600.0 - 2 * LOOK_S),
    ],
    ids=["full", "fenced", "away", "made"],
)
def test_nobody_waits_for_memory_that_does_not_come(news, lost, more_s):
    """P4: a large slot may take an hour to touch; the agent died, or its file system was full."""
    state, _ = live(NEW, ev.Due(7), ev.Prepared(7, 1), ev.Reserved(7, 1, 600.0), NO_SLOT, NO_SLOT)
    state, _ = live(state, news)

    late, waited_s = waits(state, 7, agent_lost=lost)
    assert (7, more_s) == (late.owed, waited_s)


def waits(state, step, **fields):
    """Return the state in which a step is owed that finds no slot, and how long it waited."""
    waited_s = 0.0
    while state.owed != step:
        state, actions = live(state, ev.NoSlot(step, **fields))
        waited_s += sum(action.wait_s for action in actions if isinstance(action, ev.TakeSlot))
    return state, waited_s
