"""A catalogue that was lost, as an agent sees it: attempts are forgotten, numbers begin again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.agent.test_machine import (
    KIB,
    kinds,
    proposal,
    run_view,
    sealed,
    session,
    shard,
    state,
    view,
)

from holdfast.core.decision import Decision, DecisionState
from holdfast.core.node_view import Want, WantReason
from holdfast.core.slot_names import SlotName, SlotState
from holdfast.core.sources import Memory
from holdfast_services.agent.domain import (
    Slot,
    handle,
    inventory,
    session_view,
    shows_alike,
    slot_rules,
)
from holdfast_services.agent.domain import events as ev


@pytest.mark.parametrize(
    ("stage", "loaded", "told"),
    [
        (DecisionState.PENDING, True, True),
        (DecisionState.PROPOSED, True, True),
        (DecisionState.CONFIRMED, True, False),
        (DecisionState.LOST, True, False),  # it was told to start over all the same
        (DecisionState.PROPOSED, False, False),
    ],
)
def test_who_has_loaded_learns_that_the_catalogue_is_from_before_it_had(stage, loaded, told):
    """P2, P4: else the catalogue waits for it, or chooses something else."""
    now, _ = handle(state(), ev.SessionOpened(session(2, loaded=loaded)), now_s=10.0)
    decided = Decision(number=1, state=stage, generation=2)
    seen, _ = handle(now, view(run_view(attempt=2, seats=(0,), decision=decided)), now_s=20.0)

    assert session_view(seen, seen.sessions[session(2).id]).forgotten == told


def test_a_rank_that_waits_for_its_restore_learns_after_a_while_that_it_waits_in_vain():
    """P4, P6: it would wait for a decision that no catalogue makes. A view may be older than it."""
    now, _ = handle(state(), ev.SessionOpened(session(2)), now_s=10.0)
    shown = {}
    for name, run in (
        ("none", None),
        ("older", run_view(attempt=1)),
        ("namesake", run_view(attempt=2, nonce=b"its")),
        ("known", run_view(attempt=2, seats=(0,))),
        ("mates known", run_view(attempt=2, seats=(1,))),
    ):
        seen, _ = handle(now, view(run))
        for wait_s in (0.0, slot_rules.FORGOTTEN_AFTER_S):
            later, _ = handle(seen, ev.Tick(10.0 + wait_s), now_s=10.0 + wait_s)
            forgotten = session_view(later, later.sessions[session(2).id]).forgotten
            shown[name, wait_s > 0.0] = forgotten
            # Only time has passed, and the rank has to be told all the same.
            assert shows_alike(seen, later) != forgotten

    assert {key for key, forgotten in shown.items() if forgotten} == {
        ("none", True),
        ("older", True),
        ("namesake", True),
        ("mates known", True),
    }


def attempt(generation, nonce, number=1):
    """What a catalogue says of an attempt with a decision, and a rank of the attempt."""
    decision = replace(proposal(number), generation=generation)
    run = run_view(attempt=generation, nonce=nonce, decision=decision)
    rank = replace(session(generation, nonce=nonce), id=f"{generation} {nonce}")
    return replace(run, generation=generation), rank


NEW = pytest.mark.parametrize(
    ("old", "new"),
    [((1, b"old"), (1, b"new")), ((1, b"old"), (2, b"new")), ((1, b""), (2, b""))],
    ids=["same number", "next number", "without nonces"],
)


@NEW
def test_what_was_verified_for_a_decision_is_verified_again_for_its_namesake(old, new):
    """P3, M2: a new catalogue gives the numbers of decisions again."""
    first, rank = attempt(*old)
    now, _ = handle(state(sealed("s1", 5)), ev.SessionOpened(rank))
    now, _ = handle(now, view(first))
    now, _ = handle(now, ev.SlotVerified(sealed("s1", 5).name, intact=True, decision=1))
    now, actions = handle(now, view(first, version="2"))
    assert (1, []) == (now.sessions[rank.id].ready_decision, kinds(actions, ev.VerifySlot))

    second, rank = attempt(*new)
    now, _ = handle(now, ev.SessionOpened(rank))
    now, actions = handle(now, view(second, version="3"))

    assert [1] == [a.decision for a in kinds(actions, ev.VerifySlot)]
    assert 0 == now.sessions[rank.id].ready_decision


@NEW
def test_who_served_bad_bytes_for_a_decision_is_not_accused_for_its_namesake(old, new):
    """P3, M2: the new attempt has not asked it yet."""
    free = Slot(name=SlotName("s1", 0, SlotState.FREE), length_bytes=KIB)
    wants = (Want(shard=shard(5), sources=(Memory("b"), Memory("c")), reason=WantReason.RESTORE),)
    first, _ = attempt(*old)
    now, actions = handle(state(free), view(first, wants))
    name = kinds(actions, ev.Fetch)[0].name
    now, _ = handle(now, ev.FetchFailed(name, shard(5).id, "bad", (Memory("b"),)))
    now, _ = handle(now, view(first, wants, version="2"))
    accused = inventory(now, incarnation=1, sequence=1).bad_sources
    assert [Memory("b")] == [bad.source for bad in accused]

    now, _ = handle(now, view(attempt(*new)[0], wants, version="3"))

    assert () == inventory(now, incarnation=1, sequence=2).bad_sources


def test_a_slot_verified_for_a_higher_number_is_verified_again_once():
    """4.8: hashed for the older attempt when the new one came; it was hashed again for ever."""
    first, rank = attempt(1, b"old", number=5)
    now, _ = handle(state(sealed("s1", 5)), ev.SessionOpened(rank))
    now, _ = handle(now, view(first))
    second, rank = attempt(2, b"new")
    now, _ = handle(now, ev.SessionOpened(rank))
    now, _ = handle(now, view(second, version="2"))

    now, actions = handle(now, ev.SlotVerified(sealed("s1", 5).name, intact=True, decision=5))
    assert [1] == [a.decision for a in kinds(actions, ev.VerifySlot)]
    now, actions = handle(now, ev.SlotVerified(sealed("s1", 5).name, intact=True, decision=1))

    assert [] == kinds(actions, ev.VerifySlot)
    assert 1 == now.sessions[rank.id].ready_decision
