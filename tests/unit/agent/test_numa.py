"""On which NUMA node slots are made; where their pages come to lie: tests/rdma/test_numa.py."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
from tests.said import agent_session
from tests.unit.agent.test_machine import KIB, asked, kinds, state

from holdfast.core.slot_names import SlotState
from holdfast_services.agent.domain import events as ev
from holdfast_services.agent.domain import handle
from holdfast_services.agent.numa import memory_nodes, on_node_of

FIRST, SECOND = sorted(os.sched_getaffinity(0))[:2]


@pytest.fixture
def nodes(tmp_path):
    """A machine that says it has two nodes, with one of this one's processors each."""
    for number, cpu in enumerate((FIRST, SECOND)):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}/cpulist").write_text(f"{cpu}\n")
    return tmp_path


@pytest.fixture
def process():
    """A process that is bound to some processors."""
    made = []

    def start(*cpus):
        made.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        os.sched_setaffinity(made[-1].pid, cpus)
        return made[-1].pid

    yield start
    for each in made:
        each.kill()
        each.communicate()


def test_memory_is_allocated_on_the_processors_of_the_rank_that_it_is_for(nodes, process):
    before, bound = os.sched_getaffinity(0), process(SECOND)

    with on_node_of(bound, nodes):
        assert {SECOND} == os.sched_getaffinity(0)

    assert before == os.sched_getaffinity(0)
    assert {0: {FIRST}, 1: {SECOND}} == memory_nodes(nodes)


def test_who_may_run_anywhere_is_followed_nowhere(nodes, process, tmp_path):
    before = os.sched_getaffinity(0)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for pid, where in (
        (process(FIRST, SECOND), nodes),
        (process(FIRST), tmp_path / "none"),
        (gone.pid, nodes),
        (None, nodes),
        (0, nodes),
    ):
        with on_node_of(pid, where):
            assert before == os.sched_getaffinity(0)


def test_an_error_on_the_way_leaves_the_thread_where_it_was(nodes, process):
    before = os.sched_getaffinity(0)

    with pytest.raises(MemoryError), on_node_of(process(SECOND), nodes):
        raise MemoryError

    assert before == os.sched_getaffinity(0)


@pytest.mark.parametrize("several", [True, False])
def test_each_rank_is_leased_what_was_made_for_it(several):
    """Slots of equal length, as with FSDP: where there are several nodes they are not alike."""
    now = replace(state(), nodes_of_memory=2 if several else 1)
    ranks = {}
    for rank in (0, 1):
        one = agent_session(id=f"rank-{rank}", rank=rank, world_size=2)
        ranks[one.id] = replace(one, reservation=replace(asked(KIB), plan_hash=f"p{rank}"))
    now.sessions = ranks
    made: dict[str, str] = {}
    now, actions = handle(now, ev.Tick(1.0))
    while creating := kinds(actions, ev.CreateSlot):
        made |= {action.name.slot: action.session for action in creating}
        now, actions = handle(now, ev.SlotCreated(creating[0].name.slot))

    leased = {key: s.session for key, s in now.slots.items() if s.name.state is SlotState.WRITING}
    assert 4 == len(leased)
    assert sorted(leased.values()) == ["rank-0", "rank-0", "rank-1", "rank-1"]
    assert leased == made
    assert {s.made_for for s in now.slots.values()} == ({*ranks} if several else {""})
