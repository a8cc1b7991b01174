"""What a job of another framework asks of its saver and its session, and in which order."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
import torch.distributed as dist

from holdfast.core.reports import RankReport
from holdfast.errors import InvalidRequestError, OutcomeUnknownError, PreconditionError
from holdfast.integrations.planned_job import PlannedJob


@pytest.fixture
def asked():
    """Notes every call of the parts of a job."""
    return Mock()


@pytest.fixture
def job(asked):
    """A job that goes on from step 7, which was loaded."""
    made = PlannedJob.__new__(PlannedJob)
    made.job, made._pid = "job", os.getpid()
    made._closed = made._begun = False
    made._loaded = True
    made._saving, made._given = threading.Lock(), asked.given
    made._session, made._saver = asked.session, asked.saver
    made.decided, made.newest, made.handle = SimpleNamespace(step=7, attempt=2), 7, None
    made.restore = SimpleNamespace(decision=SimpleNamespace(checkpoint="checkpoint 7"))
    return made


def test_training_begins_once_after_the_checkpoint_that_was_loaded(job, asked):
    """P6: it is the parent of the saves that follow, and none of those is told to be it."""
    job.begin()
    job.begin()

    assert [call.session.begun("checkpoint 7"), call.saver.restored(7, 2)] == asked.mock_calls
    with pytest.raises(PreconditionError, match="before the first save"):
        job.check_before_training()


def test_a_job_without_a_checkpoint_begins_after_nothing(job, asked):
    job.decided, job._loaded = None, False
    job.begin()

    assert [call.session.begun(None)] == asked.mock_calls


def test_a_child_of_the_process_that_made_a_job_can_do_nothing_with_it(job, asked):
    """Nor does it end the session of its parent, when it ends."""
    job._pid = -1
    for what in (job.begin, job.check_before_training):
        with pytest.raises(PreconditionError, match="process that made it"):
            what()
    job.end()

    assert [] == asked.mock_calls


def test_a_closed_job_reads_nothing(job):
    job._closed = True
    with pytest.raises(PreconditionError, match="this job is closed"):
        job.check_before_training()


@pytest.mark.parametrize("given_up", [False, True])
def test_a_save_that_is_not_staged_is_given_up_once_and_nothing_of_it_is_kept(job, asked, given_up):
    handle = asked.saver.save.return_value
    handle.wait.side_effect, handle.abandoned = OutcomeUnknownError("no slot"), given_up
    with pytest.raises(OutcomeUnknownError):
        job.save(8, ["tensors"], {"n": 1}, held_bytes=3)

    assert call.session.begun("checkpoint 7") == asked.mock_calls[0]
    assert [
        call((["tensors"]), {"n": 1}, held_bytes=3),
        call((), {}),
    ] == asked.given.give.mock_calls
    assert (0 if given_up else 1) == asked.saver.give_up.call_count
    assert (7, None) == (job.newest, job.handle)


def test_what_is_saved_is_kept_nowhere_and_the_newest_step_is_told(job, asked):
    """Another thread may have told of a later one."""
    job.save(9, ["tensors"], {})
    job.save(8, ["tensors"], {})

    assert call((), {}) == asked.given.give.mock_calls[-1]
    assert 9 == job.newest
    told = [one.args[0] for one in asked.session.report.mock_calls]
    assert [9, 12] == [told[0](RankReport(step=n)).step for n in (3, 12)]


def test_a_save_whose_commit_nobody_tells_of_does_not_end_training(job, asked):
    job.handle = asked.handle
    asked.handle.wait.side_effect = OutcomeUnknownError("metadata is out")
    job.await_commit()

    asked.handle.wait.assert_called_once()


def test_the_newest_save_is_waited_for_before_the_session_ends_and_once(job, asked):
    asked.saver.close.return_value = PreconditionError("not safe")
    with pytest.raises(PreconditionError, match="not safe"):
        job.close(5.0)
    job.close(5.0)

    assert ["saver.close", "session.close"] == [name for name, _, _ in asked.mock_calls]


@pytest.mark.parametrize("has_group", [False, True], ids=["no group", "another group"])
def test_ranks_that_the_process_group_does_not_have_are_refused(monkeypatch, has_group):
    """Before an agent is asked; boxes count by the one, segments by the other."""
    for name, text in {"RANK": "1", "WORLD_SIZE": "2", "HOLDFAST_ATTEMPT": "a"}.items():
        monkeypatch.setenv(name, text)
    if has_group:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises((InvalidRequestError, PreconditionError), match=r"process.group"):
            PlannedJob("job")
    finally:
        if has_group:
            dist.destroy_process_group()
