"""Saver: what becomes of saves on real slots and threads, without an agent."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.unit.training.savers import Fails, attempt, saver_of, stepped

import holdfast
from holdfast.core.attempts import Seat
from holdfast.core.persistence_rules import PersistRule
from holdfast.core.session import SessionView, StepLevels
from holdfast.errors import InvalidRequestError, OutcomeUnknownError, PreconditionError
from holdfast.rpc.codec import to_message
from holdfast.state.capture import Capture
from holdfast.training.handles_by_step import HANDLES_COUNT_MAX
from holdfast.training.save_handle import SaveHandle
from holdfast.training.save_machine import events as ev
from holdfast.training.saver import Saver
from holdfast.training.session import AgentSession
from holdfast.v1 import agent_pb2 as pb


@pytest.fixture
def make_saver(tmp_path):
    session = AgentSession(tmp_path / "nobody.sock")

    def make(**fields):
        made = attempt(**fields)
        capture = Capture({"tokens": 1}, rank=made.rank, world_size=made.world_size)
        seat = Seat(run="r", generation=1)
        return Saver(capture=capture, session=session, spec=made, seat=seat, arena=tmp_path)

    make.session = session
    yield make
    session.close(timeout_s=1.0)


@pytest.fixture
def saver(make_saver):
    return make_saver()


def lose(saver, *steps):
    """Have these steps given up."""
    for step in steps:
        saver._handle(ev.Failed(step, "no free slot"))


def test_steps_abandoned_in_a_row_stretch_the_interval_and_are_counted(saver):
    """Architecture 4.1: the interval stretches, and it is counted."""
    assert saver.stretch == 1

    lose(saver, 5, 6)

    assert (saver.stretch, saver.abandoned_count) == (4, 2)


def test_the_interval_is_as_asked_again_once_a_later_step_is_local(saver):
    """An older step that is still listed as local proves nothing."""
    lose(saver, 6)
    saver.on_view(SessionView(version="1", steps=(StepLevels(step=5, sealed=True, local=True),)))
    assert saver.stretch == 2

    saver.on_view(SessionView(version="2", steps=(StepLevels(step=7, sealed=True, local=True),)))

    assert (saver.stretch, saver.abandoned_count) == (1, 1)


def test_the_interval_does_not_grow_for_ever(saver):
    lose(saver, *range(1, 40))

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
        (PersistRule(seconds=60), "the first step committed 60 s after the last upload began"),
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
    saver._handles.remember(slow)
    saver.on_view(
        SessionView(version="1", steps=(StepLevels(step=100, local=True, draining=True),))
    )
    for step in range(101, 101 + 3 * HANDLES_COUNT_MAX):
        saver._handles.remember(SaveHandle(step, reachable=frozenset({"local", "durable"})))
    assert len(saver._handles) == HANDLES_COUNT_MAX

    saver.on_view(SessionView(version="2", steps=(StepLevels(step=100, local=True, durable=True),)))
    assert slow.level == "durable"


def test_handles_are_bounded_though_all_of_them_drain(make_saver):
    saver = make_saver(persist=PersistRule(steps=1))
    for step in range(3 * HANDLES_COUNT_MAX):
        handle = SaveHandle(step, reachable=frozenset({"local", "durable"}))
        handle.learn(StepLevels(step=step, local=True, draining=True))
        saver._handles.remember(handle)

    assert len(saver._handles) == HANDLES_COUNT_MAX
    assert handle.step in saver._handles


def test_what_the_last_save_cost_is_told_at_the_end(make_saver):
    """F110: no step follows it that would; an attempt of one step has its stall on the page too."""
    saver = make_saver()
    handle = saver.save(7)
    saver.close(0.0)

    told = make_saver.session._outbox.message("s").report.costs
    assert (handle.stall_s, handle.stall_s) == (told.stall_s, told.stalled_s)
    assert told.stall_s > 0


def test_notes_of_rank_0_are_told_and_repeated(make_saver):
    make_saver().save(7, {"loss": 0.5})
    box = make_saver.session._outbox
    first = box.message("s")
    box.delivered(first)

    assert [(7, '{"loss":0.5}')] == [(note.step, note.json) for note in first.report.notes]
    assert first.report.notes == box.message("s").report.notes, (
        "an agent that restarted hears them too"
    )


def test_other_ranks_say_nothing_of_a_step(make_saver):
    make_saver(rank=1, world_size=2).save(7, {"loss": 0.5})

    assert () == make_saver.session._outbox.message("s").report.notes


def test_notes_that_cannot_be_kept_cost_no_save_and_are_said(make_saver):
    """P4: nothing that a note does ends training; `on_failure="raise"` hears of it."""
    saver = make_saver()
    note = saver._note(7, {"loss": object()})

    assert note is None
    assert isinstance(saver.take_failure(), InvalidRequestError)
    assert "notes_refused" == make_saver.session._outbox.message("s").events[0].kind


class Broken(dict):
    def items(self):
        raise RuntimeError("closed already")


@pytest.mark.parametrize(
    ("notes", "said"),
    [({"seed": 10**5000}, "4300 digits"), (Broken(loss=1), "closed already")],
    ids=["a long number", "no mapping after all"],
)
def test_notes_that_cannot_even_be_read_cost_no_save(make_saver, notes, said):
    """P4: whatever the user's values raise."""
    saver = make_saver()

    saver.save(7, notes)

    events = make_saver.session._outbox.message("s").events
    assert any(said in event.message for event in events if event.kind == "notes_refused")


def test_missing_nodes_are_said_once_by_rank_0_and_known_to_every_handle(make_saver, caplog):
    """F54; defect X9: saves before and after the news."""
    lack = "replicas=1 needs 2 live nodes, but only 1 is there"
    for rank in (0, 1):
        saver = make_saver(rank=rank, world_size=2)
        before = SaveHandle(5, reachable=frozenset({"local", "replicated"}))
        saver._handles.remember(before)
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
    saver._handles.remember(handle)
    saver.on_view(SessionView(version="1", shortage="replicas=1 needs 2 live nodes"))
    saver._state = saver._state._replace(copying=5)
    saver._handle(ev.CopyGivenUp(5, "it held a step up"))

    assert handle.abandoned


@pytest.fixture
def leased(tmp_path):
    value, seen = Fails(), torch.zeros(3)
    with saver_of(tmp_path, {"scheduler": value, "seen": seen}) as saver:
        saver.value, saver.seen = value, seen
        yield saver


def test_who_counts_micro_batches_is_warned_once(tmp_path):
    """As the page of training loops says: ``step`` counts optimizer steps."""
    state = stepped(torch.nn.Parameter(torch.zeros(3)))
    with saver_of(tmp_path, state) as saver:
        saver.note_step(1)  # a loop may save what it begins with
        saver.on_view(SessionView(version="1", leases=(saver.lease(),)))
        saver.save(2).wait("staged", timeout_s=20)
        state["optimizer"].step()
        saver.note_step(3)

        with pytest.warns(UserWarning, match=r"step\(4\): .* not micro-batches") as warned:
            saver.note_step(4)
        saver.note_step(5)

    assert len(warned) == 1


def test_what_a_copy_costs_is_said_before_the_step_is_staged(leased):
    leased.on_view(SessionView(version="1", leases=(leased.lease(),)))
    leased.save(2).wait("staged", timeout_s=20)

    costs = leased.session._outbox.report.costs
    assert (leased._performer.plan.length_bytes, True) == (costs.save_bytes, costs.copy_s > 0)


def test_where_no_optimizer_is_captured_none_is_missed(leased):
    leased.on_view(SessionView(version="1", leases=(leased.lease(),)))
    leased.save(2).wait("staged", timeout_s=20)

    leased.note_step(3)


@pytest.mark.parametrize(
    "error", [ValueError, TypeError, KeyError, AttributeError, AssertionError, MemoryError, OSError]
)
def test_whatever_a_save_raises_costs_that_save_and_names_the_value(leased, error):
    """P4, S4; defect B4: said of which key, the slot is there for the next save."""
    leased.on_view(SessionView(version="1", leases=(leased.lease(),)))
    leased.value.error = error("boom")

    handle = leased.save(2)

    assert handle.abandoned
    assert "boom" in str(handle.error)
    assert "'scheduler'" in str(handle.error)
    assert 2 not in leased.session._outbox.saving, "nobody waits for it"
    leased.value.error = None
    leased.save(3).wait("staged", timeout_s=20)


@pytest.mark.parametrize(
    "said",
    ["no file /data/\udcff.bin", "a\0b", "x" * (80 << 20)],
    ids=["half a pair", "NUL", "80 MB"],
)
def test_whatever_an_error_says_the_agent_can_be_told(leased, said, caplog):
    """P4: what cannot be sent ends the update thread, or stands in front of all that is."""
    leased.on_view(SessionView(version="1", leases=(leased.lease(),)))
    leased.value.error = ValueError(said)

    leased.save(2)

    sent = to_message(leased.session._outbox.message("s"), pb.UpdateRequest).SerializeToString()
    assert len(sent) < 1 << 16
    assert b"\0b" not in sent
    assert len(caplog.text.encode()) < 1 << 16


def test_a_copy_that_fails_gives_its_slot_back(leased, monkeypatch):
    """P4, B4: the only slot is there for the next save, though no copy of this one began."""

    def fails(*_):
        raise MemoryError("boom")

    leased.on_view(SessionView(version="1", leases=(leased.lease(),)))
    with monkeypatch.context() as torch:
        torch.setattr("holdfast.copying.copier.HostCopier.now", fails)
        assert leased.save(2).abandoned

    leased.save(3).wait("staged", timeout_s=20)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_a_user_who_ends_the_process_is_not_held_up_by_a_save(leased, error):
    """B4: what ends a process is no failed save."""
    leased.on_view(SessionView(version="1", leases=(leased.lease(),)))
    leased.value.error = error()

    with pytest.raises(error):
        leased.save(2)


def test_a_save_without_a_slot_says_which_step_wants_one(leased):
    """4.7: the agent may replace steps before it; the wish ends with the slot."""
    box = leased.session._outbox
    assert leased.save(2).level is None
    assert box.wants_slot == 2

    leased.on_view(SessionView(version="1", leases=(leased.lease(),)))
    leased.save(3).wait("staged", timeout_s=20)
    assert box.wants_slot == 0


def test_a_step_without_a_slot_is_dropped_by_all_once_training_goes_on(leased):
    """4.1, X0: until then it is still claimed, since the end of training may save it."""
    box = leased.session._outbox
    leased.save(2)
    assert (2 in box.saving, [a.step for a in box.abandoned if a.step == 2]) == (True, [])

    leased.note_step(3)
    assert (2 in box.saving, [a.step for a in box.abandoned if a.step == 2]) == (False, [2])


def test_closing_saves_the_last_step_that_found_no_slot(leased):
    """X0: there is time now, and nothing has changed since."""
    leased.save(2)
    slots = threading.Timer(
        0.1, lambda: leased.on_view(SessionView(version="1", leases=(leased.lease(),)))
    )
    slots.start()

    error = leased.close(1.0)
    slots.join()

    assert list(leased.arena.glob("s1.1.closed")), error
    assert leased._handles.get(2).level == "staged"


def test_who_waits_for_a_step_that_found_no_slot_gives_it_the_time(leased):
    """4.1: the training thread is in ``wait``, so the state is that of the step."""
    handle = leased.save(2)
    slots = threading.Timer(
        0.1, lambda: leased.on_view(SessionView(version="1", leases=(leased.lease(),)))
    )
    slots.start()

    handle.wait("staged", timeout_s=20)
    slots.join()


def test_another_thread_that_waits_copies_nothing(leased):
    """Training goes on meanwhile: what it would copy is a mixture."""
    handle = leased.save(2)
    leased.on_view(SessionView(version="1", leases=(leased.lease(),)))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(handle.wait, "staged", 0.05)
        with pytest.raises(OutcomeUnknownError):
            waiting.result(20)
    leased.note_step(3)

    with pytest.raises(PreconditionError, match="no free slot"):
        handle.wait("staged", timeout_s=20)


def test_who_waits_for_a_step_that_an_update_has_passed_hears_it_at_once(leased):
    """P4: nothing can save it any more, so that no deadline is waited for."""
    handle = leased.save(2)
    leased.before_update()

    with pytest.raises(PreconditionError, match="no free slot"):
        handle.wait("staged", timeout_s=20)


def test_closing_saves_no_step_that_an_update_has_passed(leased):
    """The state is another one by now: what would be saved is no step at all."""
    leased.save(2)
    leased.before_update()
    leased.on_view(SessionView(version="1", leases=(leased.lease(),)))

    error = leased.close(0.2)

    assert error is not None
    assert "step 2" in error.message
    assert not list(leased.arena.glob("*.closed"))


def test_a_step_that_is_saved_late_is_the_state_of_its_call(leased):
    """P6: a loop that was left, or an evaluation that drew, shows in no step before it."""
    leased.save(2)
    leased.value.n = 7
    leased.on_view(SessionView(version="1", leases=(leased.lease(),)))
    leased.close(1.0)

    (segment,) = leased.arena.glob("s1.1.closed")
    assert b'{"n":1}' in segment.read_bytes()


def test_closing_saves_no_step_of_which_a_tensor_was_written_since(leased):
    """4.1: what is copied before a save returns is not kept for a step without a slot."""
    leased.save(2)
    leased.seen.add_(1)
    leased.on_view(SessionView(version="1", leases=(leased.lease(),)))

    error = leased.close(0.2)

    assert error is not None
    assert not list(leased.arena.glob("*.closed"))


def test_closing_says_how_far_the_last_step_got(leased):
    """X0: step, level and the reason that the agent gave."""
    leased.on_view(SessionView(version="1", leases=(leased.lease(),)))
    leased.save(2).wait("staged", timeout_s=20)
    leased.session.view = SessionView(version="2", degraded="metadata service does not answer")

    error = leased.close(0.05)

    assert isinstance(error, OutcomeUnknownError)
    assert "training ends, but step 2 is staged and did not become replicated" in error.message
    assert "metadata service does not answer" in error.message


def test_who_waits_is_told_when_the_attempt_is_fenced_or_closed(make_saver):
    """X5: nobody waits for what will not come."""
    for end in (
        lambda saver: saver.on_view(SessionView(version="1", fenced=True)),
        lambda saver: saver.close(0.0),
    ):
        saver = make_saver()
        handle = SaveHandle(5, reachable=frozenset({"staged", "local", "replicated"}))
        saver._handles.remember(handle)
        waiting = threading.Timer(0.05, end, [saver])
        waiting.start()
        with pytest.raises(PreconditionError):
            handle.wait("local", timeout_s=20)
        waiting.join()


def test_a_thousand_steps_without_a_slot_are_one_line(leased, caplog):
    """X0: the first is said, then how many there were."""
    for step in range(2, 1002):
        leased.save(step)
    leased.on_view(SessionView(version="1", steps=(StepLevels(step=1002, local=True),)))

    about = [r.getMessage() for r in caplog.records if "no free slot" in r.getMessage()]
    assert len(about) == 1
    assert "; 1000 before it were not saved" in caplog.records[-1].getMessage()


@pytest.mark.parametrize(("world_size", "who"), [(1, "job j: step"), (2, "job j, rank 0: step")])
def test_of_several_ranks_it_is_said_which_one_did_not_save(tmp_path, caplog, world_size, who):
    """All ranks of a node write to one terminal: without it the same line stands there often."""
    with saver_of(tmp_path, {"w": torch.zeros(3)}, world_size=world_size) as saver:
        saver.save(2)
        saver.note_step(3)

    assert any(r.getMessage().startswith(f"{who} 2 is not saved") for r in caplog.records)


def test_a_frozen_tensor_that_has_changed_is_logged_once(tmp_path, caplog):
    """The save after is right; what is wrong is the script."""
    model = torch.nn.Linear(2, 2).requires_grad_(requires_grad=False)
    holdfast.frozen(model)
    with saver_of(tmp_path, {"model": model}) as saver:
        model.weight.add_(1)
        assert not saver._performer.plan.is_current()
        saver._performer._say_doubts(saver._performer.plan)
        saver._performer._say_doubts(saver._performer.plan)

    told = [r.getMessage() for r in caplog.records if "declared frozen" in r.getMessage()]
    assert len(told) == 1
    assert "'model.weight' was declared frozen and has changed since it was saved" in told[0]


def test_what_an_optimizer_trains_beside_the_state_is_logged_once(tmp_path, caplog):
    """Plans are made anew when its state appears; the sentence stays the same."""
    state = stepped(torch.nn.Parameter(torch.zeros(3)))
    state["model"] = torch.nn.Linear(2, 2)
    with saver_of(tmp_path, state) as saver:
        saver._performer._say_doubts(saver._performer.plan)

    told = [r.getMessage() for r in caplog.records if "not in the state" in r.getMessage()]
    assert len(told) == 1
    assert "'optimizer'" in told[0]
