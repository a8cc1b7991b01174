"""A rank's session against an agent that forgets, with real sockets and threads."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc
import pytest

from holdfast.core.abandoned_step import AbandonedStep
from holdfast.core.attempts import AttemptSpec
from holdfast.core.budget import Reservation
from holdfast.core.ids import CheckpointId, Generation, RunId, Step
from holdfast.core.needs import Needs
from holdfast.core.session import SessionView
from holdfast.errors import ExhaustedError, NotFoundError, StaleGenerationError, UnavailableError
from holdfast.rpc.channel import unix_target
from holdfast.rpc.codec import from_message
from holdfast.rpc.status import TRAILER, to_status
from holdfast.training import session as training_session
from holdfast.training.outbox import HINTS_COUNT_MAX, Outbox
from holdfast.training.session import AgentSession
from holdfast.v1 import agent_pb2 as pb
from holdfast.v1 import agent_pb2_grpc

WAIT_S = 20.0


class Agent(agent_pb2_grpc.AgentServicer):
    """Knows a session until it is told to forget; numbers its views from 1 each time."""

    def __init__(self, arena):
        self.arena = arena
        self.known = False
        self.stale = False
        self.lease = pb.SlotLease(slot="s1", incarnation=7, length_bytes=1, plan_hash="p")
        self.forgotten = threading.Event()
        self.lost = threading.Event()
        self.answers = threading.Event()
        self.answers.set()
        self.generation = 1
        self.flaps = False
        self.opened = []
        self.away = False
        self.told = queue.SimpleQueue()
        self.refusals = 0
        self.reserved = queue.SimpleQueue()

    def heard(self, what):
        """Wait for an update of which ``what`` is true."""
        while not what(self.told.get(timeout=WAIT_S)):
            pass

    def Describe(self, request, context):
        return pb.DescribeResponse(node="a", arena=str(self.arena))

    def OpenSession(self, request, context):
        assert self.answers.wait(WAIT_S)
        if self.stale:
            refuse(context, StaleGenerationError("replaced by generation 2"))
        self.known = True
        self.opened.append(request)
        self.lost.clear()
        return pb.OpenSessionResponse(
            seat={"run": "r1", "generation": self.generation}, node="a", arena=str(self.arena)
        )

    def Update(self, request, context):
        self.told.put(request)
        if self.away:
            self.away = False
            refuse(context, UnavailableError("away"))
        if not self.known:
            refuse(context, NotFoundError("not open here"))
        return pb.UpdateResponse()

    def Watch(self, request, context):
        if not self.known:
            refuse(context, NotFoundError("not open here"))
        if request.version == "1":
            self.forgotten.wait(1.0)
        if self.forgotten.is_set():
            self.forgotten.clear()
            self.known = False
            refuse(context, NotFoundError("not open here"))
        if self.flaps:
            number = int(request.version or 1) + 1
            return pb.SessionView(version=str(number), leases=[self.lease], forgotten=True)
        if self.lost.is_set():
            return pb.SessionView(version="2", leases=[self.lease], forgotten=True)
        return pb.SessionView(version="1", leases=[self.lease])

    def Reserve(self, request, context):
        self.refusals -= 1
        if self.refusals >= 0:
            refuse(context, ExhaustedError("another job has taken the room"))
        self.reserved.put(request)
        return pb.ReserveResponse()

    def CloseSession(self, request, context):
        return pb.CloseSessionResponse()


def refuse(context, error):
    code, detail = to_status(error)
    context.set_trailing_metadata(((TRAILER, detail.SerializeToString()),))
    context.abort(code, detail.message)


@pytest.fixture
def agent(tmp_path):
    made = Agent(tmp_path / "arena")
    (tmp_path / "arena").mkdir()
    server = grpc.server(ThreadPoolExecutor(8))
    agent_pb2_grpc.add_AgentServicer_to_server(made, server)
    server.add_insecure_port(unix_target(tmp_path / "agent"))
    server.start()
    yield made
    server.stop(None).wait()


@pytest.fixture
def session(agent, tmp_path):
    made = AgentSession(tmp_path / "agent")
    attempt = AttemptSpec(
        job="job",
        nonce=b"n",
        launcher="l",
        holder="h",
        takeover=False,
        rank=0,
        world_size=1,
        local_world_size=1,
        replicas=0,
        replica_domain="",
    )
    made.open(attempt, agent.arena, timeout_s=WAIT_S)
    yield made
    made.close(timeout_s=5.0)


def test_the_slots_of_an_agent_that_forgot_are_forgotten_with_it(agent, session):
    """Its successor numbers views and incarnations anew: the same numbers mean other things."""
    views: list[SessionView] = []
    seen_twice = threading.Event()

    def on_view(view):
        views.append(view)
        if sum(bool(view.leases) for view in views) == 2:
            seen_twice.set()

    session.start(on_view)
    assert session.wait_view(lambda view: bool(view.leases), timeout_s=WAIT_S)
    agent.forgotten.set()

    assert seen_twice.wait(WAIT_S)
    assert [("1", 1), ("", 0), ("1", 1)] == [(view.version, len(view.leases)) for view in views]


def test_a_catalogue_that_was_lost_is_told_of_the_attempt_that_trains(agent, session):
    """P6: under its generation, with what it restored; its slots stay what they are."""
    views: list[SessionView] = []
    restored = CheckpointId(RunId("r1"), Step(7), Generation(1))
    agent.generation = 3
    session._seat = replace(session._seat, generation=3)
    session.begun(restored)
    session.start(views.append)
    assert session.wait_view(lambda view: bool(view.leases), timeout_s=WAIT_S)
    agent.lost.set()

    assert session.wait_view(lambda view: view.forgotten, timeout_s=WAIT_S)
    assert session.wait_view(lambda view: not view.forgotten, timeout_s=WAIT_S)
    first, second = agent.opened
    assert (first.spec.generation, first.spec.HasField("restored")) == (0, False)
    assert second.spec.nonce == first.spec.nonce
    assert second.spec.generation == 3
    assert from_message(second.spec.restored, CheckpointId) == restored
    assert all(view.leases for view in views)


def progressed(session, step):
    session.report(lambda report: replace(report, step=step))


def test_progress_wakes_nobody_and_is_told_at_the_next_look(agent, session):
    """The training thread says it at each step."""
    progressed(session, 3)
    session.post(saving=(3,))
    assert not session._urgent.is_set()

    session.start(lambda view: None)
    agent.heard(lambda update: update.report.step == 3 and list(update.report.saving) == [3])
    progressed(session, 4)
    agent.heard(lambda update: update.report.step == 4)
    session.post(saving=(3, 5))
    agent.heard(lambda update: list(update.report.saving) == [3, 5])


def test_what_a_rank_needs_is_told(agent, session):
    session.start(lambda view: None)
    seven = CheckpointId(RunId("r1"), Step(7), Generation(1))
    session.name(Needs(checkpoint=seven, whole=True))

    agent.heard(lambda update: update.needs.whole)


def test_what_the_agent_could_not_take_is_told_again(agent, session):
    """Though nothing is new since."""
    agent.away = True
    session.start(lambda view: None)
    progressed(session, 3)

    agent.heard(lambda update: update.report.step == 3)
    agent.heard(lambda update: update.report.step == 3)


def test_an_agent_that_forgot_is_told_all_again(agent, session):
    """It knows no step that this rank saves, and nothing is new since it was told."""
    session.start(lambda view: None)
    session.post(saving=(5,))
    agent.heard(lambda update: list(update.report.saving) == [5])
    agent.forgotten.set()

    agent.heard(lambda update: list(update.report.saving) == [5])


def test_slots_that_an_agent_refused_when_it_came_back_are_asked_for_again(
    agent, session, monkeypatch
):
    """Its session was open then, so nobody introduced it once more: it had no slot for good."""
    monkeypatch.setattr(training_session, "RESERVE_AGAIN_S", 0.0)
    views = queue.SimpleQueue()
    session.start(views.put)
    assert views.get(timeout=WAIT_S).leases
    session.reserve(Reservation(plan_hash="p", length_bytes=1, slots=2, restored_bytes=0))
    assert 1 == agent.reserved.get(timeout=WAIT_S).length_bytes

    agent.refusals = 2
    agent.forgotten.set()

    assert 1 == agent.reserved.get(timeout=WAIT_S).length_bytes
    assert not views.get(timeout=WAIT_S).leases, "those of the agent before"


def test_nothing_is_told_while_nothing_is_new(agent, session, monkeypatch):
    looks, enough = [], threading.Event()
    wait = session._urgent.wait

    def look(timeout_s):
        looks.append(timeout_s)
        if len(looks) > 5:
            enough.set()
        return wait(timeout_s)

    monkeypatch.setattr(session._urgent, "wait", look)
    session.start(lambda view: None)

    assert enough.wait(WAIT_S)
    assert agent.told.empty()


def test_what_is_posted_last_is_told_before_the_session_ends(agent, session):
    session.start(lambda view: None)
    progressed(session, 9)
    session.close(timeout_s=WAIT_S)

    agent.heard(lambda update: update.report.step == 9)


@pytest.mark.parametrize("least_s", [3600.0, 0.0])
def test_a_rank_that_stays_unknown_registers_at_a_pace(agent, session, monkeypatch, least_s):
    """Each registration is a write of the catalogue, and views may change many times a second."""
    monkeypatch.setattr("holdfast.training.session.REGISTER_S_MIN", least_s)
    agent.flaps = True
    session.start(lambda view: None)

    assert session.wait_view(lambda view: int(view.version or 0) >= 10, timeout_s=WAIT_S)
    again = len(agent.opened) - 1
    assert again == 1 if least_s else again > 1


def test_views_go_on_while_a_new_catalogue_does_not_answer(agent, session):
    """P5: what the agent leases is heard of, however long the attempt takes to be told again."""
    session.start(lambda view: None)
    assert session.wait_view(lambda view: bool(view.leases), timeout_s=WAIT_S)
    agent.answers.clear()
    agent.flaps = True

    assert session.wait_view(lambda view: int(view.version) >= 10, timeout_s=WAIT_S)
    assert len(agent.opened) == 1
    agent.answers.set()


def test_nothing_is_heard_any_more_by_who_was_replaced(agent, session):
    """P2: a view that was on its way when the catalogue refused the attempt counts no more."""
    views = []
    agent.stale = agent.flaps = True
    session.start(views.append)
    assert session.wait_view(lambda view: view.fenced, timeout_s=WAIT_S)

    for thread in session._threads:
        if not thread.name.endswith("update"):
            thread.join(WAIT_S)
    assert views[-1].fenced


@pytest.mark.parametrize("refused", [True, False])
def test_an_attempt_that_a_new_catalogue_does_not_take_is_fenced(agent, session, refused):
    """P2: refused, or numbered anew, since it had not begun: its segments name the old number."""
    session.start(lambda view: None)
    assert session.wait_view(lambda view: bool(view.leases), timeout_s=WAIT_S)
    agent.stale, agent.generation = refused, 2
    agent.lost.set()

    assert session.wait_view(lambda view: view.fenced, timeout_s=WAIT_S)


def test_a_rank_replaced_while_its_agent_was_away_learns_that_it_is_fenced(agent, session):
    """P2: it stops, and asks no more."""
    session.start(lambda view: None)
    assert session.wait_view(lambda view: bool(view.leases), timeout_s=WAIT_S)
    agent.stale = True
    agent.forgotten.set()

    view = session.wait_view(lambda view: view.fenced, timeout_s=WAIT_S)
    assert view is not None
    assert view.leases == ()


def test_what_cannot_be_told_for_long_is_bounded_and_what_comes_meanwhile_is_kept():
    box = Outbox()
    for step in range(2 * HINTS_COUNT_MAX):
        box.abandoned.append(AbandonedStep(run="r1", step=step, generation=1))
    sent = box.message("s")
    box.abandoned.append(AbandonedStep(run="r1", step=10_000, generation=1))
    box.delivered(sent)

    assert HINTS_COUNT_MAX == len(sent.abandoned)
    assert [10_000] == [item.step for item in box.abandoned]


def test_ctrl_c_while_a_thread_starts_does_not_keep_the_session_from_its_end(session, monkeypatch):
    """A thread that is not known to run cannot be waited for."""

    def interrupted(thread):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.start(lambda view: None)

    session.close(timeout_s=5.0)
