"""F8, P4: what a graph replays unseen is no reason to save one step's state as that of another."""

from __future__ import annotations

import warnings

import pytest
from tests.late_device import WAIT_S
from tests.unit.training.test_device_faults import late_job

from holdfast.errors import PreconditionError


@pytest.fixture
def job(tmp_path):
    with late_job(tmp_path) as made:
        yield made


def capture(job):
    """Have the optimizer's hooks run as while its step is captured."""
    job.device.captures = True
    job.optimizer.step()
    job.device.captures = False


def replay(job):
    """Do a step of which nobody is told."""
    job.saver._performer.gate.uninstall()
    job.optimizer.step()
    job.device.finish()


def owe(job, step):
    """Save while there is no slot."""
    performer = job.saver._performer
    performer.pool.reset()
    handle = job.saver.save(step)
    assert performer.owed.step == step
    job.lease_all()
    return handle


def test_a_step_that_is_owed_is_paid_if_its_optimizer_was_seen_to_step(job):
    job.optimizer.step()
    handle = owe(job, 2)
    handle.wait("staged", timeout_s=WAIT_S)


@pytest.mark.parametrize("captured", [True, False], ids=["captured here", "captured before"])
def test_a_step_that_is_owed_is_not_paid_with_the_state_that_a_replay_has_left(job, captured):
    """Also of a graph that was captured before there was a gate to tell."""
    if captured:
        job.optimizer.step()
        capture(job)
    handle = owe(job, 2)
    replay(job)

    with pytest.raises(PreconditionError, match="no free slot"):
        handle.wait("staged", timeout_s=WAIT_S)


@pytest.mark.parametrize("captured", [True, False], ids=["captured here", "captured before"])
def test_at_exit_no_state_is_saved_that_a_replay_may_have_changed(job, captured):
    if captured:
        job.optimizer.step()
        capture(job)
    job.saver.note_step(7)
    replay(job)
    with pytest.warns(UserWarning, match=r"step 7 is not saved at exit.*CUDA graph.*save\(7\)"):
        job.saver.close(0.0, save_last=True)

    assert job.saver._performer.latest is None


def test_nobody_is_told_to_count_steps_when_a_graph_replays_them(job):
    job.optimizer.step()
    capture(job)
    job.save(2).wait("staged", timeout_s=WAIT_S)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in (3, 4):
            replay(job)
            job.saver.note_step(step)


def test_a_save_inside_a_capture_is_refused_and_puts_nothing_into_the_graph(job):
    """Its copies would be done at each replay, into whatever the slot is by then."""
    job.device.finish()
    job.device.captures = True
    handle = job.saver.save(2)
    job.device.captures = False

    assert "a graph is being captured" in str(handle.error)
    assert not job.device.training.todo
    job.save(3).wait("staged", timeout_s=WAIT_S)


def test_who_waits_inside_a_capture_for_an_owed_step_puts_nothing_into_the_graph(job):
    job.optimizer.step()
    handle = owe(job, 2)
    job.device.finish()
    job.device.captures = True
    with pytest.raises(PreconditionError, match="a graph is being captured"):
        handle.wait("staged", timeout_s=WAIT_S)
    job.device.captures = False

    assert not job.device.training.todo


def test_after_a_capture_all_is_queued_on_the_script_s_own_stream(job):
    job.optimizer.step()
    job.save(2)
    assert job.saver._performer.latest.deferred
    capture(job)
    job.lease_all()
    job.save(3)

    assert not job.saver._performer.latest.deferred
