"""Ordinary scripts that know nothing of Holdfast are killed, go on, and end with the same bits.

They are in ``tests/corpus``. Each is run undisturbed, then killed twice at steps drawn by chance;
those that take half a minute to import their framework, once.
"""

from __future__ import annotations

import random
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.e2e.stack import running_stack, until
from tests.e2e.test_docs import newest_step

CORPUS = Path(__file__).parents[1] / "corpus"
RANK = Path(__file__).with_name("auto_rank.py")
STEPS = {
    "cnn": 32, "gpt": 24, "gan": 72, "accumulation": 18, "amp": 25, "compiled": 30, "ema": 30,
    "lbfgs": 12, "iterable": 36, "plateau": 50, "stumbling": 20, "semi": 30, "ddp": 24,
    "tracked": 30, "hf_trainer": 16, "lightning_fit": 12,
}  # fmt: skip
"""Steps of the optimizers of each script."""
SLOW = ("hf_trainer", "lightning_fit")
REFUSED = {
    "rnn": "hidden, step: the training loop carries these from batch to batch",
    "without_loader": "no step was saved, since no pass over a data loader is going on",
    "loaders_late": "a data loader was made after the first pass, or refused",
    "parts_late": "made after the first pass over a data loader: AveragedModel",
}
"""Scripts that do not come back bit for bit, and what they are told."""


@pytest.fixture(scope="module")
def stack():
    with running_stack(nodes=1) as running:
        yield running


def run(stack, name, job, out, hang_at=0):
    script = CORPUS / f"{name}.py"
    world_size = 2 if name in (*SLOW, "ddp") else 1
    words = (job, str(hang_at), str(script), str(out))
    return stack.ranks(*words, world_size=world_size, script=RANK)


def killed_at(stack, name, job, out, hang_at):
    """Kill all ranks once they hang there and a step is safe; return the newest one."""
    ranks = run(stack, name, job, out, hang_at)
    until(lambda: all("hangs\n" in text for text in ranks.outputs), f"{name} to get to {hang_at}")
    until(partial(newest_step, stack, job), "a step to be safe")
    safe = newest_step(stack, job)
    ranks.kill()
    ranks.wait()
    return safe


@pytest.mark.parametrize("name", STEPS)
def test_a_script_is_killed_and_ends_with_the_same_bits(stack, tmp_path, name):
    calm, killed = tmp_path / "calm.pt", tmp_path / "killed.pt"
    run(stack, name, f"calm-{name}", calm).succeed()
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    steps = chance.randint(5, STEPS[name] // 2), chance.randint(3, STEPS[name] // 3)
    for at in steps[: 1 if name in SLOW else 2]:
        safe = killed_at(stack, name, name, killed, at)
        assert not killed.exists()

    outputs = run(stack, name, name, killed).succeed()

    [begun] = map(int, re.findall(r"goes on after step (\d+),", "\n".join(outputs)))
    assert begun >= safe
    expected, found = (torch.load(path, weights_only=True) for path in (calm, killed))
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", REFUSED)
def test_a_script_that_would_not_come_back_is_told_why_and_ends_as_it_does(stack, tmp_path, name):
    out = tmp_path / "out.pt"
    [output] = run(stack, name, name, out).succeed()

    assert REFUSED[name] in output
    assert out.exists()


def test_a_finished_script_is_run_again_and_ends_with_the_same_bits(stack, tmp_path):
    first, again = tmp_path / "first.pt", tmp_path / "again.pt"
    run(stack, "cnn", "finished", first).succeed()
    [output] = run(stack, "cnn", "finished", again).succeed()

    assert re.search(r"goes on after step \d+, in pass \d over loader_1", output)
    found, expected = (torch.load(path, weights_only=True) for path in (again, first))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_script_that_resumes_by_itself_is_refused(stack, tmp_path):
    """Its first pass is another one then: of two who skip what is done, both would be wrong."""
    out = tmp_path / "out.pt"
    killed_at(stack, "resumes_itself", "itself", out, hang_at=12)
    ranks = run(stack, "resumes_itself", "itself", out)

    assert ranks.wait() == [1]
    assert "called torch.load 1 times before its first pass, and 0 times" in ranks.outputs[0]
    assert not out.exists()
