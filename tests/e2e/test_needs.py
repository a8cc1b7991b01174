"""A node fetches what its own ranks need of a checkpoint, and nothing else (P8, ADR 0033)."""

from __future__ import annotations

import json
import os
import re
import signal

from tests.e2e.stack import SharedStack, until
from tests.e2e.test_bit_identity import final, restored, told
from tests.e2e.test_faults import segment_of

STACK = SharedStack(nodes=3, HOLDFAST_NODE_LEASE_S="3")


def test_a_node_fetches_the_state_of_its_own_ranks_and_no_other(stack, job):
    """Each rank has a state of its own here: who took a lost node's place needs one segment."""
    places = {"world_size": 3, "nodes": (0, 1, 2)}
    kind = ("--scenario", "apart", "--steps", "12")
    common = (*kind, "--job", job, "--wait", "replicated")
    expected = [
        final(text) for text in stack.ranks(*kind, "--job", f"{job}-calm", **places).succeed()
    ]
    stack.ranks(*common, "--kill-at", "9", "--kill-ranks", "0", "1", "2", **places).wait()
    length_bytes = segment_of(stack.arena(0), job, rank=0).stat().st_size
    old = stack.agent_pid(2)
    for path in stack.arena(2).glob("*.*"):
        path.unlink(missing_ok=True)
    os.kill(old, signal.SIGKILL)

    outputs = stack.ranks(*common, **places).succeed()

    assert [restored(text) for text in outputs] == [8, 8, 8]
    assert [final(text) for text in outputs] == expected
    sources = [re.search(r"^restored 8 (\{.*?\})", text, re.MULTILINE)[1] for text in outputs]
    assert sources == [f"{{'{tier}': {length_bytes}}}" for tier in ("memory", "memory", "peer")]


def test_a_rank_whose_own_segment_lacks_a_tensor_fetches_the_others(stack, job):
    """The ranks shared a model when they saved it, each a part of it, and have one each now."""
    places = {"world_size": 2, "nodes": (0, 1)}
    common = ("--job", job, "--replicas", "0", "--wait", "local")
    left = [told("left", t) for t in stack.ranks(*common, "--steps", "8", **places).succeed()]

    outputs = stack.ranks(*common, "--scenario", "apart", "--steps", "9", **places).succeed()

    assert [told("loaded", text) for text in outputs] == left
    for text in outputs:
        assert "this rank's own segment may not have all" in text
        tiers = re.findall(r"'(\w+)': \d+", told("restored", text))
        assert sorted(tiers) == ["memory", "peer"], text


def test_a_node_fetches_the_bytes_that_its_ranks_ask_for(stack, job):
    """Of a segment of 64 MiB the model is a few KiB: the parts that hold it, and nothing else.

    An owner that came back empty is brought its own segment, all of it, at any time: so the rank
    there is one whose segment it never had, and no copies are asked for that it could be given.
    """
    kind = ("--scenario", "apart", "--ballast-mib", "64", "--job", job)
    common = (*kind, "--save", "4", "--wait", "replicated", "--steps", "12")
    places = {"world_size": 3, "nodes": (0, 1, 2)}
    stack.ranks(*common, "--kill-at", "9", "--kill-ranks", "0", "1", "2", **places).wait()
    again = (*kind, "--replicas", "0", "--only", "model", "--steps", "8")
    stack.ranks(*again, **places).succeed()
    old = stack.agent_pid(2)
    for path in stack.arena(2).glob("*.*"):
        path.unlink(missing_ok=True)
    os.kill(old, signal.SIGKILL)

    outputs = stack.ranks(*again, world_size=3, nodes=(2, 1, 0)).succeed()

    sources = [json.loads(told("restored", text)[2:].replace("'", '"')) for text in outputs]
    assert [restored(text) for text in outputs] == [8, 8, 8]
    assert sources[0] == {"peer": sources[0]["peer"]}
    assert sources[0]["peer"] <= 32 << 20 < sources[1]["memory"]
    until(lambda: not list(stack.arena(2).glob("*.part")), "the parts, once they are loaded")
