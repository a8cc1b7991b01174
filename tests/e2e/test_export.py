"""A run that went out as files of another tool and came back goes on bit for bit (F89)."""

from __future__ import annotations

import json
import os
from contextlib import contextmanager

import pytest
import torch
from tests.e2e.stack import running_stack, until
from tests.e2e.test_bit_identity import final, finals, restored
from tests.e2e.test_durable import durable, store_of

from holdfast.cli import export as exporting
from holdfast.cli.main import main


@pytest.fixture(scope="module")
def stack():
    with running_stack(nodes=1) as running:
        yield running


def test_training_goes_on_from_an_exported_checkpoint_bit_for_bit(stack, job, tmp_path):
    """Weights, optimizer, loader and random streams, through DCP's format and a new job.

    From memory: the export brings the step into the store, and leaves no pin there.
    """
    (expected,) = finals(stack, steps="12", world_size=1)
    stack.ranks("--job", job, "--steps", "6").succeed()
    assert stack.rest(f"jobs/{job}/checkpoints")[0]["durable_at"] is None
    stack.holdfast("export", f"{job}@6", str(tmp_path / "dcp"), "--format", "dcp")
    (made,) = (row for row in stack.rest(f"jobs/{job}/checkpoints") if row["step"] == 6)
    assert made["durable_at"]
    assert not made["pinned"]
    imported = stack.holdfast(
        *("import", str(tmp_path / "dcp"), "--job", f"{job}-k", "--step", "6", "--json")
    )
    (output,) = stack.ranks("--job", f"{job}-k", "--steps", "12").succeed()

    assert json.loads(imported.stdout)["adopted"]
    assert (6, expected) == (restored(output), final(output))
    assert "worker          ready" in stack.holdfast("doctor", check=False).stdout


def test_what_is_exported_stays_in_the_store_while_the_job_saves_on(
    stack, job, tmp_path, monkeypatch
):
    """keep-last-1: later steps come and go while the export stands at its first tensor."""
    held, here = [], []
    ranks = stack.ranks(
        *("--job", job, "--steps", "100000", "--persist", "5", "--keep-last", "1"),
        *("--pause-s", "0.05"),
    )
    ranks.until_step(6)
    until(lambda: durable(stack, job), "a durable step")

    def collected(step):
        return not list(store_of(stack).glob(f"{job}/*/step-{step}.*"))

    @contextmanager
    def progress(_what, _total_bytes):
        rows = stack.rest(f"jobs/{job}/checkpoints")
        held.extend(row["step"] for row in rows if f"-{os.getpid()}" in str(row["held"]))

        def advance(_bytes):
            if not here:
                here.extend(durable(stack, job))
                later = until(
                    lambda: [s for s in durable(stack, job) if s > held[0]], "a later step"
                )
                until(lambda: collected(later[0]), "the later step to go")
                here.append(collected(held[0]))

        yield advance

    monkeypatch.setenv("HOLDFAST_HOME", str(stack.home))
    monkeypatch.setattr(exporting, "byte_progress", progress)
    code = main(["export", job, str(tmp_path / "all.pt"), "--format", "torch"])
    exported = torch.load(tmp_path / "all.pt", weights_only=True)
    until(lambda: collected(held[0]), "what was exported to go")
    ranks.kill()

    assert (0, 1, False) == (code, len(held), here[-1])
    assert any(name.startswith("model.") for name in exported)
