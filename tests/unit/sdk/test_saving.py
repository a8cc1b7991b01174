"""Saver: what it counts and how it stretches; copying and slots are tested with real agents."""

import os
from dataclasses import replace

import pytest

from holdfast.core.facts import PersistRule
from holdfast.core.session import SessionView, StepLevels
from holdfast.errors import InvalidRequestError, PreconditionError
from holdfast.handle import SaveHandle
from holdfast.saving import HANDLES_COUNT_MAX, Saver
from holdfast.session import Attempt, Membership, Session
from holdfast.snapshot.engine import Snapshot
from holdfast.snapshot.plan import make_plan
from holdfast.state.capture import Capture


@pytest.fixture
def make_saver(tmp_path):
    session = Session(tmp_path / "nobody.sock")

    def make(**fields):
        made = attempt(**fields)
        capture = Capture({"tokens": 1}, rank=made.rank, world_size=made.world_size)
        membership = Membership(run="r", generation=1, node="n", arena=tmp_path)
        return Saver(capture=capture, session=session, attempt=made, membership=membership)

    make.session = session
    yield make
    session.close(timeout_s=1.0)


@pytest.fixture
def saver(make_saver):
    return make_saver()


def attempt(**fields):
    made = Attempt(
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
    return replace(made, **fields)


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


def refused(handle):
    """A committed step that does not go to the object store."""
    handle.learn(StepLevels(step=handle.step, sealed=True, local=True))
    with pytest.raises(PreconditionError) as caught:
        handle.wait("durable")
    return caught.value.message


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (PersistRule(), "persist= is not set"),
        (PersistRule(steps=100), "the first step committed at or after each 100"),
        (PersistRule(seconds=60), "the first step committed 60 s after the last one that went"),
        (PersistRule(steps=5, seconds=0.5), "at or after each 5, or 0.5 s after the last"),
    ],
)
def test_a_handle_says_which_steps_become_durable(make_saver, rule, text):
    handle = make_saver(persist=rule).save(7)
    handle._failure = None  # nobody answered here: it was abandoned

    assert text in refused(handle)


def test_the_handle_of_a_draining_step_is_remembered_until_its_end(make_saver):
    """A drain may take longer than 64 saves; its handle must still learn how it ends."""
    saver = make_saver(persist=PersistRule(steps=100))
    slow = SaveHandle(100, reachable=frozenset({"local", "durable"}))
    saver._remember(slow)
    saver.on_view(
        SessionView(version="1", steps=(StepLevels(step=100, local=True, draining=True),))
    )
    for step in range(101, 101 + 3 * HANDLES_COUNT_MAX):
        saver._remember(SaveHandle(step, reachable=frozenset({"local", "durable"})))
    assert len(saver._handles) == HANDLES_COUNT_MAX

    saver.on_view(SessionView(version="2", steps=(StepLevels(step=100, local=True, durable=True),)))
    assert slow.level == "durable"


def test_handles_are_bounded_though_all_of_them_drain(make_saver):
    saver = make_saver(persist=PersistRule(steps=1))
    for step in range(3 * HANDLES_COUNT_MAX):
        handle = SaveHandle(step, reachable=frozenset({"local", "durable"}))
        handle.learn(StepLevels(step=step, local=True, draining=True))
        saver._remember(handle)

    assert len(saver._handles) == HANDLES_COUNT_MAX
    assert handle.step in saver._handles


def test_notes_of_rank_0_are_told_and_repeated(make_saver):
    make_saver().save(7, {"loss": 0.5})
    box = make_saver.session._outbox
    first = box.message("s")
    box.delivered(first)

    assert [(7, '{"loss":0.5}')] == [(note.step, note.json) for note in first.notes]
    assert first.notes == box.message("s").notes, "an agent that restarted hears them too"


def test_other_ranks_say_nothing_of_a_step(make_saver):
    make_saver(rank=1, world_size=2).save(7, {"loss": 0.5})

    assert () == make_saver.session._outbox.message("s").notes


def test_notes_that_cannot_be_kept_cost_no_save_and_are_said(make_saver):
    """P4: nothing that a note does ends training; `on_failure="raise"` hears of it."""
    saver = make_saver()
    note = saver._note(7, {"loss": object()})

    assert note is None
    assert isinstance(saver.take_failure(), InvalidRequestError)
    assert "notes_refused" == make_saver.session._outbox.message("s").events[0].kind


def test_missing_nodes_are_said_once_by_rank_0_and_known_to_every_handle(make_saver, caplog):
    """F54; defect X9: saves before and after the news."""
    lack = "replicas=1 needs 2 live nodes, there is 1"
    for rank in (0, 1):
        saver = make_saver(rank=rank, world_size=2)
        before = SaveHandle(5, reachable=frozenset({"local", "replicated"}))
        saver._remember(before)
        for version in ("1", "2"):
            saver.on_view(SessionView(version=version, shortage=lack))
        after = saver.save(6)

        with pytest.raises(PreconditionError, match=lack):
            before.wait("replicated")
        assert after._shortage == lack

    assert 1 == sum(lack in record.message for record in caplog.records)


def test_a_copy_that_was_given_up_is_abandoned_also_without_nodes_for_copies(make_saver):
    """4.1; X9: ``error`` may speak of the nodes, that is no failure."""
    saver = make_saver()
    handle = SaveHandle(5, reachable=frozenset({"local", "replicated"}))
    saver._remember(handle)
    saver.on_view(SessionView(version="1", shortage="replicas=1 needs 2 live nodes"))
    plan = make_plan(saver._capture, job="j", run="r", generation=1, rank=0, world_size=1)
    saver._give_up(Snapshot(plan, None, step=5, generation=1))

    assert handle.abandoned
