"""What users ask for themselves: saves, several Checkpointers, another beginning."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e.stack import environment, running_stack, until
from tests.e2e.test_bit_identity import final, restored
from tests.e2e.test_durable import store_of
from tests.e2e.test_faults import levels
from tests.e2e.test_faults import steps_of as steps_in

PAIR, START, DECIDE = (
    Path(__file__).with_name(name) for name in ("pair.py", "start.py", "decide.py")
)


@pytest.fixture(scope="module")
def stack():
    with running_stack(nodes=2, HOLDFAST_NODE_LEASE_S="3") as running:
        yield running


def steps_of(stack, job):
    """Return the steps of the job's checkpoints that may be restored, newest first."""
    if job not in {one["job"] for one in stack.rest("jobs")}:
        return []
    return [r["step"] for r in stack.rest(f"jobs/{job}/checkpoints") if not r["superseded"]]


def test_a_save_that_a_rank_or_an_operator_asks_for_is_made_by_all_at_one_step(stack):
    """``request_save``, ``holdfast save``: announced as time triggers are; else there is none."""
    places = {"world_size": 2, "nodes": (0, 1)}
    run = ("--job", "asked", "--save", "never", "--request-at", "5", "--pause-s", "0.1")
    ranks = stack.ranks(*run, "--steps", "6000", **places)
    until(lambda: steps_of(stack, "asked"), "a checkpoint")
    rolled_back = stack.holdfast("rollback", f"asked@{steps_of(stack, 'asked')[0]}", check=False)
    said = stack.holdfast("save", "asked", "--wait", "60s").stdout
    saved = until(lambda: two_saves(ranks.outputs), "both say what they saved")
    ranks.kill()
    ranks.wait()
    refused = until(lambda: stack.holdfast("save", "asked", check=False).stderr, "it has ended")

    assert saved[0] == saved[1]
    assert 5 < saved[0][0]
    assert f"step {saved[0][1]} of asked is safe" in said
    assert "asked is training: attempt 1, started by" in rolled_back.stderr
    assert "asked cannot save now: not all ranks of it train" in refused


def two_saves(outputs):
    """Return the first two steps that each rank has saved, once it says so."""
    saved = [list(map(int, re.findall(r"^step (\d+) [^-]", o, re.MULTILINE))) for o in outputs]
    return saved if all(len(steps) == 2 for steps in saved) else None


def test_a_single_rank_saves_at_its_next_step_when_asked(stack):
    """``request_save``: nobody has to be told."""
    run = ("--job", "alone", "--save", "never", "--request-at", "5", "--replicas", "0")
    [output] = stack.ranks(*run, "--steps", "8").succeed()

    assert ["5"] == re.findall(r"^step (\d+) [a-z]", output, re.MULTILINE)


def pair(stack, job, *arguments):
    return stack.ranks("--job", job, *arguments, script=PAIR)


def test_two_checkpointers_of_one_process_come_back_bit_identical(stack, job):
    """Roles: two runs of one job side by side, saved and restored together (P5)."""
    killed = pair(stack, job, "--steps", "20", "--kill-at", "12")
    assert [-signal.SIGKILL] == killed.wait()
    [resumed] = pair(stack, job, "--steps", "20").succeed()
    [whole] = pair(stack, f"{job}-calm", "--steps", "20").succeed()

    assert "restored generator 12" in resumed
    assert "restored critic 12" in resumed
    assert "restored critic 0" in whole
    assert final(whole) == final(resumed)
    assert {f"{job}/critic", f"{job}/generator"} <= {one["job"] for one in stack.rest("jobs")}


def test_a_signal_saves_every_checkpointer_of_a_process_before_it_ends(stack, job):
    """F24, with two: both hear of it, both save, then the process ends with 143."""
    ranks = pair(stack, job, "--steps", "600", "--preemption", "--pause-s", "0.05")
    ranks.until_step(5)
    ranks.kill(signal.SIGTERM)

    assert [143] == ranks.wait(), ranks.outputs
    [output] = pair(stack, job, "--steps", "1", "--preemption").succeed()

    steps = re.findall(r"^restored \w+ (\d+)", output, re.MULTILINE)
    assert 2 == len(steps)
    assert 1 == len(set(steps))
    assert int(steps[0]) >= 5


def begin(stack, job, *arguments, launch="one", code=0):
    """Run a rank of ``start.py`` to its end; return what it printed."""
    ranks = stack.ranks("--job", job, *arguments, script=START, HOLDFAST_LAUNCH=launch)
    codes = ranks.wait()
    assert codes == [code], ranks.outputs
    return ranks.outputs[0]


def test_torchrun_restarts_a_script_that_starts_over_and_loses_nothing(stack):
    """The trap of fresh=True: killed at step 12, torchrun runs the same line again."""
    begin(stack, "again", "--steps", "9")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=2",
        "--nproc-per-node=1", str(START), "--job", "again", "--fresh",
        "--steps", "20", "--kill-at", "12",
    ]  # fmt: skip
    env = environment(HOLDFAST_AGENT=stack.node(0)["agent"])
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=True)

    assert ["0", "12"] == re.findall(r"^restored (\d+)", done.stdout, re.MULTILINE), done.stdout
    assert 20 == steps_of(stack, "again")[0]


def test_a_part_is_added_once_and_restored_with_the_rest(stack):
    """X6: bit for bit, also the launch after it, which is strict again."""
    begin(stack, "part", "--steps", "5")
    assert "refused invalid_request: state 'average' exists only in the script" in begin(
        stack, "part", "--steps", "8", "--average", code=3
    )

    whole = begin(stack, "part", "--steps", "8", "--average", "--loose")
    assert "restored 5 average" in whole
    again = begin(stack, "part", "--steps", "8", "--average")

    assert "restored 8 \n" in again
    assert final(whole) == final(again)


def test_an_older_step_is_gone_back_to_once_per_launch(stack):
    """F20: from the object store; the launch that comes again keeps what it has trained."""
    begin(stack, "back", "--steps", "10", "--persist", "5")

    text = begin(stack, "back", "--steps", "12", "--back-to", "3", code=3)
    assert "refused not_found: step 3 cannot be restored" in text
    assert "steps that can: 10" in text
    first = begin(stack, "back", "--steps", "7", "--back-to", "5", "--persist", "5")
    again = begin(stack, "back", "--steps", "8", "--back-to", "5", "--persist", "5")

    assert "restored 5" in first
    assert "restored 7" in again
    assert "launch (step 5 launch:one) already started over or went back" in again
    assert {8, 5} <= set(steps_of(stack, "back"))
    assert 10 not in steps_of(stack, "back")


def test_a_model_is_built_from_the_notes_of_the_step_that_is_restored(stack):
    """Decide, build, load: what the second launch asks for is passed over."""
    outputs = []
    for width in ("5", "9"):
        ranks = stack.ranks("--job", "built", "--width", width, script=DECIDE)
        assert [0] == ranks.wait(), ranks.outputs
        outputs.append(ranks.outputs[0])
    first, second = outputs

    assert "decided 0 5" in first
    assert "decided 2 5" in second
    [ended] = re.findall(r"^ends 2 (\S+)", first, re.MULTILINE)
    assert f"begins 2 {ended}" in second
    for output in outputs:
        refused = re.findall(r"^refused (.*)", output, re.MULTILINE)
        assert 4 == len(refused), output
        assert all("call restore() before the first step" in said for said in refused[:2])
        assert "decide() was called already" in refused[2]
        assert "pass step= to decide()" in refused[3]


def test_what_saves_and_a_restore_cost_is_shown_with_the_job(stack):
    """F110: measured by the trainer, through agent and catalogue, to REST."""
    run = ("--job", "costs", "--replicas", "0")
    stack.ranks(*run, "--steps", "5").succeed()
    first = stack.rest("jobs/costs")["costs"]
    stack.ranks(*run, "--steps", "8").succeed()
    second = stack.rest("jobs/costs")["costs"]

    saved, restored = {"stall_s", "copy_s", "save_bytes"}, {"load_s", "restored_bytes"}
    assert saved <= first.keys()
    assert not restored & first.keys()
    assert saved | restored <= second.keys()
    assert first["save_bytes"] == second["save_bytes"] == second["restored_bytes"]


def test_a_finished_job_is_removed_everywhere_and_its_name_starts_fresh(stack, job):
    """F92: neither job nor stack goes while ranks train; the summary comes before the question."""
    places = {"world_size": 2, "nodes": (0, 1)}
    run = ("--job", job, "--persist", "5", "--replicas", "1")
    ranks = stack.ranks(*run, "--steps", "400", "--pause-s", "0.1", **places)
    ranks.until_step(6)
    for command in (("rm", job, "--yes"), ("down",)):
        refused = stack.holdfast(*command, check=False)
        assert refused.returncode == 1, refused.stdout
        assert "train" in refused.stderr
    until(lambda: objects(stack, job), "something durable")
    ranks.kill()
    ranks.wait()
    until(lambda: not stack.rest(f"jobs/{job}")["running"], "the end of the job")
    refused = stack.holdfast("rm", job, check=False)
    assert "in the object store" in refused.stderr
    assert "say --yes" in refused.stderr
    assert segments(stack, job)
    # What a worker puts into the store after the removal waits there for the next sweep.
    until(lambda: not draining(stack, job), "nothing on its way to the store")

    stack.holdfast("rm", job, "--yes")

    until(lambda: not segments(stack, job), "slots freed")
    until(lambda: not objects(stack, job), "objects deleted")
    assert job not in {one["job"] for one in stack.rest("jobs")}
    [again, _] = stack.ranks(*run, "--steps", "3", **places).succeed()
    assert restored(again) == 0


def segments(stack, job):
    """Return the steps of a job that lie in memory, one for each node."""
    return [step for index in (0, 1) for step in steps_in(stack.arena(index), job)]


def objects(stack, job):
    """Return what of a job is in the object store."""
    return list(store_of(stack).glob(f"{job}/**/*.json"))


def draining(stack, job):
    """Return the checkpoints of a job that are on their way to the store."""
    return [row for row in levels(stack, job).values() if row["draining"]]
