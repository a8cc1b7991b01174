"""A run that went out as files of another tool and came back goes on bit for bit (F89)."""

from __future__ import annotations

import json

import pytest
from tests.e2e.stack import running_stack
from tests.e2e.test_bit_identity import final, finals, restored


@pytest.fixture
def stack():
    with running_stack(nodes=1) as running:
        yield running


def test_training_goes_on_from_an_exported_checkpoint_bit_for_bit(stack, tmp_path):
    """Weights, optimizer, loader and random streams, through DCP's format and a new job.

    From memory: the export brings the step into the store, and leaves no pin there.
    """
    (expected,) = finals(stack, steps="12", world_size=1)
    stack.ranks("--job", "j", "--steps", "6").succeed()
    assert stack.rest("jobs/j/checkpoints")[0]["durable_at"] is None
    stack.holdfast("export", "j@6", str(tmp_path / "dcp"), "--format", "dcp")
    (made,) = (row for row in stack.rest("jobs/j/checkpoints") if row["step"] == 6)
    assert made["durable_at"]
    assert not made["pinned"]
    imported = stack.holdfast(
        *("import", str(tmp_path / "dcp"), "--job", "k", "--step", "6", "--json")
    )
    (output,) = stack.ranks("--job", "k", "--steps", "12").succeed()

    assert json.loads(imported.stdout)["adopted"]
    assert (6, expected) == (restored(output), final(output))
    assert "worker          ready" in stack.holdfast("doctor", check=False).stdout
