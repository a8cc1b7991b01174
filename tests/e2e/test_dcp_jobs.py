"""What DCP saves into the agents' memory comes back after kills, on other meshes, from the store.

F7, F8: a script gets it by another ``storage_writer`` and ``storage_reader``. Real processes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from tests.e2e.stack import Stack, running_stack
from tests.e2e.test_bit_identity import final, restored, told
from tests.e2e.test_durable import checkpoint_folder, lose_all_memory
from tests.e2e.test_meshes import digests

import holdfast

RANK = Path(__file__).with_name("dcp_trainer.py")


@pytest.fixture(scope="module")
def stack():
    with running_stack(nodes=2, HOLDFAST_NODE_LEASE_S="2", HOLDFAST_DECIDE_WAIT_S="4") as running:
        yield running


def launch(stack: Stack, job: str, *more: str, world_size: int = 4):
    arguments = ("--job", job, *more)
    return stack.ranks(*arguments, world_size=world_size, nodes=(0, 1), script=RANK)


def test_a_job_of_dcp_is_killed_and_ends_with_the_same_bits(stack):
    """P1: our stager. The step that failed on one rank is on none; what was before it is restored.

    Each rank's boxes are in its own segment, in the memory of its node.
    """
    calm = launch(stack, "calm", "--how", "sync", world_size=2).succeed()
    more = ("--how", "async", "--fail-at", "3", "--kill-at", "4")
    killed = launch(stack, "killed", *more, world_size=2)
    killed.wait()
    assert all("failed on [1]" in text for text in killed.outputs), killed.outputs

    outputs = launch(stack, "killed", "--how", "async", world_size=2).succeed()

    assert [restored(text) for text in outputs] == [2, 2]
    assert [final(text) for text in outputs] == [final(text) for text in calm]
    for text in outputs:
        assert "fetching" not in text
        assert "memory" in json.loads(told("restored", text).partition(" ")[2].replace("'", '"'))


def test_a_job_of_dcp_goes_on_on_other_meshes_however_it_saves(stack):
    """F79: the very bits that the mesh before has left, whoever has them."""
    before, steps = "", 0
    for mesh, world_size, how in (
        ("fsdp", 4, "cached"), ("2d", 4, "plain"), ("tp", 2, "alone"), ("fsdp", 1, "sync"),
    ):  # fmt: skip
        steps += 2
        more = ("--mesh", mesh, "--how", how, "--steps", str(steps))
        outputs = launch(stack, "wanders", *more, world_size=world_size).succeed()

        loaded = {digests(text, "loaded")[steps - 2] for text in outputs}
        assert loaded == {before} or not before, (mesh, world_size)
        [before] = {digests(text, "step")[steps] for text in outputs}


def test_a_job_of_dcp_comes_back_from_the_store_and_is_an_ordinary_checkpoint(stack):
    """P5, P7: all memory is gone; plain ``holdfast.load`` reads the folder, too.

    P4: after a save that failed, there are slots for the next one.
    """
    outputs = launch(stack, "lost", "--persist", "3", "--fail-at", "2", world_size=2).succeed()
    lose_all_memory(stack)
    again = launch(stack, "lost", "--steps", "5", world_size=2).succeed()

    assert [restored(text) for text in again] == [3, 3]
    assert {digests(text, "loaded")[3] for text in again} == {
        digests(text, "step")[3] for text in outputs
    }
    plain: dict = {}
    holdfast.load(checkpoint_folder(stack, "lost", 3), plain)
    assert plain["steps"] == 3
    assert plain["names"] == ["a", {"b": 1}]
    assert plain["model"]["0.weight"].shape == torch.Size([12, 7])


def test_a_job_that_has_a_checkpoint_does_not_save_before_it_is_loaded(stack):
    """Else another history would have its parent."""
    script = Path(__file__).with_name("dcp_rules.py")
    (text,) = stack.ranks(script=script).succeed()

    assert re.search("^all well$", text, re.MULTILINE), text
