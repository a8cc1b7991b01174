"""What a rank measures goes through a real agent to a real catalogue, its figures and REST."""

from __future__ import annotations

import math
import secrets
import time

import pytest
from tests.integration.agent.harness import Node, Trainer, open_session, until
from tests.integration.metadata.test_process import start as start_metadata

from holdfast.core.announcements import SaveReason
from holdfast.errors import InvalidRequestError
from holdfast.v1 import agent_pb2 as pb
from holdfast.v1 import metadata_pb2

pytestmark = pytest.mark.timeout(120)
COSTS = {
    "stall_s": 0.25,
    "copy_s": 0.5,
    "save_bytes": 1 << 20,
    "decide_s": 1.0,
    "fetch_s": 2.0,
    "load_s": 4.0,
    "restored_bytes": 1 << 21,
}


@pytest.fixture
def metadata(tmp_path):
    folder = tmp_path / "metadata"
    folder.mkdir()
    running = start_metadata(folder)
    yield running
    running.stop()


@pytest.fixture
def agent(tmp_path, metadata):
    made = Node("a", tmp_path / "a", metadata.channel_address, {})
    made.start()
    yield made
    made.kill()


@pytest.fixture
def rank(agent):
    made = Trainer(agent.arena, secrets.token_hex(16))
    open_session(agent, made.session)
    yield made
    made.end()


def say(agent, rank, **report):
    agent.call("Update", pb.UpdateRequest(session=rank.session, report=report))


def test_what_a_rank_measures_is_shown_by_rest_and_metrics(metadata, agent, rank):
    """F110; once told, it stays when the rank has gone."""
    say(agent, rank, step=1, costs=COSTS)

    def shown():
        return metadata.http.get("/api/v1/jobs/job").json()["costs"]

    until(lambda: shown() == COSTS, "costs are shown")
    text = metadata.http.get("/metrics").text
    assert 'holdfast_attempt_stall_seconds{job="job"} 0.25\n' in text
    assert 'holdfast_attempt_restored_bytes{job="job"} 2097152\n' in text
    assert "# HELP holdfast_attempt_load_seconds Time of the restore to load the tensors, " in text
    assert "# TYPE holdfast_attempt_load_seconds gauge\n" in text

    rank.end()
    until(lambda: not metadata.http.get("/api/v1/jobs/job").json()["running"], "it ended")
    agent.stop()
    assert COSTS == shown()


def test_a_rank_with_a_bad_clock_costs_nobody_anything(metadata, agent, rank):
    """Metadata divided by the shortest step, which overflowed in the tick of all jobs."""
    say(agent, rank, step=1, step_s=5e-324, save_interval_s=math.nan, costs={"stall_s": math.inf})
    say(agent, rank, step=2, step_s=5e-324, costs={"copy_s": 0.5, "stall_s": math.nan})

    until(lambda: metadata.http.get("/api/v1/jobs/job").json()["step"] == 2, "it is heard")
    until(
        lambda: metadata.http.get("/api/v1/jobs/job").json()["costs"] == {"copy_s": 0.5},
        "what is known is shown",
    )


def test_a_step_that_is_none_is_refused_to_the_rank_that_says_it(agent, rank):
    with pytest.raises(InvalidRequestError, match="step -1"):
        say(agent, rank, step=-1)


def test_a_text_that_no_database_takes_is_refused_to_the_rank_that_says_it(agent):
    trainer = Trainer(agent.arena, secrets.token_hex(16))
    try:
        with pytest.raises(InvalidRequestError, match="holder"):
            open_session(agent, trainer.session, holder="host\0:1")
    finally:
        trainer.end()


def test_an_announcement_says_why_to_the_rank(metadata, agent, rank):
    def confirmed():
        restore = agent.view(rank.session).restore
        return restore is not None and restore.decision.state.name == "CONFIRMED"

    until(confirmed, "it may begin")
    say(agent, rank, step=3, step_s=0.5, loaded=True, wants_save=SaveReason.PREEMPTION)

    until(lambda: agent.view(rank.session).announcement is not None, "a step is announced")
    announcement = agent.view(rank.session).announcement
    assert SaveReason.PREEMPTION is announcement.reason
    assert announcement.step > 3
    headers = {"Accept": "application/json"}
    events = metadata.http.get("/api/v1/events", headers=headers).json()
    [told] = [event for event in events if event["kind"] == "save_announced"]
    assert "a rank was told to end (rank 0)" in told["message"]
    assert "preemption" == told["context"]["reason"]


def test_no_wait_of_a_peer_is_endless(metadata, agent, rank):
    """A wait of NaN passed each bound, since it is neither less nor more than anything."""
    began_s = time.monotonic()
    version = agent.view(rank.session).version
    agent.call(
        "Watch", pb.SessionWatchRequest(session=rank.session, version=version, wait_s=math.nan)
    )
    view = metadata.call("Watch", metadata_pb2.WatchRequest(node="a", version="", wait_s=0))
    metadata.call(
        "Watch", metadata_pb2.WatchRequest(node="a", version=view.version, wait_s=math.nan)
    )

    assert time.monotonic() >= began_s, "both have answered before their callers gave up"
