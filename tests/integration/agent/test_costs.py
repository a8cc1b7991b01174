"""What a rank measures goes through a real agent to a real catalogue, its figures and REST."""

from __future__ import annotations

import contextlib
import math
import secrets
import threading
import time

import pytest
import torch
from tests.integration.agent.harness import Node, Trainer, open_session, until
from tests.integration.metadata import process

import holdfast
from holdfast.core.announcements import SaveReason
from holdfast.errors import InvalidRequestError
from holdfast.training.saver import Saver
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
    running = process.fork(folder)
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
    assert 'holdfast_attempt_restored_bytes{job="job"} 2.097152e+06\n' in text
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


def test_what_a_rank_hears_late_it_gives_up_without_another_step(metadata, agent, monkeypatch):
    """In its next step it may have to wait for who waits at that very step."""
    monkeypatch.setenv("HOLDFAST_AGENT", str(agent.socket))
    heard, hear = threading.Event(), Saver.on_view
    heard.set()

    def later(saver, view):
        assert heard.wait(60.0)
        hear(saver, view)

    monkeypatch.setattr(Saver, "on_view", later)
    with holdfast.Checkpointer(
        "late", {"w": torch.zeros(3)}, save=holdfast.EverySteps(10**6)
    ) as ck:
        ck.restore()
        ck.step(1)
        heard.clear()
        post = "/api/v1/jobs/late/save"
        until(lambda: metadata.http.post(post).status_code < 300, "a step is announced")
        ck.step(5000)
        heard.set()

        def told():
            answer = metadata.http.get("/api/v1/events", headers={"Accept": "application/json"})
            return [e for e in answer.json() if e["kind"] == "save_abandoned"]

        until(told, "it says that it heard too late")
    assert "heard too late" in told()[0]["message"]


class CrashError(Exception):
    """What ends an attempt otherwise than in order."""


def test_failures_shorten_the_interval_and_the_reason_says_so(metadata, agent, monkeypatch):
    """G7: two attempts crash, one ends in order; the next one knows, and the page too."""
    monkeypatch.setenv("HOLDFAST_AGENT", str(agent.socket))

    def job():
        return metadata.http.get("/api/v1/jobs/auto").json()

    def attempt(number, text, *, fails=True):
        monkeypatch.setenv("HOLDFAST_ATTEMPT", f"attempt {number}")
        auto = holdfast.Auto(mtbf_s=7200, interval_s_min=1e-3)
        state = {"model": torch.nn.Linear(4, 4)}
        with (
            contextlib.suppress(CrashError),
            holdfast.Checkpointer("auto", state, save=auto, replicas=0) as ck,
        ):
            ck.restore()
            ck._saver.stall_s = 0.5  # as if a save had been that slow, on any machine
            ck.step(1)
            until(lambda: text in job()["saves_why"], text)
            seen = job()
            if fails:
                raise CrashError
        until(lambda: not job()["running"], "it ended")
        return seen

    first = attempt(1, "no failures in")
    attempt(2, "1 failure in")
    third = attempt(3, "2 failures in", fails=False)
    fourth = attempt(4, "2 failures in")

    assert first["saves_every_s"] == pytest.approx(math.sqrt(7200), rel=0.02)
    assert third["saves_every_s"] == pytest.approx(math.sqrt(2400), rel=0.02)
    assert (2, 2) == (third["failures"], fourth["failures"])
    assert fourth["trained_s"] > third["trained_s"] > 0
    assert job()["saves_every_s"] is None, "nobody trains now"


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
