"""Saver: what it counts and how it stretches; copying and slots are tested with real agents."""

import os

import pytest

from holdfast.core.session import SessionView, StepLevels
from holdfast.saving import Saver
from holdfast.session import Attempt, Membership, Session
from holdfast.state.capture import Capture


@pytest.fixture
def saver(tmp_path):
    session = Session(tmp_path / "nobody.sock")
    attempt = Attempt(
        job="j",
        nonce=os.urandom(16),
        launcher="l",
        holder="h",
        takeover=False,
        rank=0,
        world_size=1,
        local_world_size=1,
        replicas=0,
        replica_domain="",
    )
    membership = Membership(run="r", generation=1, node="n", arena=tmp_path)
    capture = Capture({"tokens": 1}, rank=0, world_size=1)
    yield Saver(capture=capture, session=session, attempt=attempt, membership=membership)
    session.close(timeout_s=1.0)


def test_steps_abandoned_in_a_row_stretch_the_interval_and_are_counted(saver):
    """Architecture 4.1: the interval stretches, and it is counted."""
    assert saver.stretch == 1

    saver.abandon(5, "no free slot")
    saver.abandon(6, "no free slot")

    assert (saver.stretch, saver.abandoned_count) == (4, 2)


def test_the_interval_is_as_asked_again_once_a_later_step_is_local(saver):
    """An older step that is still listed as local proves nothing."""
    saver.abandon(6, "no free slot")
    saver.on_view(SessionView(version="1", steps=(StepLevels(step=5, sealed=True, local=True),)))
    assert saver.stretch == 2

    saver.on_view(SessionView(version="2", steps=(StepLevels(step=7, sealed=True, local=True),)))

    assert (saver.stretch, saver.abandoned_count) == (1, 1)


def test_the_interval_does_not_grow_for_ever(saver):
    for step in range(1, 40):
        saver.abandon(step, "no free slot")

    assert saver.stretch == 32
