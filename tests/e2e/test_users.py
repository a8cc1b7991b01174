"""What users ask for themselves: saves, several Checkpointers, another beginning."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from tests.e2e.stack import running_stack
from tests.e2e.test_bit_identity import final

PAIR = Path(__file__).with_name("pair.py")


@pytest.fixture(scope="module")
def stack():
    with running_stack(nodes=2, HOLDFAST_NODE_LEASE_S="3") as running:
        yield running


def steps_of(stack, job):
    """Return the steps of the job's checkpoints that may be restored, newest first."""
    return [r["step"] for r in stack.rest(f"jobs/{job}/checkpoints") if not r["superseded"]]


def test_a_save_that_one_rank_asks_for_is_made_by_all_at_one_step(stack):
    """``request_save``: announced as time triggers are; nobody else asks for one."""
    places = {"world_size": 2, "nodes": (0, 1)}
    run = ("--job", "asked", "--save", "never", "--request-at", "5", "--pause-s", "0.1")
    outputs = stack.ranks(*run, "--steps", "60", **places).succeed()

    saved = [re.findall(r"^step (\d+) [a-z]", text, re.MULTILINE) for text in outputs]
    assert 1 == len(saved[0])
    assert saved[0] == saved[1]
    assert 5 < int(saved[0][0]) < 60


def test_a_single_rank_saves_at_its_next_step_when_asked(stack):
    """``request_save``: nobody has to be told."""
    run = ("--job", "alone", "--save", "never", "--request-at", "5", "--replicas", "0")
    [output] = stack.ranks(*run, "--steps", "8").succeed()

    assert ["5"] == re.findall(r"^step (\d+) [a-z]", output, re.MULTILINE)


def pair(stack, *arguments):
    return stack.ranks(*arguments, script=PAIR)


def test_two_checkpointers_of_one_process_come_back_bit_identical(stack):
    """Roles: two runs of one job side by side, saved and restored together (P5)."""
    killed = pair(stack, "--steps", "20", "--kill-at", "12")
    assert [-signal.SIGKILL] == killed.wait()
    [resumed] = pair(stack, "--steps", "20").succeed()
    with running_stack(nodes=1) as other:
        [whole] = pair(other, "--steps", "20").succeed()

    assert "restored generator 12" in resumed
    assert "restored critic 12" in resumed
    assert final(whole) == final(resumed)
    assert {"pair/critic", "pair/generator"} <= {job["job"] for job in stack.rest("jobs")}


def test_a_signal_saves_every_checkpointer_of_a_process_before_it_ends():
    """F24, with two: both hear of it, both save, then the process ends with 143."""
    with running_stack(nodes=1) as stack:
        ranks = pair(stack, "--steps", "600", "--preemption", "--pause-s", "0.05")
        ranks.until_step(5)
        ranks.kill(signal.SIGTERM)

        assert [143] == ranks.wait(), ranks.outputs
        [output] = pair(stack, "--steps", "1", "--preemption").succeed()

    steps = re.findall(r"^restored \w+ (\d+)", output, re.MULTILINE)
    assert 2 == len(steps)
    assert 1 == len(set(steps))
    assert int(steps[0]) >= 5
