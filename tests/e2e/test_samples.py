"""Samples exactly once: ranks come and go inside epochs, killed at random, with workers that fetch
ahead. What the model of each rank saw in the steps that count is hashed, epoch by epoch. F81.
"""

from __future__ import annotations

import hashlib
import random
import re
import subprocess
import sys
from itertools import pairwise, zip_longest
from pathlib import Path

import pytest
from tests.e2e.sampling_rank import EPOCHS, SIZE
from tests.e2e.stack import environment, processes, running_stack, until
from tests.e2e.test_docs import newest_step
from torch.utils.data import DistributedSampler

HERE = Path(__file__).parent
END_S_MAX = 180.0
GOES_ON = re.compile(r"goes on after step (\d+)(?:, in pass (\d+))?")


@pytest.fixture(scope="module")
def stack():
    with running_stack(nodes=1) as running:
        yield running


@pytest.fixture
def launches():
    """What a test has launched; it leaves none behind, also where it fails."""
    launched = []
    yield launched
    for launch in launched:
        launch.process.kill()
        launch.process.wait()


class Launch:
    """One ``holdfast run`` of the script, and what became of it."""

    def __init__(self, stack, folder, job, ranks, number, *, auto):
        self.name, self.ranks = f"{job}{number}", ranks
        self._folder, self._log = folder, folder / f"{number}.log"
        options = ["--auto"] if auto else []
        words = [] if auto else [job]
        command = [
            sys.executable, "-m", "holdfast.cli.main", "run", *options, "--job", job,
            "--no-standby", "--max-restarts", "0", "--nproc-per-node", str(ranks),
            str(HERE / "paced.py"), "0.1", str(folder / "hurry"),
            str(HERE / "sampling_rank.py"), str(folder), *words,
        ]  # fmt: skip
        env = environment(HOLDFAST_AGENT=stack.node(0)["agent"], LAUNCH=self.name)
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                command, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def kill(self):
        """Kill the launcher, and with it all ranks and their workers."""
        assert self.process.poll() is None, self.log
        self.process.kill()
        self.process.wait()
        until(lambda: not processes(f"LAUNCH={self.name}"), "no process is left")

    @property
    def log(self):
        return self._log.read_text()

    def until(self, condition, what):
        """Wait as ``until`` does while it trains; what it said tells why not."""
        try:
            until(lambda: condition() or self.process.poll() is not None, what, END_S_MAX)
        except AssertionError as late:
            raise AssertionError(f"{late}: {self.log}") from None
        assert condition(), f"{what}: it ended with {self.process.poll()}: {self.log}"

    def has_begun(self):
        """Tell whether it has gone on where others were killed."""
        return GOES_ON.search(self.log) is not None

    def began_after(self):
        """Return after which step it went on, and how many passes it had caught up with."""
        found = GOES_ON.search(self.log)
        return (int(found[1]), int(found[2] or 1) - 1) if found else (0, 0)

    def steps(self, count):
        """Return epoch and samples of each rank for the first ``count`` steps; None: of all."""
        skipped = self.began_after()[1]
        lines = [
            (self._folder / f"{self.name}.{rank}").read_text().splitlines()[skipped:][:count]
            for rank in range(self.ranks)
        ]
        assert count is None or {len(of_rank) for of_rank in lines} == {count}, lines
        return [
            [list(map(int, line.split())) for line in step] for step in zip(*lines, strict=True)
        ]


def digest(samples):
    return hashlib.sha256(repr(samples).encode()).hexdigest()


@pytest.mark.parametrize(
    ("auto", "worlds"), [(False, (3, 2, 4)), (True, (2, 3, 1))], ids=["checkpointer", "auto"]
)
def test_each_sample_of_each_epoch_is_seen_once_while_ranks_come_and_go(
    stack, tmp_path, launches, auto, worlds
):
    """3, 2, 4 ranks with a Checkpointer; 2, 3, 1 of a script that knows nothing of it."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance, job = random.Random(seed), f"samples-{'auto' if auto else 'own'}"
    for number, ranks in enumerate(worlds):
        if number + 1 == len(worlds):
            (tmp_path / "hurry").touch()  # nobody watches the last one
        launches.append(Launch(stack, tmp_path, job, ranks, number, auto=auto))
        if number + 1 < len(worlds):
            if number:
                launches[-1].until(launches[-1].has_begun, "it goes on")
            safe = launches[-1].began_after()[0] + chance.randint(2, 14)
            launches[-1].until(lambda: newest_step(stack, job) >= safe, f"step {safe}")  # noqa: B023
            launches[-1].kill()
    assert launches[-1].process.wait(END_S_MAX) == 0, launches[-1].log

    begun = [launch.began_after()[0] for launch in launches]
    ends = [after - before for before, after in pairwise(begun)]
    steps = [
        step
        for launch, count in zip(launches, [*ends, None], strict=True)
        for step in launch.steps(count)
    ]
    assert begun[1] > 1
    for epoch in range(EPOCHS):
        seen = [
            sample
            for step in steps
            if step[0][0] == epoch
            for in_turn in zip_longest(*(samples for _, *samples in step))
            for sample in in_turn
            if sample is not None
        ]
        order = DistributedSampler(range(SIZE), 1, 0, seed=5)
        order.set_epoch(epoch)
        assert digest(seen[:SIZE]) == digest(list(order)), (begun, seen)
        assert seen[SIZE:] == list(order)[: len(seen) - SIZE]
        assert len(seen) < SIZE + max(worlds)
