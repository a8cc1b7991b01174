"""Claims: who gives them back, who loses them, and what then is left undone."""

from __future__ import annotations

import threading

import pytest
from tests.integration.persistence.harness import (
    WAIT_S,
    Running,
    Wrapped,
    draining,
    read,
    segment,
    until,
)

from holdfast.errors import UnavailableError
from holdfast.format.digest import PART_BYTES
from holdfast.objectstore import open_store
from holdfast_services.kit.queue import open_queue
from holdfast_services.persistence import worker

BIG = 2 * PART_BYTES + 1000


@pytest.fixture
def held(catalogue, node):
    """One shard of three parts, held and due: (checkpoint, shard, bytes)."""
    shard, data = segment(BIG)
    node.hold(shard, data)
    return catalogue.drain([shard], [node.peer]), shard, data


class Gate:
    """Holds whoever comes until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, *args, **kwargs) -> None:
        self.reached.set()
        assert self.opened.wait(WAIT_S)


def test_a_part_that_hangs_does_not_keep_a_claim_from_being_given_back(
    catalogue, held, store, store_url, queue_url, monkeypatch
):
    """G10: SIGTERM while the store is silent: the claim goes back, another worker goes on."""
    key, shard, data = held
    monkeypatch.setattr(worker, "DRAIN_S_MAX", 0.2)
    hanging = Wrapped(open_store(store_url))
    hanging.before["put_part"] = gate = Gate()
    queue = open_queue(queue_url, lease_s=300.0)
    queue.offer(sorted(catalogue.due()))
    first = Running(catalogue, hanging, queue, name="one", parts=1, lease_s=300.0)
    until(gate.reached.is_set, "a part is in flight")
    first.stop()
    with draining(catalogue, store_url, queue_url, lease_s=300.0):
        until(lambda: catalogue.durable(key), "durable")
    gate.opened.set()
    queue.close()

    assert bytes(data) == read(store, shard)


def test_a_worker_that_lost_its_claim_stops_and_settles_nothing(
    catalogue, held, store, store_url, queue_url
):
    """G10: silent for longer than its lease, it wakes up and finds that another has the item."""
    key, shard, data = held
    slow = Wrapped(open_store(store_url))
    slow.before["put_part"] = gate = Gate()
    queue = Wrapped(open_queue(queue_url, lease_s=0.6))
    silent = threading.Event()
    silent.set()

    def fail(*_):
        if silent.is_set():
            raise UnavailableError("cut off")

    queue.before["heartbeat"] = fail
    queue.offer(sorted(catalogue.due()))
    first = Running(catalogue, slow, queue, name="one", parts=1, lease_s=0.6)
    until(gate.reached.is_set, "a part is in flight")
    other = open_queue(queue_url, lease_s=0.6)
    second = Running(catalogue, store, other, name="two", lease_s=0.6)
    until(lambda: catalogue.reports == [shard.id], "the second has stored it")
    silent.clear()
    beats = queue.count("heartbeat")
    until(lambda: queue.count("heartbeat") > beats + 1, "the first is heard again")
    gate.opened.set()
    first.stop()
    second.stop()
    other.close()
    queue.close()

    assert [shard.id] == catalogue.reports
    assert 0 == queue.count("acknowledge") + queue.count("release")
    assert bytes(data) == read(store, shard)
    assert not catalogue.durable(key), "the manifest was not offered in this test"
