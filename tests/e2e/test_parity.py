"""Parity in place of copies: two of four nodes are lost with their memory, training goes on."""

from __future__ import annotations

import os
import re
import signal
import time

from tests.e2e.stack import SharedStack, until
from tests.e2e.test_bit_identity import final, finals, restored
from tests.e2e.test_faults import levels, steps_of

WORLD = {"world_size": 4, "nodes": (0, 1, 2, 3)}


STACK = SharedStack(nodes=4, HOLDFAST_NODE_LEASE_S="3")


def lose(stack, index: int) -> None:
    """Kill a node's agent and empty its memory; the supervisor starts another."""
    pid = stack.agent_pid(index)
    for path in stack.arena(index).glob("*.*"):
        path.unlink(missing_ok=True)
    os.kill(pid, signal.SIGKILL)
    until(lambda: stack.agent_pid(index) not in (None, pid), "another agent")


def test_two_of_four_nodes_are_lost_and_training_goes_on_bit_for_bit(stack, job):
    """G4, P5: with Parity(2, 2) no node holds a copy of another's shard."""
    common = ("--job", job, "--steps", "12", "--wait", "replicated", "--parity", "2", "2")
    expected = finals(stack, steps="12", world_size=4)
    before = elements(stack)
    stack.ranks(*common, "--kill-at", "9", "--kill-ranks", "0", "1", "2", "3", **WORLD).wait()
    for there, now in zip(before, elements(stack), strict=True):
        assert now - there, "each node has an element of others"
    lose(stack, 0)
    lose(stack, 1)

    outputs = stack.ranks(*common, **WORLD).succeed()

    assert [restored(text) for text in outputs] == [8, 8, 8, 8]
    assert [final(text) for text in outputs] == expected
    assert re.search(r"^restored 8 \{.*'peer': \d+", outputs[0], re.MULTILINE), outputs[0]


def elements(stack) -> list[set[str]]:
    """Return the names of the elements in the arena of each node."""
    return [{path.name for path in stack.arena(index).glob("*.elem")} for index in range(4)]


def test_nobody_waits_for_a_step_of_which_a_part_went_with_an_arena(stack, job):
    """4.7: training waits for the copies of that very step, so it is given up.

    As lost; or as never saved, where rank 3 had not heard yet that its agent had sealed it.
    """
    common = ("--job", job, "--parity", "2", "2", "--wait", "replicated", "--hold-copies")
    ranks = stack.ranks(*common, "--steps", "24", "--pause-s", "0.05", **WORLD)
    others = [stack.agent_pid(index) for index in (0, 1, 2)]
    step = stop_before_a_commit(stack, job, ranks, others)
    lose(stack, 3)
    send(others, signal.SIGCONT)

    ranks.succeed()

    events = [event for event in stack.rest("events") if event["job"] == job]
    lost = [event["message"] for event in events if event["kind"] == "step_abandoned"]
    never = f"step {step} of {job} was abandoned: rank 3 went on without saving it"
    ends = ("was lost", "before they were safe", never)
    assert [text for text in lost if text.endswith(ends)], lost


def stop_before_a_commit(stack, job, ranks, agents) -> int:
    """Stop the other agents while node 3 has a step that is not committed; return it.

    Nobody has elements of it.
    """
    for step in range(5, 22):
        ranks.until_step(step)
        send(agents, signal.SIGSTOP)
        ends_s = time.monotonic() + 1.0
        while time.monotonic() < ends_s:
            newest = max(steps_of(stack.arena(3), job), default=0)
            if newest > max(levels(stack, job)):
                return newest
        send(agents, signal.SIGCONT)
    raise AssertionError("each step was committed before the agents stopped")


def send(pids, number: int) -> None:
    for pid in pids:
        os.kill(pid, number)
