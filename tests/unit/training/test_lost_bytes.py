"""A step whose bytes were lost with an agent's memory, while training waits for it."""

from __future__ import annotations

import pytest
import torch
from tests.unit.training.savers import saver_of, stepped

from holdfast.core.session import SessionView, StepLevels
from holdfast.errors import PreconditionError


@pytest.fixture
def leased(tmp_path):
    with saver_of(tmp_path, stepped(torch.nn.Parameter(torch.zeros(3)))) as saver:
        yield saver


def test_who_waits_for_a_step_whose_bytes_an_agent_lost_hears_it_at_once(leased):
    """An arena that was emptied; training waits for that very step, so no save looks for it."""
    leased.on_view(SessionView(version="1", leases=(leased.lease(),)))
    handle = leased.save(2)
    handle.wait("staged", timeout_s=20)
    [closed] = leased.arena.glob("*.closed")
    closed.unlink()

    leased.on_view(SessionView(version="1"))

    with pytest.raises(PreconditionError, match="lost its bytes"):
        handle.wait("replicated", timeout_s=20)


def test_the_rank_says_which_step_it_knows_to_be_sealed(leased):
    """4.7: what is lost of that later is nobody's to wait for."""
    leased.on_view(SessionView(version="1", leases=(leased.lease(),)))
    leased.save(2).wait("staged", timeout_s=20)
    told = leased.session._outbox.message("s").report
    assert (told.saving, told.sealed_before) == ((2,), 0)

    leased.on_view(SessionView(version="2", steps=(StepLevels(step=2, sealed=True),)))

    told = leased.session._outbox.message("s").report
    assert (told.saving, told.sealed_before) == ((), 3)
