"""The scheduler over a real stack: jobs grow, shrink and move, and things are killed then.

The script ends with the same bits whatever the number of nodes, so they show every step that was
lost, or done twice.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time
import uuid
from pathlib import Path

import optuna
import pytest
from tests.e2e.in_peace import SCRIPT, bits_in_peace
from tests.e2e.stack import processes, running_stack, until

from holdfast.core.job_spec import JobSpec
from holdfast.errors import PreconditionError
from holdfast.integrations.optuna import JobObjective

MESHED = Path(__file__).with_name("meshed_trainer.py")
TRIAL = Path(__file__).with_name("trial.py")
STEPS = 150
STEP_S = "0.5"
"""So slow that no job ends before it is told to: each rescale takes a few seconds."""
END_S_MAX = 200.0
STRIKE_S_MAX = 3.0
SEEDS = [int(seed) for seed in os.environ.get("HOLDFAST_TEST_SEEDS", "5").split(",")]


@pytest.fixture(scope="module")
def calm():
    """The bits at the end without Holdfast."""
    return bits_in_peace(STEPS)


@pytest.fixture(scope="module")
def stack():
    """Two nodes with a place for one rank each."""
    with running_stack(
        2, "--scheduler", "--gpus", "1",
        HOLDFAST_NODE_LEASE_S="20", HOLDFAST_PLAN_S="1", HOLDFAST_POLICY="fifo",
    ) as running:  # fmt: skip
        yield running


class Job:
    """One job of the stack, and what its ranks have said."""

    def __init__(self, stack, folder, gpus="1:2", *options, script=SCRIPT, save="1", words=None):
        self.stack, self.name = stack, f"job-{uuid.uuid4().hex[:6]}"
        self.go = folder / f"{self.name}.go"
        if words is None:
            words = ("--steps", str(STEPS), "--save", save, "--step-s", STEP_S)
        self.submitted = stack.holdfast(
            "submit", "--job", self.name, "--gpus", gpus, "--grace", "20", *options, "--",
            "--no-standby", str(script), "--job", self.name, "--go", str(self.go), *words,
        )  # fmt: skip

    @property
    def facts(self):
        return self.stack.scheduler(f"jobs/{self.name}")

    def cancel(self):
        self.stack.holdfast("cancel", self.name, check=False)

    def logs(self):
        folders = sorted((self.stack.home / "execute").glob("*/logs"))
        return {
            f"{folder.parent.name} {path.name}": path.read_text(errors="replace")
            for folder in folders
            for path in sorted(folder.glob(f"{self.name}.*.log"))
        }

    def said(self, pattern):
        """Return what all ranks have said, in the order of their logs."""
        return [
            found
            for text in self.logs().values()
            for found in re.findall(pattern, text, re.MULTILINE)
        ]

    def world(self):
        """Return the number of ranks of the newest round that has restored."""
        found = [(int(step), int(world)) for step, world in self.said(r"^restored (\d+) of (\d+)$")]
        return max(found)[1] if found else 0

    def until(self, met, what):
        try:
            until(met, what, END_S_MAX)
        except AssertionError as late:
            told = "\n---\n".join(f"{name}\n{text[-1500:]}" for name, text in self.logs().items())
            raise AssertionError(f"{late}: {self.facts}\n{told}\n{self.stack.log()}") from late

    def until_state(self, *states):
        self.until(lambda: self.facts["state"] in states, f"{self.name} is {states}")

    def until_world(self, count):
        self.until(lambda: self.world() == count, f"{self.name} trains on {count}")

    def until_done(self, count):
        """Wait until its ranks have done so many steps more."""
        before = len(self.said(r"^did "))
        self.until(lambda: len(self.said(r"^did ")) >= before + count, "steps")

    def close(self):
        self.cancel()
        until(lambda: not self.left(), f"nothing of {self.name} is left", END_S_MAX)

    def left(self):
        return processes(f"TORCHELASTIC_RUN_ID={self.name}") + processes("--ending", self.name)


def test_a_job_grows_and_shrinks_and_no_step_is_lost_or_done_twice(stack, tmp_path, calm):
    """F95, F99, G24: one round for each rescale, and each begins where the last has ended.

    The scheduler is killed in the middle of one, all executors in the middle of another.
    """
    job = Job(stack, tmp_path)
    other = None
    try:
        job.until_world(1)
        job.until_world(2)  # it has said nothing of how it scales: as its bounds say
        job.until_done(4)
        other = Job(stack, tmp_path, "1", "--priority", "5")
        kill(victims(stack, job, 0)["scheduler"])
        job.until_world(1)
        other.until_world(1)
        stack_answers(stack)
        assert "number 1 of 2 by priority 5" in other.facts["why"]
        other.cancel()
        for node in range(2):
            kill(victims(stack, job, node)["executor"])
        job.until_world(2)
        job.until_done(4)
        job.go.touch()
        job.until_state("ended")

        assert job.facts["starts"] == 4
        did = [
            [int(n) for n in re.findall(r"^did (\d+)$", t, re.MULTILINE)]
            for t in job.logs().values()
        ]
        for steps in did:
            assert steps == sorted(set(steps)), "no rank does a step twice"
        assert {step for steps in did for step in steps} == set(range(1, STEPS + 1))
        assert set(job.said(r"^final (\w+)$")) == set(calm)
    finally:
        job.close()
        if other:
            other.close()


def test_a_job_is_given_a_mesh_with_its_gpus_and_goes_on_in_it_with_the_same_bits(stack, tmp_path):
    """G26: tensor parallel over two ranks where it was over one, by a rescale of the scheduler."""
    job = Job(
        stack, tmp_path, "1:2", "--mesh", "dp=1,tp=1", "--mesh", "dp=1,tp=2", script=MESHED,
        words=(),
    )  # fmt: skip
    try:
        job.until(lambda: set(job.said(r"^mesh (.+)$")) == {"(1, 1)", "(1, 2)"}, "another mesh")
        job.go.touch()
        job.until_state("ended")
        left = dict(job.said(r"^step (\d+) (\w+)$"))
        loaded = {(step, bits) for step, bits in job.said(r"^loaded (\d+) (\w+)$") if step != "0"}

        assert len(loaded) == 1
        assert all(left[step] == bits for step, bits in loaded)
    finally:
        job.close()


def test_people_are_told_what_is_wrong(stack, tmp_path):
    """F105, F107: a script's exception ends its job with its words; what never fits is refused."""
    bad = tmp_path / "bad.py"
    bad.write_text("raise ValueError('bad batch')")
    job = Job(stack, tmp_path, "2", script=bad)
    job.until_state("failed")
    told = stack.holdfast("explain", job.name).stdout
    assert "ValueError: bad batch" in told
    listed = stack.holdfast("jobs", "--all").stdout
    assert re.search(rf"^{job.name} +failed .*ValueError: bad batch", listed, re.MULTILINE)

    command = ("submit", "--job", "wide", "--gpus", "3", "--", "train.py")
    refused = stack.holdfast(*command, check=False)
    assert refused.returncode == 1
    assert "wide needs 3 GPUs of one kind: there are 2 nodes x 1 = 2 of cpu" in refused.stderr
    dry = stack.holdfast("submit", "--job", "dry", "--dry-run", "--", "train.py").stdout
    assert "dry would be taken on: 1 GPU, priority 0" in dry
    gone = stack.holdfast("explain", "dry", check=False)
    assert "no job dry was submitted" in gone.stderr
    assert "place  job" in stack.holdfast("queue").stdout


def test_trials_of_a_tuner_are_jobs_that_are_pruned_and_resumed(stack, tmp_path):
    """F109: the first and the last have the same parameters, and so are one job."""
    objective = JobObjective(
        JobSpec(name="study", command=(), folder=str(tmp_path)),
        lambda trial: [
            "--no-standby", "--max-restarts", "0",
            str(TRIAL), str(trial.suggest_float("rate", 0.0, 10.0)),
        ],
        metric="loss",
        scheduler=stack.info["scheduler_url"],
        metadata=stack.info["rest_url"],
    )  # fmt: skip
    study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=5.0))
    for rate in (0.5, 9.0, 0.0, 0.5):
        study.enqueue_trial({"rate": rate})

    study.optimize(objective, n_trials=4, catch=(PreconditionError,))

    assert [trial.state.name for trial in study.trials] == [
        "COMPLETE",
        "PRUNED",
        "FAIL",
        "COMPLETE",
    ]
    assert study.best_value == 0.5
    first, pruned, *_ = study.trials
    assert first.intermediate_values[4] == 0.5
    assert min(pruned.intermediate_values) >= 1
    jobs = {job["job"]: job for job in stack.scheduler("jobs") if job["job"].startswith("study-")}
    assert sorted(job["state"] for job in jobs.values()) == ["cancelled", "ended", "failed"]
    [ended] = [name for name, job in jobs.items() if job["state"] == "ended"]
    logs = sorted((stack.home / "execute").glob(f"*/logs/{ended}.*.log"))
    said = "".join(path.read_text() for path in logs)
    assert sorted(re.findall(r"began at (\d+)", said)) == ["0", "4"]


def victims(stack, job, index):
    """Return the pids, on a node and beside it, of what may be killed; None: it is not there."""
    node = stack.node(index)["name"]
    return {
        "scheduler": stack.pid("holdfast_services.scheduler"),
        "metadata": stack.metadata_pid(),
        "executor": next(iter(processes("execute", "--gpus", f"{node}.executor.ready")), None),
        "launcher": next(iter(processes("--ending", job.name, f"execute/{node}/")), None),
    }


def kill(pid):
    assert pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def strike(stack, job, rng):
    """Kill something that is there, at some moment of the next seconds."""
    time.sleep(rng.random() * STRIKE_S_MAX)
    index = rng.randrange(2)
    there = victims(stack, job, index)
    what = rng.choice(sorted(there))
    print(f"kill {what} of {index}: {there[what]}", flush=True)
    if there[what] is not None:
        kill(there[what])


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_is_killed_during_a_rescale_no_bit_is_lost(stack, tmp_path, calm, seed):
    """Scheduler, executor, metadata, launcher, twice; and nothing is left behind."""
    rng = random.Random(seed)
    job = Job(stack, tmp_path)
    other = None
    try:
        job.until_world(2)
        other = Job(stack, tmp_path, "1", "--priority", "5")
        strike(stack, job, rng)
        other.until_world(1)
        until(lambda: stack.pid("holdfast_services.scheduler"), "it is back")
        stack_answers(stack)
        other.cancel()
        strike(stack, job, rng)
        stack_answers(stack)
        job.until_state("running")
        job.go.touch()
        job.until_state("ended")

        assert set(job.said(r"^final (\w+)$")) == set(calm)
    finally:
        stack_answers(stack)
        job.close()
        if other:
            other.close()


def stack_answers(stack):
    """Wait until the scheduler is back."""

    def answers():
        with contextlib.suppress(OSError):  # nobody listens, or its database is busy
            return stack.scheduler("jobs") is not None
        return False

    until(answers, "the scheduler answers")
