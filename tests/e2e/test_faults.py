"""What fails while it trains: agents, metadata, memory, bytes, old trainers.

Each test is a row of docs/explanation/failure-model.md. Real processes throughout.
"""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tests.e2e.stack import Ranks, SharedStack, Stack, running_stack, until
from tests.e2e.test_bit_identity import final, finals, restored

STACK = SharedStack(nodes=2, HOLDFAST_NODE_LEASE_S="3")


def levels(stack: Stack, job: str) -> dict[int, dict]:
    """Return the checkpoints of a job by step, as REST shows them."""
    return {row["step"]: row for row in stack.rest(f"jobs/{job}/checkpoints")}


def is_known(stack: Stack, job: str, step: int) -> bool:
    """Tell whether the catalogue has a step of a job; false while nobody answers."""
    try:
        return step in levels(stack, job)
    except OSError:
        return False


def heads_of(arena: Path, job: str) -> Iterator[tuple[Path, bytes]]:
    """Yield the sealed segments of a job and how each begins; those in motion are passed over."""
    for path in arena.glob("*.seg"):
        with suppress(FileNotFoundError):
            head = path.read_bytes()[:4096]
            if f'"holdfast.job":"{job}"'.encode() in head:
                yield path, head


def segment_of(arena: Path, job: str, rank: int) -> Path:
    """Return the newest sealed segment of ``rank`` of a job in an arena."""
    found = []
    for path, head in heads_of(arena, job):
        if f'"holdfast.rank":"{rank}"'.encode() in head:
            step = re.search(rb'"holdfast.step":"(\d+)"', head)
            found.append((int(step[1]), path))
    return max(found)[1]


def flip_a_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        old = file.read(1)
        file.seek(-100, os.SEEK_END)
        file.write(bytes([old[0] ^ 0xFF]))


OUTAGES_MAX = 5
ACKNOWLEDGED_MIN = 3
STILL_COUNT = 8
"""Looks at an arena, one every 0.05 s, after which an agent has done what it had to do."""


@contextmanager
def without_metadata(stack: Stack):
    """Kill metadata and keep the supervisor from bringing it back meanwhile."""
    until(lambda: answers(stack), "metadata, which may have been away a moment ago")
    supervisor = stack.pid("holdfast_services.supervisor")
    os.kill(supervisor, signal.SIGSTOP)
    try:
        os.kill(stack.metadata_pid(), signal.SIGKILL)
        yield
    finally:
        os.kill(supervisor, signal.SIGCONT)


@pytest.mark.parametrize("victim", ["agent", "metadata"])
def test_training_goes_on_without_agent_or_metadata_and_the_catalogue_catches_up(
    stack, job, victim
):
    """P4, G17, G18, X0, X16; interleaving 16: killed while it trains, back under the supervisor.

    ``close`` waits for the last step, however long the victim was away.
    """
    expected = finals(stack, steps="40")
    ranks = stack.ranks("--job", job, "--steps", "40", "--pause-s", "0.1")
    ranks.until_step(8)
    pid = stack.agent_pid(0) if victim == "agent" else stack.metadata_pid()
    os.kill(pid, signal.SIGKILL)

    assert [final(text) for text in ranks.succeed()] == expected
    assert 40 in levels(stack, job)


@pytest.mark.parametrize("saves", [1, 10])
def test_saves_go_on_without_metadata_and_the_newest_is_committed_afterwards(stack, job, saves):
    """P5, X0: no save waits for metadata, its return is enough for the last one."""
    ranks = stack.ranks("--job", job, "--steps", "400", "--pause-s", "0.2", "--replicas", "0")
    ranks.until_step(4)
    with without_metadata(stack):
        before = max(map(int, re.findall(r"^step (\d+) ", ranks.outputs[0], re.MULTILINE)))

        def saved_since() -> list[int]:
            return [step for step in steps_of(stack.arena(0), job) if step >= before + saves]

        until(saved_since, f"{saves} saves without metadata")
        ranks.kill()
        ranks.wait()
        left = max(saved_since())
    until(lambda: is_known(stack, job, left), f"step {left} in the catalogue")
    [output] = stack.ranks("--job", job, "--steps", "1", "--replicas", "0").succeed()

    assert restored(output) == left
    assert ranks.outputs[0].count("metadata") <= 2, "said once, not for each step"


def test_a_run_that_ends_without_metadata_says_what_is_not_safe_and_loses_nothing(stack, job):
    """X0: exit code and message name the step; metadata commits it when it is back."""
    ranks = stack.ranks(
        "--job", job, "--steps", "20", "--pause-s", "0.1", "--replicas", "0", "--close-s", "1"
    )
    ranks.until_step(8)
    with without_metadata(stack):
        codes = ranks.wait()
    [output] = ranks.outputs

    assert codes == [3], output
    assert re.search(
        r"^refused outcome_unknown: training ends, but step 20 is ", output, re.MULTILINE
    )
    until(lambda: is_known(stack, job, 20), "step 20 in the catalogue")


def test_a_node_lost_during_an_outage_costs_no_step_that_its_neighbour_holds(stack, job):
    """P5, X0: copies went on between the agents, so the newest step is whole without the node."""
    places = {"world_size": 2, "nodes": (0, 1)}
    common = ("--job", job, "--pause-s", "0.1")
    ranks = stack.ranks(*common, "--steps", "4000", **places)
    ranks.until_step(4)
    held: set[int] = set()

    def newest() -> int:
        """A step of which both ranks' shards lie on the node that stays, and is new."""
        whole = {step for step, ranks in steps_of(stack.arena(0), job).items() if len(ranks) == 2}
        return max((step for step in whole - held), default=0)

    for _ in range(OUTAGES_MAX):
        until(newest, "copies go on with metadata")
        with without_metadata(stack):
            held |= steps_of(stack.arena(0), job).keys()
            with suppress(AssertionError):
                # If it went between two words of a commit, neither step may go, nor a third come.
                until(newest, "a step of the outage, both shards on one node", timeout_s=10.0)
            ranks.kill(signal.SIGSTOP)  # each step gives way to the next, which may be on its way
            until_still([stack.arena(0), stack.arena(1)])
            if not newest():
                ranks.kill(signal.SIGCONT)
                continue
            ranks.kill()
            ranks.wait()
            left = newest()
            os.kill(stack.agent_pid(1), signal.SIGKILL)
            for path in stack.arena(1).glob("*.*"):
                path.unlink(missing_ok=True)
            break
    else:
        raise AssertionError(f"in none of {OUTAGES_MAX} outages copies went on")
    outputs = stack.ranks(*common, "--steps", "1", **places).succeed()

    assert {restored(text) for text in outputs} == {left}


def steps_of(arena: Path, job: str) -> dict[int, set[int]]:
    """Return step -> ranks of a job's sealed segments in an arena."""
    found: dict[int, set[int]] = {}
    for _, head in heads_of(arena, job):
        step = re.search(rb'"holdfast.step":"(\d+)"', head)
        rank = re.search(rb'"holdfast.rank":"(\d+)"', head)
        if step and rank:
            found.setdefault(int(step[1]), set()).add(int(rank[1]))
    return found


def test_a_node_lost_with_its_memory_is_rebuilt_from_its_neighbour(stack, job):
    """P5, F55, F67: agent and arena gone; the fresh agent fetches before its ranks ask."""
    places = {"world_size": 2, "nodes": (0, 1)}
    common = ("--job", job, "--steps", "12", "--wait", "replicated")
    expected = finals(stack, steps="12", world_size=2)
    stack.ranks(*common, "--kill-at", "9", "--kill-ranks", "0", "1", **places).wait()
    arena = stack.arena(1)
    old = stack.agent_pid(1)
    for path in arena.glob("*.*"):
        path.unlink(missing_ok=True)
    os.kill(old, signal.SIGKILL)

    outputs = stack.ranks(*common, **places).succeed()

    assert [restored(text) for text in outputs] == [8, 8]
    assert [final(text) for text in outputs] == expected
    assert re.search(r"^restored 8 \{.*'peer': \d+", outputs[1], re.MULTILINE), outputs[1]


def test_a_flipped_byte_in_memory_is_found_and_survived(stack, job):
    """P3, F70; interleaving 15: the copy on the other node is used, the bad one quarantined."""
    places = {"world_size": 2, "nodes": (0, 1)}
    common = ("--job", job, "--steps", "12", "--wait", "replicated")
    expected = finals(stack, steps="12", world_size=2)
    stack.ranks(*common, "--kill-at", "8", "--kill-ranks", "0", "1", **places).wait()
    flip_a_byte(segment_of(stack.arena(0), job, rank=0))

    outputs = stack.ranks(*common, **places).succeed()

    assert [restored(text) for text in outputs] == [7, 7]
    assert [final(text) for text in outputs] == expected
    assert "'peer'" in outputs[0]


def test_when_the_last_source_is_corrupt_all_ranks_load_the_older_step(stack, job):
    """F68, F69; interleaving 2: rank 0 could load the newer step, rank 1's last source is bad.

    Without metadata nothing is committed, so an older committed step and a newer one, sealed after
    metadata went, lie in memory side by side. Rank 1's newer segment, of which there is one copy,
    is damaged; its agent reports only after the next attempt has begun, so the newer step is
    proposed, not committed. The older one is acknowledged: a rank has two slots, so of three
    committed steps the first has given way to one that both agents know of.
    """
    places = {"world_size": 2, "nodes": (0, 1)}
    common = ("--job", job, "--pause-s", "0.05", "--replicas", "0")
    ranks = stack.ranks(*common, "--steps", "400", **places)
    ranks.until_step(5)
    until(lambda: len(levels(stack, job)) >= ACKNOWLEDGED_MIN, "an acknowledged step")
    supervisor, agent = stack.pid("holdfast_services.supervisor"), stack.agent_pid(1)
    arenas = [stack.arena(0), stack.arena(1)]
    os.kill(supervisor, signal.SIGSTOP)
    os.kill(stack.metadata_pid(), signal.SIGKILL)
    until(lambda: not answers(stack), "the end of metadata")
    known = max(newest_sealed(arenas, job))
    until(
        lambda: stopped_with_newer(ranks, arenas, job, known), "a newer sealed step on both nodes"
    )
    ranks.kill()
    ranks.wait()
    newer = sealed_step(segment_of(arenas[1], job, rank=1))
    flip_a_byte(segment_of(arenas[1], job, rank=1))
    until(lambda: not any_session(arenas), "the end of the old sessions")

    resumed = stack.ranks(*common, "--steps", str(newer + 2), **places)
    until(lambda: all(any_session([arena]) for arena in arenas), "ranks that ask to register")
    os.kill(agent, signal.SIGSTOP)
    os.kill(supervisor, signal.SIGCONT)
    until(lambda: began(stack, job, generation=2), "the second attempt")
    os.kill(agent, signal.SIGCONT)
    steps = {restored(text) for text in resumed.succeed()}

    assert len(steps) == 1, resumed.outputs
    assert 0 < steps.pop() < newer


def any_session(arenas: list[Path]) -> bool:
    return any(any((arena / "sessions").iterdir()) for arena in arenas)


def began(stack: Stack, job: str, *, generation: int) -> bool:
    """Tell whether an attempt of this generation was registered; false while nobody answers."""
    try:
        return stack.rest(f"jobs/{job}")["generation"] >= generation
    except OSError:
        return False


def answers(stack: Stack) -> bool:
    try:
        stack.rest("jobs")
    except OSError:
        return False
    return True


def sealed_step(path: Path) -> int:
    found = re.search(rb'"holdfast.step":"(\d+)"', path.read_bytes()[:4096])
    assert found
    return int(found[1])


def stopped_with_newer(ranks: Ranks, arenas: list[Path], job: str, known: int) -> bool:
    """Stop the ranks while a step after ``known`` lies sealed in every arena; else let them go on.

    Without metadata that step gives way to each next one, so it is there between two saves only.
    """
    if not sealed_everywhere(arenas, job, after=known):
        return False
    ranks.kill(signal.SIGSTOP)
    until_still(arenas)
    if sealed_everywhere(arenas, job, after=known):
        return True
    ranks.kill(signal.SIGCONT)
    return False


def until_still(arenas: list[Path]) -> None:
    """Wait until the agents have done what they had to do for ranks that are stopped."""
    seen: list[list[str]] = []

    def still() -> bool:
        seen.append(sorted(path.name for arena in arenas for path in arena.glob("*.*")))
        return len(seen) > STILL_COUNT and all(names == seen[-1] for names in seen[-STILL_COUNT:])

    until(still, "arenas in which nothing moves")


def sealed_everywhere(arenas: list[Path], job: str, *, after: int) -> bool:
    """Tell whether the newest sealed step is the same in every arena, and later than ``after``."""
    newest = set(newest_sealed(arenas, job))
    return len(newest) == 1 and newest.pop() > after


def newest_sealed(arenas: list[Path], job: str) -> list[int]:
    """Return the newest sealed step of each arena, 0 where none lies."""
    return [max(steps_of(arena, job), default=0) for arena in arenas]


def test_a_stopped_old_trainer_that_wakes_up_writes_nowhere_anyone_reads(stack, job):
    """P2, G12; interleaving 5: SIGSTOP, a successor takes over, SIGCONT."""
    common = ("--job", job, "--pause-s", "0.05")
    expected = finals(stack, steps="60")
    old = stack.ranks(*common, "--steps", "400")
    old.until_step(10)
    old.kill(signal.SIGSTOP)
    new = stack.ranks(*common, "--steps", "60", "--takeover", HOLDFAST_LAUNCH="second")
    new.until_step(20)
    old.kill(signal.SIGCONT)

    assert [final(text) for text in new.succeed()] == expected
    old.kill()
    old.wait()
    rows = levels(stack, job)
    newest = rows[max(step for step in rows if not rows[step].get("superseded"))]
    assert newest["step"] == 60


def test_a_second_launch_under_the_same_name_is_refused_while_the_first_lives(stack, job):
    """G12; interleaving 12."""
    first = stack.ranks("--job", job, "--steps", "400", "--pause-s", "0.05")
    first.until_step(3)

    second = stack.ranks("--job", job, "--steps", "5", HOLDFAST_LAUNCH="other")
    codes = second.wait()
    [output] = second.outputs

    assert first.trainers[0].process.poll() is None
    first.kill()
    first.wait()
    assert codes == [3]
    assert "refused already_exists" in output
    holder = f"{socket.gethostname()}:{first.trainers[0].process.pid}:"
    assert f"another launch trains job {job} now: {holder}" in output


def test_without_metadata_a_start_is_an_error_never_no_checkpoint(stack, job):
    stack.ranks("--job", job, "--steps", "3", "--wait", "local").succeed()
    os.kill(stack.pid("holdfast_services.supervisor"), signal.SIGSTOP)
    os.kill(stack.metadata_pid(), signal.SIGKILL)
    try:
        ranks = stack.ranks("--job", job, "--steps", "5", HOLDFAST_RESTORE_TIMEOUT="3")
        codes = ranks.wait()
    finally:
        os.kill(stack.pid("holdfast_services.supervisor"), signal.SIGCONT)

    [output] = ranks.outputs
    assert codes == [3]
    assert "refused unavailable" in output
    assert "restored" not in output


def test_a_copy_thread_that_hangs_costs_saves_and_not_the_run(stack, job):
    """P4; interleaving 13: the gate gives up once, every step runs, the end is bit-identical."""
    expected = finals(stack, steps="12")

    ranks = stack.ranks("--job", job, "--steps", "12", "--hang-copies", "--close-s", "5")
    codes = ranks.wait()
    [output] = ranks.outputs

    assert codes == [3], "the last step is not safe"
    assert "refused precondition: training ends, but step 12 " in output
    assert [final(output)] == expected
    assert "held an optimizer step up" in output
    assert "the copy of an earlier step does not end" in output


def test_a_rank_that_fails_does_not_wait_for_levels_that_cannot_come(stack, job):
    """F66: exit waits, but not after an exception: its launcher waits to start it again.

    Without metadata the last save never reaches a level; only the deadline of a clean exit (30 s)
    or the short one of a failure (2 s) ends the wait.
    """
    common = ("--job", job, "--steps", "40", "--pause-s", "0.5", "--save", "5")
    ranks = stack.ranks(*common, "--fail-at", "6")
    ranks.until_step(2)
    supervisor = stack.pid("holdfast_services.supervisor")
    os.kill(supervisor, signal.SIGSTOP)
    try:
        os.kill(stack.metadata_pid(), signal.SIGKILL)
        codes = ranks.wait(timeout_s=20)
    finally:
        os.kill(supervisor, signal.SIGCONT)

    assert codes == [1], ranks.outputs
    assert "a bug in the training script" in ranks.outputs[0]


def test_every_saved_step_of_a_time_trigger_is_whole_on_ranks_of_different_speed(stack, job):
    """F22, F26; interleaving 9: rank 1 computes 3 x slower; the ranks meet in all-reduce."""
    common = ("--job", job, "--steps", "60", "--save", "seconds", "--pause-s", "0.03")
    stack.ranks(*common, "--skew", "2", world_size=2, nodes=(0, 1)).succeed()

    rows = levels(stack, job)
    assert rows, "no save was announced"
    assert all(row["local_at"] for row in rows.values()), rows


def test_a_policy_at_exit_saves_the_last_step_and_no_other(stack, job):
    """F24, G7: on all ranks as they end, and not after an exception: that is no end of a step."""
    places = {"world_size": 2, "nodes": (0, 1)}
    common = ("--job", job, "--save", "exit")
    stack.ranks(*common, "--steps", "5", **places).succeed()
    until(lambda: levels(stack, job), "it is committed")
    failing = stack.ranks(*common, "--steps", "9", "--fail-at", "7", **places)
    assert failing.wait() == [1, 1], failing.outputs
    outputs = stack.ranks(*common, "--steps", "6", **places).succeed()

    assert {5} == {restored(text) for text in outputs}
    until(lambda: {5, 6} == levels(stack, job).keys(), "nothing of step 7, and the one after")


def test_sigterm_saves_once_more_on_all_ranks_and_ends_with_143(stack, job):
    """F24, F27: both ranks save the same step, then end as they would have."""
    places = {"world_size": 2, "nodes": (0, 1)}
    common = ("--job", job, "--save", "preemption", "--pause-s", "0.1")
    ranks = stack.ranks(*common, "--steps", "600", **places)
    ranks.until_step(5)
    ranks.kill(signal.SIGTERM)

    assert ranks.wait() == [143, 143], ranks.outputs
    outputs = stack.ranks(*common, "--steps", "1", **places).succeed()
    steps = {restored(text) for text in outputs}
    assert len(steps) == 1
    assert steps.pop() >= 5


def test_a_job_that_does_not_fit_is_refused_at_construction_with_the_sum():
    """P8, F43"""
    with running_stack(nodes=1, HOLDFAST_BUDGET="64KiB") as small:
        ranks = small.ranks()
        codes = ranks.wait()
        [output] = ranks.outputs

    assert codes == [3]
    assert "refused exhausted" in output
    assert re.search(r": 2 slots x \S+ KiB own = \S+ KiB, but .* budget is 64 KiB", output)
