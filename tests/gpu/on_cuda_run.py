"""``holdfast run`` of a training on a GPU: a rank is killed, and it ends with the same bits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e.stack import PLAIN, environment, running_stack

TRAINING = Path(__file__).with_name("training.py")
END_S_MAX = 100.0


@pytest.fixture(scope="module")
def stack():
    with running_stack(nodes=1) as running:
        yield running


def run(stack, folder, name, *, options=(), words=()):
    command = [
        sys.executable, "-m", "holdfast.cli.main", "run", "--job", name, "--nproc-per-node", "2",
        *options, str(TRAINING), str(folder), name, *words,
    ]  # fmt: skip
    env = environment(HOLDFAST_AGENT=stack.node(0)["agent"], PYTHONPATH=PLAIN)
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=END_S_MAX, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("auto", [False, True], ids=["checkpointer", "auto"])
def test_a_rank_is_killed_and_it_ends_with_the_same_bits(stack, tmp_path, auto):
    kind = "auto" if auto else "own"
    calm, killed = f"calm-{kind}", f"killed-{kind}"
    options = ["--auto"] if auto else ["--warm-cuda"]
    run(stack, tmp_path, calm, options=options, words=[] if auto else [calm])
    said = run(stack, tmp_path, killed, options=options, words=[] if auto else [killed])

    print(said)
    kinds = {event["kind"] for event in stack.rest("events")}
    assert "slots_unregistered" not in kinds
    assert (tmp_path / f"{killed}.killed").exists()
    assert "goes on after step" in said
    for rank in range(2):
        expected = (tmp_path / f"{calm}.{rank}").read_text()
        assert expected == (tmp_path / f"{killed}.{rank}").read_text(), (rank, said)
