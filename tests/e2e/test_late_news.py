"""A restart while news is late: the catalogue was lost, nodes say only afterwards what they hold.

Real processes throughout; each order of events is forced, none is waited for by the clock.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.e2e.stack import Ranks, SharedStack, Stack, until
from tests.e2e.test_bit_identity import final, finals, restored
from tests.e2e.test_faults import any_session, began, is_known, levels

TWO_NODES = {"world_size": 2, "nodes": (0, 1)}
# No rank waits for another before it registers, so one can be first.
NAMED = {"HOLDFAST_ATTEMPT": "the second one"}
TWELVE = ("--steps", "12")


STACK = SharedStack(nodes=2, HOLDFAST_NODE_LEASE_S="2", HOLDFAST_DECIDE_WAIT_S="60")


@contextmanager
def without_supervisor(stack: Stack) -> Iterator[None]:
    """What is killed in here comes back only at the end of the block."""
    supervisor = stack.pid("holdfast_services.supervisor")
    os.kill(supervisor, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(supervisor, signal.SIGCONT)


def lose_catalogue(stack: Stack) -> None:
    """Kill metadata and delete its database."""
    os.kill(stack.metadata_pid(), signal.SIGKILL)
    for path in stack.home.glob("metadata.db*"):
        path.unlink(missing_ok=True)


def ended(stack: Stack) -> bool:
    return not any_session([stack.arena(0), stack.arena(1)])


def asked(stack: Stack) -> bool:
    return all(any_session([stack.arena(index)]) for index in (0, 1))


def test_a_catalogue_lost_while_a_job_restarts_costs_nothing(stack, job):
    """P6, M1, 4.8; defect A1: in its first generation, and the ranks ask before any report."""
    expected = finals(stack, steps="12", world_size=2)
    common = ("--job", job, *TWELVE, "--wait", "replicated")
    stack.ranks(*common, "--kill-at", "9", "--kill-ranks", "0", "1", **TWO_NODES).wait()
    until(lambda: ended(stack), "the end of the old sessions")
    with without_supervisor(stack):
        lose_catalogue(stack)
        ranks = stack.ranks(*common, **TWO_NODES)
        until(lambda: asked(stack), "ranks that ask to register")
    outputs = ranks.succeed()

    assert [restored(text) for text in outputs] == [8, 8]
    assert [final(text) for text in outputs] == expected


def test_an_attempt_that_got_the_number_of_a_forgotten_one_is_fenced_not_started_over(stack, job):
    """M1, P2; defect A1: the first rank comes from an empty node, the evidence after it."""
    common = ("--job", job, *TWELVE, "--wait", "replicated")
    stack.ranks(*common, "--kill-at", "9", "--kill-ranks", "0", "1", **TWO_NODES).wait()
    until(lambda: ended(stack), "the end of the old sessions")
    late = stack.agent_pid(1)
    with without_supervisor(stack):
        lose_catalogue(stack)
        os.kill(stack.agent_pid(0), signal.SIGKILL)
        for path in stack.arena(0).glob("*.*"):
            path.unlink(missing_ok=True)
        os.kill(late, signal.SIGSTOP)
    try:
        ranks = stack.ranks(*common, **TWO_NODES, **NAMED)
        until(lambda: began(stack, job, generation=1), "an attempt of the old one's number")
    finally:
        os.kill(late, signal.SIGCONT)

    assert 0 not in ranks.wait(), ranks.outputs
    assert any("refused stale_generation" in text for text in ranks.outputs), ranks.outputs
    assert not any("restored" in text for text in ranks.outputs), ranks.outputs
    outputs = stack.ranks(*common, **TWO_NODES).succeed()
    assert [restored(text) for text in outputs] == [8, 8]


@pytest.mark.parametrize("agents", ["stay", "restart"])
def test_a_job_is_protected_again_after_the_catalogue_was_lost_while_it_trained(stack, job, agents):
    """P5, P6: nobody restarts anything; the steps of the attempt are committed as they were."""
    common = ("--job", job, "--pause-s", "0.2")
    ranks = stack.ranks(*common, "--steps", "400", **TWO_NODES)
    ranks.until_step(6)
    with without_supervisor(stack):
        lose_catalogue(stack)
        for index in (0, 1) if agents == "restart" else ():
            os.kill(stack.agent_pid(index), signal.SIGKILL)
        assert not is_known(stack, job, 6)

    before = last_step(ranks)
    until(lambda: copied(stack, job) > before, f"a step after {before} in the new catalogue")
    kept = copied(stack, job)
    assert {row["generation"] for row in levels(stack, job).values()} == {1}
    ranks.kill()
    ranks.wait()
    outputs = stack.ranks(*common, "--steps", "1", **TWO_NODES).succeed()

    assert min(map(restored, outputs)) >= kept


def last_step(ranks: Ranks) -> int:
    return max(int(step) for step in re.findall(r"^step (\d+) ", ranks.outputs[0], re.MULTILINE))


def copied(stack: Stack, job: str) -> int:
    """Return the newest replicated step that the catalogue knows; 0: none, or it is away."""
    try:
        rows = levels(stack, job)
    except OSError:
        return 0
    return max((step for step, row in rows.items() if row["replicated_at"]), default=0)
