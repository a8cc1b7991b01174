"""The worker as a process: how it starts, how it is told to stop, what memory it takes."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.integration.persistence.harness import (
    JOB,
    MIB,
    WAIT_S,
    Reconcile,
    Wrapped,
    draining,
    read,
    segment,
    until,
)
from tests.integration.persistence.process import WorkerProcess

from holdfast.errors import NotFoundError
from holdfast.format import keys
from holdfast.format.digest import PART_BYTES
from holdfast.objectstore import open_store
from holdfast_services.kit.queue import open_queue

PARTS = 4
LENGTH = (PARTS - 1) * PART_BYTES + 1000
LEASE_S = 300.0
BIG = 16 * PART_BYTES
ALLOWANCE_KIB = 24 << 10


@pytest.fixture
def spawn(tmp_path, catalogue, store, store_url, queue_url):
    """Start a worker process with these settings; killed at the end."""
    started = []

    def start(name="p", **environ):
        environ = {"HOLDFAST_WORKER": name, **environ}
        made = WorkerProcess(tmp_path / name, catalogue.address, store_url, queue_url, **environ)
        started.append(made)
        return made.start()

    yield start
    for made in started:
        made.kill()


@pytest.fixture
def offered(catalogue, queue_url):
    """Metadata offers what is due, again and again."""
    queue = open_queue(queue_url, lease_s=LEASE_S)
    reconcile = Reconcile(catalogue, queue)
    yield queue
    reconcile.stop()
    queue.close()


def parts_of(store, shard):
    """Which parts of the open upload of a shard are there."""
    key = keys.segment_key(JOB, shard.id, shard.world_size)
    with suppress(NotFoundError):
        for opened in store.open_uploads(key):
            return store.parts(store.resume(opened, shard.length_bytes, PART_BYTES))
    return {}


def test_a_worker_told_to_stop_leaves_its_upload_to_the_next_one(
    catalogue, node, store, store_url, queue_url, spawn, offered
):
    """G10: SIGTERM in the middle: the claim is given back at once, parts that are there stay."""
    shard, data = segment(LENGTH)
    node.hold(shard, data)
    key = catalogue.drain([shard], [node.peer])
    first = spawn(
        HOLDFAST_PERSIST_PARTS="1",
        HOLDFAST_PERSIST_RATE="12MiB",
        HOLDFAST_QUEUE_LEASE_S=str(LEASE_S),
    )
    until(lambda: parts_of(store, shard), "a part is there")
    assert 0 == first.terminate(), first.log()
    there = len(parts_of(store, shard))
    wrapped = Wrapped(open_store(store_url))
    # Within its lease of five minutes only what was given back can be claimed.
    with draining(catalogue, store_url, queue_url, store=wrapped, lease_s=LEASE_S):
        until(lambda: catalogue.durable(key), "durable")

    assert there < PARTS, "the test was too slow to stop it in the middle"
    assert PARTS - there == wrapped.count("put_part")
    assert bytes(data) == read(store, shard)


def test_a_worker_that_is_killed_is_taken_over(catalogue, node, store, store_url, queue_url, spawn):
    """G10: SIGKILL: the lease runs out, the parts that are there stay."""
    shard, data = segment(LENGTH)
    node.hold(shard, data)
    key = catalogue.drain([shard], [node.peer])
    queue = open_queue(queue_url, lease_s=1.0)
    queue.offer(sorted(catalogue.due()))
    first = spawn(
        HOLDFAST_PERSIST_PARTS="1", HOLDFAST_PERSIST_RATE="12MiB", HOLDFAST_QUEUE_LEASE_S="1"
    )
    until(lambda: parts_of(store, shard), "a part is there")
    first.kill()
    there = len(parts_of(store, shard))
    wrapped = Wrapped(open_store(store_url))
    with draining(catalogue, store_url, queue_url, store=wrapped, lease_s=1.0):
        until(lambda: catalogue.durable(key), "durable")
    queue.close()

    assert PARTS - there == wrapped.count("put_part")
    assert bytes(data) == read(store, shard)


def figures(worker):
    text = httpx.get(f"{worker.ready['metrics_url']}/metrics", timeout=WAIT_S).text
    families = list(text_string_to_metric_families(text))
    assert all(one.documentation and one.type != "unknown" for one in families)
    found = [sample for one in families for sample in one.samples]
    return {(one.name[len("holdfast_worker_") :], *one.labels.values()): one.value for one in found}


def test_a_worker_tells_prometheus_what_it_drained_and_what_failed(catalogue, node, spawn, offered):
    """F110."""
    worker = spawn(HOLDFAST_METRICS_LISTEN="0")
    shard, data = segment(LENGTH)
    node.hold(shard, data)
    key = catalogue.drain([shard], [node.peer])
    until(lambda: catalogue.durable(key), "durable")
    until(lambda: ("item_seconds_count", "manifest") in figures(worker), "its end is told")
    told = figures(worker)

    assert shard.length_bytes == told["drained_bytes_total", "sent"]
    assert (1, 1) == (told["item_seconds_count", "shard"], told["queue_up",])
    assert 0 == told["items", "shard"] == told["failures_total", "unavailable", "shard"]

    lost, _ = segment(MIB, step=20)
    catalogue.drain([lost], [node.peer])  # the node does not have it
    failed = until(
        lambda: [k for k, v in figures(worker).items() if k[0] == "failures_total" and v], "told"
    )
    assert {"shard"} == {kind for _, _, kind in failed}


@pytest.mark.parametrize("where", ["node", "far"])
def test_memory_is_bounded_by_parts_in_flight(request, where, catalogue, store, spawn, offered):
    """P8: a shard of 256 MiB takes two parts of memory and what Python needs; so does any."""
    holder = request.getfixturevalue(where)
    parts = 2
    worker = spawn(HOLDFAST_PERSIST_PARTS=str(parts))
    for step, length in ((10, MIB), (20, BIG)):
        shard, data = segment(length, step=step)
        holder.hold(shard, data)
        before_kib = worker.memory_kib("VmHWM")
        key = catalogue.drain([shard], [holder.peer])
        until(lambda key=key: catalogue.durable(key), "durable")
    grown_kib = worker.memory_kib("VmHWM") - before_kib

    assert grown_kib < (parts * PART_BYTES >> 10) + ALLOWANCE_KIB
    assert bytes(data) == read(store, shard)


def test_a_worker_says_when_it_is_ready_and_stops_when_told(spawn):
    """It needs neither store nor metadata to be there: they may come later."""
    worker = spawn("idle")

    assert "idle" == json.loads((worker.folder / "ready.json").read_text())["worker"]
    assert 0 == worker.terminate(), worker.log()


def test_the_worker_yields_to_the_training_process(spawn):
    """It takes what processor time is left over."""
    worker = spawn()
    stat = Path(f"/proc/{worker.process.pid}/stat").read_text()

    assert 10 == int(stat.rpartition(")")[2].split()[16])
