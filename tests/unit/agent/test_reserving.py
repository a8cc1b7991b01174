"""How long who reserves slots is kept, and what it hears."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from tests.said import changed_session
from tests.unit.agent.test_machine import asked, sealed, session, state

from holdfast.core.persistence_rules import PersistRule
from holdfast.errors import ExhaustedError
from holdfast_services.agent import service
from holdfast_services.agent.domain import events as ev
from holdfast_services.agent.domain import handle
from holdfast_services.agent.service import AgentService

LENGTH = 1 << 10


class Shell:
    """The agent's state; while somebody waits, slots are made, as far as ``answers`` go."""

    def __init__(self, *answers):
        self.state = state()
        self.state.sessions[session().id] = session()
        self.answers, self.asked, self.waited_s = list(answers), [], []

    def dispatch(self, event):
        self.state, actions = handle(self.state, event)
        self.asked += [a.name.slot for a in actions if isinstance(a, ev.CreateSlot)]

    async def until(self, met, wait_s):
        self.waited_s.append(wait_s)
        while self.asked and self.answers and not met():
            self.dispatch(self.answers.pop(0)(self.asked.pop(0)))
        return met()

    def leased(self):
        return [s for s in self.state.slots.values() if s.session == session().id]


def reserve(shell, slots=3):
    """Return whether memory is still being touched."""
    agent = AgentService(shell, SimpleNamespace(), SimpleNamespace())
    return asyncio.run(agent.reserve(session().id, asked(LENGTH, slots=slots)))


def test_who_reserves_has_its_slots_where_they_are_made_at_once():
    shell = Shell(*[ev.SlotCreated] * 3)
    assert not reserve(shell)

    assert 3 == len(shell.leased())


def test_who_reserves_is_let_go_while_memory_is_still_touched():
    """And all of it is made in time; how much there is has nothing to do with the wait."""
    shell = Shell(ev.SlotCreated)
    assert reserve(shell)
    assert [service.RESERVE_S_MAX] == shell.waited_s
    assert 1 == len(shell.leased())

    for _ in range(2):
        shell.dispatch(ev.SlotCreated(shell.asked.pop(0)))
    assert 3 == len(shell.leased())


def test_that_there_is_no_room_is_heard_at_once():
    shell = Shell(lambda slot: ev.SlotRefused(slot, "the file system is full"))

    with pytest.raises(ExhaustedError, match="the file system is full"):
        reserve(shell)


@pytest.mark.parametrize("persist", [PersistRule(), PersistRule(steps=5)], ids=["", "persist"])
def test_who_gets_no_slot_at_all_hears_what_holds_the_room(persist):
    """Of three slots one is for what drains: two of three are all that a rank may lease."""
    shell = Shell()
    me = changed_session(session(), persist=persist)
    shell.state.sessions[me.id] = me
    for step in (1, 2, 3):
        shell.state.slots[f"s{step}"] = sealed(f"s{step}", step, owner="b")
    shell.state.budget_bytes = shell.state.used_bytes

    with pytest.raises(ExhaustedError, match="hold segments that may not be freed yet"):
        reserve(shell)
