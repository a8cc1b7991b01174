"""A checkpoint in memory is checked without loading it (G20), and a bad copy is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.e2e.stack import Stack, running_stack, until


@pytest.fixture(scope="module")
def stack():
    with running_stack(nodes=2) as running:
        yield running


def replicated(stack: Stack, job: str) -> int:
    """Train a little; return the newest step that has a copy on each node."""
    run = ("--job", job, "--steps", "6", "--save", "1", "--replicas", "1", "--wait", "replicated")
    stack.ranks(*run).succeed()

    def newest() -> int | None:
        found = stack.rest(f"jobs/{job}/checkpoints")
        return next((c["step"] for c in found if c["copies_min"] == 2), None)

    return until(newest, "two copies of a checkpoint")


def damage(arena: Path, step: int) -> None:
    """Change one byte of the sealed segment of ``step`` in ``arena``, behind the agent's back."""
    for sidecar in arena.glob("*.sum"):
        if json.loads(sidecar.read_text())["shard"].split("/")[1] == str(step):
            with sidecar.with_suffix(".seg").open("r+b") as segment:
                segment.seek(-1, 2)
                last = segment.read(1)
                segment.seek(-1, 2)
                segment.write(bytes([last[0] ^ 1]))
            return
    raise AssertionError(f"no segment of step {step} in {arena}")


def test_verify_and_show_speak_of_the_same_copies_and_a_flipped_bit_is_found(stack, job):
    step = replicated(stack, job)
    shown = json.loads(stack.holdfast("show", f"{job}@{step}", "--json").stdout)
    good = json.loads(stack.holdfast("verify", f"{job}@{step}", "--json").stdout)

    assert sorted(r["node"] for r in shown["shards"][0]["replicas"]) == ["node-0", "node-1"]
    assert good["ok"]
    assert sorted(copy["node"] for copy in good["copies"]) == ["node-0", "node-1"]

    damage(stack.arena(1), step)
    found = stack.holdfast("verify", f"{job}@{step}", check=False)

    assert found.returncode == 1
    assert "on node-1: " in found.stdout
    assert "on node-0: " not in found.stdout


def test_ls_names_the_job_and_its_checkpoints(stack, job):
    step = replicated(stack, job)
    jobs = json.loads(stack.holdfast("ls", "--json").stdout)
    steps = [found["step"] for found in json.loads(stack.holdfast("ls", job, "--json").stdout)]

    assert job in {one["job"] for one in jobs}
    assert step in steps
    assert steps == sorted(steps, reverse=True)
    assert job in stack.holdfast("ls").stdout
    listed = stack.holdfast("ls", job).stdout
    assert "replicated" in listed
    assert "that memory no longer holds: see --json" in listed
    assert len(listed.splitlines()) < len(steps)
    assert "node-0 (memory)" in stack.holdfast("show", job).stdout
