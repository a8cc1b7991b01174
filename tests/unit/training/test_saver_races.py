"""Saver: what two of its threads may do at the same moment."""

from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress

import pytest
import torch
from tests.unit.training.savers import saver_of, stepped

from holdfast.core.session import SessionView
from holdfast.core.slot_names import SlotName, SlotState
from holdfast.snapshot.engine import Snapshot
from holdfast.training.save_handle import SaveHandle
from holdfast.training.save_machine import events as ev


@pytest.fixture
def leased(tmp_path):
    with saver_of(tmp_path, stepped(torch.nn.Parameter(torch.ones(3)))) as saver:
        yield saver


def test_a_copy_that_ends_while_another_is_closed_closes_its_own_slot(leased):
    """An eager copy ends on the training thread, at any moment of the copy thread's."""
    performer = leased._performer
    leased.on_view(
        SessionView(version="1", leases=(leased.lease(slot="s1"), leased.lease(slot="s2")))
    )
    buffers = [performer.pool.acquire(performer.plan.plan_hash, 0.0) for _ in range(2)]
    performer._on_end = lambda _event: None

    for step, buffer in zip((2, 3), buffers, strict=True):
        snapshot = Snapshot(performer.plan, buffer, step=step, generation=1, deferred=False)
        performer._ended(snapshot)

    closed = [performer.do(ev.CloseSlot(step)) for step in (2, 3)]
    assert closed == [
        ev.Closed(step, SlotName(buffer.slot, 1, SlotState.CLOSED))
        for step, buffer in zip((2, 3), buffers, strict=True)
    ]


def test_a_save_that_begins_while_news_is_told_to_handles_hears_it_too(leased):
    """The watch thread goes through the handles: it must not die of a new one, nor pass it by."""
    first = leased.save(2)
    told, begun = first.lack_copies, list[Future[SaveHandle]]()

    def meanwhile(reason):
        told(reason)
        begun.append(training.submit(leased.save, 3))
        with suppress(NotYet):  # it waits for what is told, or is over
            begun[0].result(timeout=0.5)

    first.lack_copies = meanwhile
    with ThreadPoolExecutor(1) as training:
        leased.on_view(SessionView(version="1", shortage="one node"))
        second = begun[0].result(timeout=20)

    assert "one node" in str(second._shortage)


def test_news_that_cannot_be_taken_are_taken_again(leased):
    """Without the watch thread no slot would ever come, and nobody would hear why."""
    session, heard = leased.session, []

    def on_view(view):
        heard.append(view.version)
        if len(heard) == 1:
            raise RuntimeError("boom")

    session._take(SessionView(version="7"), on_view)
    assert session.view.version == "", "the agent answers at once to a version that is not its own"
    session._take(SessionView(version="7"), on_view)

    assert (heard, session.view.version) == (["7", "7"], "7")
