"""LateRestore: what is read is what was decided, whatever the catalogue says by then."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.training.test_restore import Agent, chosen

from holdfast.errors import PreconditionError, StaleGenerationError
from holdfast.training.late_restore import LateRestore


def test_nothing_is_read_of_another_checkpoint_than_was_decided():
    """M2, S3: the catalogue was lost since; half of the state would be of another step."""
    agent = Agent(generation=2)
    agent.view = chosen(7)
    restore = LateRestore(agent, Path(), timeout_s=1.0)
    decided = restore.decide()
    agent.view = chosen(5)

    assert decided is not None
    assert 7 == decided.step == restore.decision.checkpoint.step
    with pytest.raises(StaleGenerationError, match="another step"):
        restore.fetch_all()
    assert 7 == restore.decision.checkpoint.step


def test_an_attempt_that_begins_at_step_0_has_nothing_to_read():
    restore = LateRestore(Agent(generation=2), Path(), timeout_s=1.0)

    assert restore.decide() is None
    with pytest.raises(PreconditionError, match="no checkpoint was chosen"):
        _ = restore.decision
