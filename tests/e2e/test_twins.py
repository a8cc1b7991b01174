"""Copies for data-parallel ranks are filled in by those who have the same tensors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.e2e.stack import running_stack
from tests.e2e.test_parity import lose

from holdfast.cli.probes import probe_agent
from holdfast.format.digest import PART_BYTES

SCRIPT = Path(__file__).with_name("twin_trainer.py")
STEPS = 7
DDP = {"world_size": 2, "nodes": (0, 1), "script": SCRIPT}


def came(stack, index):
    """Return the bytes that a node has fetched, and those that were there already."""
    facts = probe_agent(Path(stack.node(index)["agent"]))
    return sum(one.fetched_bytes for one in facts.transports), facts.unchanged_bytes


def said(output, word):
    return re.findall(rf"^{word} (\S+) (\S+)$", output, re.MULTILINE)


@pytest.mark.timeout(300)
def test_copies_of_ranks_that_are_alike_do_not_travel_and_a_lost_node_comes_back_from_them():
    """4.5, P5: by bytes moved; only what is each rank's own comes, and the head of a segment."""
    with running_stack(nodes=2, HOLDFAST_NODE_LEASE_S="3") as stack:
        outputs = stack.ranks("--steps", str(STEPS), **DDP).succeed()
        trained = said(outputs[0], "final")
        lengths = [int(said(text, "step")[0][1]) for text in outputs]
        for node in (0, 1):
            fetched, there = came(stack, node)
            length = lengths[1 - node]
            # The first two copies come whole: nothing says what goes where before.
            assert 2 * length < fetched <= 2 * length + (STEPS - 2) * 2 * PART_BYTES
            assert STEPS * length == fetched + there

        lose(stack, 1)
        outputs = stack.ranks("--steps", str(STEPS), **DDP).succeed()

        assert [trained, trained] == [said(text, "restored") for text in outputs]


@pytest.mark.timeout(300)
def test_an_optimizer_that_steps_at_once_waits_for_no_filling():
    """P4: what was not filled in by then is fetched, and every copy is whole."""
    with running_stack(nodes=2) as stack:
        outputs = stack.ranks("--steps", "5", "--at-once", **DDP).succeed()
        trained = said(outputs[0], "final")

        # One node alone loads all of it: the copies that it was given are right.
        [output] = stack.ranks("--steps", "5", nodes=(1,), script=SCRIPT).succeed()

        assert trained == said(output, "restored")
