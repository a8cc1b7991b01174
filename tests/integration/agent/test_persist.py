"""``persist=``, ``keep=`` and ``notes=`` of a Checkpointer, against a real agent."""

from __future__ import annotations

import gc
import os
import signal
import threading

import pytest
import torch

import holdfast
from holdfast import checkpointer as facade
from holdfast.core.decision import Decision, DecisionState
from holdfast.core.ids import CheckpointId, ShardId
from holdfast.core.node_view import Committed
from holdfast.core.reports import StepNote
from holdfast.errors import ExhaustedError, InvalidRequestError, NonFiniteError, PreconditionError
from holdfast.training import kept_files
from holdfast.training.session import AgentSession

from .harness import RUN, reported, until

WAIT_S = 20.0


@pytest.fixture
def begin(catalogue, monkeypatch):
    """Make a checkpointer on a node and let it start fresh; closed at the end."""
    made = []

    def make(a, **options):
        reported(catalogue, a.name)
        fresh = Decision(number=1, state=DecisionState.CONFIRMED, generation=1, fresh=True)
        catalogue.set_run(generation=1, decision=fresh)
        monkeypatch.setenv("HOLDFAST_AGENT", str(a.socket))
        model = torch.nn.Linear(64, 64)
        checkpointer = holdfast.Checkpointer("job", {"model": model}, replicas=0, **options)
        made.append(checkpointer)
        assert checkpointer.restore() is None
        return checkpointer

    yield make
    for checkpointer in made:
        checkpointer.close(timeout_s=5.0)


def commit(catalogue, handle, **levels):
    """Let the catalogue say that a step is whole, and what else of it, once it is sealed."""
    step = handle.step
    until(lambda: [s for s in catalogue.held("a") if s.step == step], f"step {step} sealed")
    id_ = CheckpointId(RUN, step, 1)
    others = tuple(c for c in catalogue.common.runs[0].committed if c.checkpoint != id_)
    catalogue.set_run(committed=(Committed(checkpoint=id_, replicated=True, **levels), *others))
    handle.wait("replicated", timeout_s=WAIT_S)


def test_a_step_that_is_due_becomes_durable_and_others_are_refused_at_once(node, catalogue, begin):
    """F85, F19: as the catalogue says; nothing is waited for that will not come."""
    ck = begin(node("a"), persist=holdfast.EverySteps(10))
    due, other = ck.step(10), ck.step(11)
    commit(catalogue, due, draining=True)
    until(lambda: due.draining, "draining")
    commit(catalogue, other)
    with pytest.raises(PreconditionError, match="at or after each 10"):
        other.wait("durable", timeout_s=WAIT_S)

    commit(catalogue, due, durable=True)
    assert due.wait("durable", timeout_s=WAIT_S).level == "durable"


def test_a_drain_given_up_ends_the_wait_for_it(node, catalogue, begin):
    """G17: with the reason, not with a timeout."""
    ck = begin(node("a"), persist=holdfast.EverySteps(10))
    handle = ck.step(10)
    commit(catalogue, handle, draining=True)
    until(lambda: handle.draining, "draining")
    commit(catalogue, handle)

    with pytest.raises(PreconditionError, match="upload to the object store was given up"):
        handle.wait("durable", timeout_s=WAIT_S)


def test_saving_goes_on_in_two_slots_while_a_step_drains_in_the_third(node, catalogue, begin):
    """F28, F88: the draining step is kept however slow the store is, and nobody waits for it."""
    a = node("a")
    ck = begin(a, persist=holdfast.EverySteps(100))
    first = ck.step(100)
    commit(catalogue, first, draining=True)
    drained = ShardId(RUN, 100, 1, 0)
    for step in range(101, 108):
        handle = ck.step(step)
        commit(catalogue, handle)
        catalogue.set_run(free_before=CheckpointId(RUN, step, 1), drained=(drained,))

    until(lambda: {100, 107} == {s.step for s in catalogue.held("a")}, "old ones are freed")
    assert 3 == len([s for s in a.dump()["slots"].values() if s["length_bytes"]])
    catalogue.set_run(drained=())
    until(lambda: {107} == {s.step for s in catalogue.held("a")}, "durable: let go")


def test_what_is_asked_of_the_object_tier_is_registered_and_notes_are_reported(
    node, catalogue, begin
):
    """F86, F87."""
    keep = holdfast.Retention(last=3, best=1, metric="loss")
    ck = begin(
        node("a"),
        persist=holdfast.AnyOf(holdfast.EverySteps(10), holdfast.EverySeconds(60)),
        keep=keep,
    )
    asked = catalogue.registrations[-1].spec
    assert (10, 60.0) == (asked.persist.steps, asked.persist.seconds)
    assert (3, 1, "loss") == (asked.retention.last, asked.retention.best, asked.retention.metric)

    commit(catalogue, ck.step(1, notes={"loss": 0.5}))
    expected = (StepNote(step=1, json='{"loss":0.5}'),)
    until(lambda: catalogue.inventories["a"].ranks[0].report.notes == expected, "notes")


def test_a_step_that_is_not_finite_is_no_checkpoint_and_the_one_before_stays(
    node, catalogue, begin
):
    """G21: all hear of it, and the next finite step is saved as ever."""
    ck = begin(node("a"), guard=holdfast.RefuseNonFinite())
    weight = ck.state["model"].weight
    commit(catalogue, ck.step(1))
    whole = weight[0, 0].item()
    with torch.no_grad():
        weight[0, 0] = torch.nan
    refused = ck.step(2)
    until(lambda: refused.error is not None, "it is refused")
    until(lambda: catalogue.said("save_refused"), "people are told")
    until(lambda: catalogue.inventories["a"].abandoned, "the catalogue is told")

    assert isinstance(refused.error, NonFiniteError)
    assert [2] == [item.step for item in catalogue.inventories["a"].abandoned]
    assert {1} == {s.step for s in catalogue.held("a")}
    assert "NaN or infinity in model.weight" in catalogue.said("save_refused")[0]
    with torch.no_grad():
        weight[0, 0] = whole
    commit(catalogue, ck.step(3))


def test_what_was_refused_is_written_also_where_training_fails_of_it(
    node, begin, monkeypatch, tmp_path
):
    """Of the very NaN, it may be: nobody could find out any more what was broken."""
    monkeypatch.setattr(facade, "FAILED_CLOSE_S_MAX", 0.0)
    is_asked, answer, real = threading.Event(), threading.Event(), kept_files._write_all

    def write_all(descriptor, piece):
        is_asked.set()
        answer.wait(30)
        real(descriptor, piece)

    monkeypatch.setattr(kept_files, "_write_all", write_all)
    ck = begin(node("a"), guard=holdfast.RefuseNonFinite(keep=tmp_path / "kept"))
    with torch.no_grad():
        ck.state["model"].weight[0, 0] = torch.nan
    ck.step(1)
    assert is_asked.wait(30)
    threading.Timer(0.3, answer.set).start()
    with pytest.raises(ValueError, match="NaN"), ck:
        raise ValueError("NaN")

    (kept,) = (tmp_path / "kept").rglob("*.*")
    assert "step-1-attempt-1-rank-0.safetensors" == kept.name


def test_a_job_without_a_rule_asks_for_nothing_and_two_slots(node, catalogue, begin):
    a = node("a")
    ck = begin(a)
    handle = ck.step(1)
    commit(catalogue, handle)
    asked = catalogue.registrations[-1].spec

    assert (0, 0.0) == (asked.persist.steps, asked.persist.seconds)
    assert not asked.HasField("retention")
    assert [2] == [s["reservation"]["slots"] for s in a.dump()["sessions"].values()]
    with pytest.raises(PreconditionError, match="persist= is not set"):
        handle.wait("durable")
    assert handle.ended


def test_the_third_slot_is_in_the_sum_that_a_refusal_writes_out(node, monkeypatch):
    """P8: refused at construction, before the first step."""
    a = node("a", HOLDFAST_BUDGET="2M")
    monkeypatch.setenv("HOLDFAST_AGENT", str(a.socket))
    state = {"model": torch.nn.Linear(512, 400)}
    with pytest.raises(ExhaustedError, match="3 slots x"):
        holdfast.Checkpointer("job", state, replicas=0, persist=holdfast.EverySteps(10))
    holdfast.Checkpointer("job", state, replicas=0).close()


def test_slots_by_number_are_reserved_told_and_in_the_sum(node, catalogue, begin, monkeypatch):
    """F43."""
    a = node("a")
    ck = begin(a, slots=4)
    handle = ck.step(1)
    commit(catalogue, handle)

    assert 4 == catalogue.registrations[-1].spec.slots
    assert [4] == [s["reservation"]["slots"] for s in a.dump()["sessions"].values()]

    small = node("b", HOLDFAST_BUDGET="2M")
    monkeypatch.setenv("HOLDFAST_AGENT", str(small.socket))
    state = {"model": torch.nn.Linear(512, 400)}
    with pytest.raises(ExhaustedError, match="4 slots x"):
        holdfast.Checkpointer("job", state, replicas=0, slots=4)


@pytest.mark.parametrize("slots", [1, 17, True, 2.5, "2"])
def test_slots_that_no_rank_can_have_are_refused_by_name(slots):
    """Before an agent is asked."""
    with pytest.raises(InvalidRequestError, match="slots"):
        holdfast.Checkpointer("job", {"model": torch.nn.Linear(1, 1)}, slots=slots)


@pytest.fixture
def collected():
    """Have this thread take gRPC's channel apart after the test.

    Ctrl-C may have left its lock held, by this thread: any other one, in which the channel is found
    as garbage, waits for it for ever.
    """
    yield
    gc.collect()


@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize("when", ["registering", "registered", "waiting"])
def test_ctrl_c_while_a_restore_waits_ends_the_session(node, catalogue, monkeypatch, when):
    """Wherever it was. A script that goes on makes another; no catalogue is said to be lost."""
    a = node("a")
    reported(catalogue, "a")
    monkeypatch.setenv("HOLDFAST_AGENT", str(a.socket))
    ck = holdfast.Checkpointer("job", {"model": torch.nn.Linear(4, 4)}, replicas=0)
    ended = threading.Event()
    if when == "registering":
        catalogue.stop()
    if when == "registered":
        start = AgentSession.start
        monkeypatch.setattr(AgentSession, "start", lambda *args: ended.wait(60) or start(*args))

    def interrupt():
        if when == "registering":
            until((a.arena / "sessions" / ck._session.id).exists, "the session's lock")
        else:
            until(lambda: a.dump()["sessions"], "the session")
        os.kill(os.getpid(), signal.SIGINT)

    other = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # xdist ignores it
    try:
        other.start()
        with pytest.raises(KeyboardInterrupt):
            ck.restore()
    finally:
        signal.signal(signal.SIGINT, before)
        ended.set()
    other.join()

    assert not any(session["live"] for session in a.dump()["sessions"].values())
    with pytest.raises(PreconditionError, match="is closed: make another one"):
        ck.restore()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"persist": holdfast.OnPreemption()}, "use EverySteps, EverySeconds"),
        ({"keep": 5}, r"pass one, such as holdfast.Retention\(last=5\)"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_anything_is_looked_for(options, match):
    with pytest.raises(InvalidRequestError, match=match):
        holdfast.Checkpointer("job", {"tokens": 1}, **options)
