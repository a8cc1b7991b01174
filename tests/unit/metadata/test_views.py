"""Views as they are sent: one for all who ask of a snapshot, written anew only if they differ."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from holdfast.core.node_view import NodeView
from holdfast.rpc.codec import from_message
from holdfast_services.metadata.calls import views as module
from holdfast_services.metadata.calls.views import Views
from holdfast_services.metadata.domain.node_view import run_view


class Snapshots:
    """What views ask of a transactor: the world that the test gives, work done in a thread."""

    def __init__(self, cluster):
        self.take(cluster)

    def take(self, cluster):
        self.now = cluster.world()

    async def world(self, since_s):
        return self.now

    async def in_thread(self, work):
        return await asyncio.to_thread(work)


@pytest.fixture
def known(cluster):
    cluster.join("a", "b")
    cluster.commit(20, cluster.launch(b"first", "a", "b"), "a", "b")
    return cluster


@pytest.fixture
def abandoning(known):
    """Sixty steps that are given up before one that is acknowledged, and one after it."""
    for step in (*range(21, 81), 120):
        known.abandon("a", step, 1)
    known.hold("a", 60, 1, 0)
    known.commit(100, 1, "a", "b")
    return known


def test_a_view_names_the_newest_steps_that_were_given_up_and_no_older_than_need_be(abandoning):
    """What is older than the acknowledged step is freed anyway: the view need not grow by it."""
    [view] = abandoning.view("a").runs

    assert len(abandoning.run.abandoned) > 60
    assert view.free_before.step == 100
    assert sorted(one.step for one in view.abandoned) == [*range(66, 81), 120]


def test_while_a_restore_is_decided_a_view_names_all_steps_that_were_given_up(abandoning):
    abandoning.launch(b"second", "a", "b")

    [view] = abandoning.view("a").runs

    assert abandoning.run.deciding
    assert view.abandoned == abandoning.run.abandoned


def test_steps_of_an_earlier_attempt_that_nothing_else_frees_stay_in_a_view(abandoning):
    abandoning.launch(b"second", "a", "b")
    abandoning.ready(("a", 0), ("b", 1))

    [view] = abandoning.view("a").runs

    assert not abandoning.run.deciding
    assert [one.step for one in view.abandoned] == [120]


def test_which_steps_a_view_names_goes_by_their_attempt(abandoning):
    """Steps of a newer attempt than the acknowledged one's are not older, whatever their number."""
    run = abandoning.run

    def named(generation, *steps):
        given_up = tuple(replace(run.abandoned[0], step=s, generation=g) for s, g in steps)
        changed = replace(run, generation=generation, abandoned=given_up)
        return {(one.step, one.generation) for one in run_view(changed, {}, "", ()).abandoned}

    newer = {(step, 2) for step in range(30, 51)}
    assert newer == named(2, *newer, (40, 1), (41, 1))
    own = {(step, 1) for step in range(30, 51)}
    others = {(step, 3) for step in range(201, 221)}
    assert named(1, *own, *others) == {*others, *((step, 1) for step in range(35, 51))}


@pytest.fixture
def written(monkeypatch):
    """The views that were written as messages, in order."""
    done = []
    versioned = module.versioned

    def counted(view):
        done.append(view)
        return versioned(view)

    monkeypatch.setattr(module, "versioned", counted)
    return done


async def test_a_message_says_what_the_view_does(known):
    message = await Views(Snapshots(known)).of("a")

    view = from_message(message, NodeView)
    assert view.version
    assert known.view("a") == replace(view, version="")


async def test_who_ask_together_share_one_message(known):
    """A report wakes the watch of its own node: both want the same."""
    views = Views(Snapshots(known))

    one, other, of_b = await asyncio.gather(views.of("a"), views.of("a"), views.of("b"))

    assert one is other
    assert one is not of_b
    assert not views._making


async def test_who_stops_waiting_takes_the_view_from_nobody(known):
    views = Views(Snapshots(known))
    gone = asyncio.create_task(views.of("a"))
    stays = asyncio.create_task(views.of("a"))
    await asyncio.sleep(0)
    gone.cancel()

    assert (await stays).runs


async def test_a_heartbeat_gives_no_new_version_and_nothing_is_written_again(known, written):
    """ADR 0009: a version stands for what is said, and the number of the inventory is nothing."""
    snapshots = Snapshots(known)
    views = Views(snapshots)
    before = await views.of("a")
    known.later(0.5)
    known.report("a")
    snapshots.take(known)

    after = await views.of("a")

    assert before.version == after.version
    assert (before.taken_sequence, after.taken_sequence) == (
        after.taken_sequence - 1,
        known.nodes["a"].inventory.sequence,
    )
    assert len(written) == 1


async def test_a_change_gives_a_version_that_any_process_gives_it(known, written):
    snapshots = Snapshots(known)
    views = Views(snapshots)
    before = await views.of("a")
    known.join("c")
    snapshots.take(known)

    after = await views.of("a")

    assert before.version != after.version
    assert after == await Views(snapshots).of("a")
    assert len(written) == 3


async def test_what_a_node_was_told_is_forgotten_with_the_node(known):
    snapshots = Snapshots(known)
    views = Views(snapshots)
    await views.of("a")
    await views.of("nobody")
    del known.nodes["a"]
    snapshots.take(known)
    await views.of("b")

    assert views._written.keys() == {"b"}


async def test_a_long_view_is_not_kept(known, monkeypatch, written):
    """Of a thousand nodes each view lists a thousand: a million peers would be held."""
    monkeypatch.setattr(module, "KEPT_BYTES_MAX", 10)
    snapshots = Snapshots(known)
    views = Views(snapshots)

    first, again = await views.of("a"), await views.of("a")

    assert first == again
    assert not views._written
    assert len(written) == 2
