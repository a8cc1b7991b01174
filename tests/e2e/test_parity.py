"""Parity in place of copies: two of four nodes are lost with their memory, training goes on."""

from __future__ import annotations

import os
import re
import signal

import pytest
from tests.e2e.stack import running_stack, until
from tests.e2e.test_bit_identity import final, finals, restored

WORLD = {"world_size": 4, "nodes": (0, 1, 2, 3)}


@pytest.fixture
def stack():
    with running_stack(nodes=4, HOLDFAST_NODE_LEASE_S="3") as running:
        yield running


def lose(stack, index: int) -> None:
    """Kill a node's agent and empty its memory; the supervisor starts another."""
    pid = stack.agent_pid(index)
    for path in stack.arena(index).glob("*.*"):
        path.unlink()
    os.kill(pid, signal.SIGKILL)
    until(lambda: stack.agent_pid(index) not in (None, pid), "another agent")


def test_two_of_four_nodes_are_lost_and_training_goes_on_bit_for_bit(stack):
    """G4, P5: with Parity(2, 2) no node holds a copy of another's shard."""
    common = ("--job", "j", "--steps", "12", "--wait", "replicated", "--parity", "2", "2")
    expected = finals(stack, steps="12", world_size=4)
    stack.ranks(*common, "--kill-at", "9", "--kill-ranks", "0", "1", "2", "3", **WORLD).wait()
    for index in range(4):
        assert list(stack.arena(index).glob("*.elem")), "each node has an element of others"
    lose(stack, 0)
    lose(stack, 1)

    outputs = stack.ranks(*common, **WORLD).succeed()

    assert [restored(text) for text in outputs] == [8, 8, 8, 8]
    assert [final(text) for text in outputs] == expected
    assert re.search(r"^restored 8 \{.*'peer': \d+", outputs[0], re.MULTILINE), outputs[0]
