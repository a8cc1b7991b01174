"""Whatever fails around the worker costs time, not checkpoints, and people hear of it."""

from __future__ import annotations

import threading

import pytest
from tests.integration.persistence.harness import (
    JOB,
    MIB,
    Running,
    Wrapped,
    draining,
    read,
    segment,
    until,
)
from tests.servers.redis import running_redis

from holdfast.bucket.folder import CheckpointFolder
from holdfast.errors import (
    AccessError,
    NotFoundError,
    OutcomeUnknownError,
    StaleGenerationError,
    UnavailableError,
)
from holdfast.format import keys
from holdfast.format.digest import PART_BYTES
from holdfast.format.manifest import decode
from holdfast.objectstore import open_store
from holdfast_services.kit.pace import Pace
from holdfast_services.kit.queue import open_queue
from holdfast_services.persistence.collect import collect
from holdfast_services.persistence.pool import PartPool
from holdfast_services.persistence.source import Sources
from holdfast_services.persistence.upload import ShardUpload
from holdfast_services.transport.tcp import TcpTransport

BIG = 2 * PART_BYTES + 1000


@pytest.fixture
def checkpoint(catalogue, node):
    """One shard of three parts, held and due: (checkpoint, shard, bytes)."""
    shard, data = segment(BIG)
    node.hold(shard, data)
    return catalogue.drain([shard], [node.peer]), shard, data


class Once:
    """Raises on the first call for which ``when`` holds, then never again."""

    def __init__(self, error, when=lambda *args, **kwargs: True) -> None:
        self.error, self.when, self.raised = error, when, 0

    def __call__(self, *args, **kwargs) -> None:
        if not self.raised and self.when(*args, **kwargs):
            self.raised += 1
            raise self.error


STORE_CALLS = ("head", "open_uploads", "begin", "put_part", "finish", "read_into", "put")


@pytest.mark.parametrize(
    ("call", "error"),
    [
        *((call, UnavailableError("503 slow down")) for call in STORE_CALLS),
        ("put_part", AccessError("the token has expired")),
    ],
    ids=[*STORE_CALLS, "expired"],
)
def test_a_store_that_fails_for_a_while_delays_and_says_so(
    catalogue, checkpoint, store, store_url, queue_url, call, error
):
    """G10, F88: 500, 503, timeouts, credentials that expire mid-upload: the item rests, then goes
    on with the parts that are there."""
    key, shard, data = checkpoint
    wrapped = Wrapped(open_store(store_url))
    second = lambda *a, **k: call != "put_part" or a[1] == 1  # noqa: E731
    wrapped.before[call] = once = Once(error, second)
    with draining(catalogue, store_url, queue_url, store=wrapped, parts=1):
        until(lambda: catalogue.durable(key), "durable")

    assert 1 == once.raised
    assert error.kind in [event.context["error"] for event in catalogue.said("persist_failed")]
    assert bytes(data) == read(store, shard)
    assert wrapped.count("put_part") - (call == "put_part") == 3, "no part is sent twice"
    assert [] == list(store.open_uploads())


def test_a_store_that_is_missing_is_named_and_waited_for(
    catalogue, checkpoint, tmp_path, store_url, queue_url
):
    """The bucket, or the volume, is not there: the item waits, the event says why."""
    key, _, _ = checkpoint
    with draining(catalogue, store_url, queue_url):
        until(lambda: catalogue.said("persist_failed"), "said so")
        assert "missing" in catalogue.said("persist_failed")[0].message
        (tmp_path / "store").mkdir()
        until(lambda: catalogue.durable(key), "durable")


def test_a_full_disk_is_waited_for(catalogue, checkpoint, tmp_path, queue_url, mounted):
    """The directory store runs full: the item is given back, with an event, and goes later."""
    key, shard, data = checkpoint
    small = mounted(tmp_path / "small", f"size={48 * MIB}")
    ballast = small / "ballast"
    ballast.write_bytes(bytes(20 * MIB))
    url = (small / "store").as_uri()
    open_store(url, make=True).close()
    with draining(catalogue, url, queue_url):
        until(lambda: catalogue.said("persist_failed"), "said so")
        ballast.unlink()
        until(lambda: catalogue.durable(key), "durable")
    assert "exhausted" == catalogue.said("persist_failed")[0].context["error"]
    assert bytes(data) == read(open_store(url), shard)


@pytest.mark.parametrize("collected", [True, False])
def test_a_manifest_that_comes_after_its_checkpoint_was_collected_is_taken_back(
    catalogue, checkpoint, store, store_url, queue_url, collected
):
    """P6: its writer was paused that long; else a new catalogue takes in what is not there. One
    that a lost catalogue refuses is good, and stays."""
    key, shard, data = checkpoint
    wrapped, named = Wrapped(open_store(store_url)), keys.manifest_key(JOB, checkpoint[0])

    def pause(name, *_, **__):
        if name == named and not catalogue.refuse:
            catalogue.refuse.append(NotFoundError("no checkpoint of step 1"))
            if collected:
                collect(store, JOB, key, threading.Event())

    def there():
        return [entry.key for entry in store.list(keys.folder(JOB, key))]

    wrapped.before["put"] = pause
    with draining(catalogue, store_url, queue_url, store=wrapped):
        until(lambda: catalogue.refuse, "refused")
        if collected:
            until(lambda: wrapped.count("delete") and not there(), "taken back")
        else:
            until(lambda: catalogue.said("persist_failed"), "said so")

    assert (named in there()) is not collected
    assert collected or bytes(data) == read(store, shard)


def test_metadata_that_is_away_is_waited_for(catalogue, checkpoint, store, store_url, queue_url):
    """An outage at the report: the object is there, so it is not sent again."""
    key, _, _ = checkpoint
    wrapped = Wrapped(open_store(store_url))
    stopped = threading.Event()

    def stop_once(name, *_, **__):
        if name.endswith(".sum") and not stopped.is_set():
            catalogue.stop()
            stopped.set()

    wrapped.before["put"] = stop_once
    with draining(catalogue, store_url, queue_url, store=wrapped, parts=1):
        until(stopped.is_set, "stopped")
        until(lambda: wrapped.count("put") == 1, "sidecar written")
        catalogue.start()
        until(lambda: catalogue.durable(key), "durable")

    assert 3 == wrapped.count("put_part")


def test_a_redis_that_comes_back_empty_costs_nothing(catalogue, checkpoint, store, store_url):
    """Losing the queue loses nothing: what is still due is offered again."""
    key, shard, data = checkpoint
    wrapped = Wrapped(open_store(store_url))
    with running_redis() as redis:
        lost = threading.Event()

        def lose(upload, number, view):
            if number == 1 and not lost.is_set():
                redis.kill()
                redis.start()
                lost.set()

        wrapped.before["put_part"] = lose
        with draining(catalogue, store_url, redis.url, store=wrapped, parts=1):
            until(lambda: catalogue.durable(key), "durable")

    assert lost.is_set()
    assert bytes(data) == read(store, shard)


def test_two_workers_on_one_shard_are_harmless(catalogue, checkpoint, store, store_url, tmp_path):
    """Same name, same bytes: both are at it at once, each with a queue of its own."""
    key, shard, data = checkpoint
    meet = threading.Barrier(2)
    both = []

    def together(upload, number, view):
        if number == 1 and not meet.broken:
            try:
                meet.wait(5)
                both.append(number)
            except threading.BrokenBarrierError:
                return

    workers = []
    for name in ("one", "two"):
        queue = open_queue(f"sqlite:///{tmp_path / name}.db", lease_s=30.0)
        queue.offer([f"shard/{shard.id.key}"])
        wrapped = Wrapped(open_store(store_url))
        wrapped.before["put_part"] = together
        workers.append((Running(catalogue, wrapped, queue, name=name, parts=1), queue, wrapped))
    until(lambda: len(catalogue.reports) >= 1, "stored")
    until(lambda: all(q.waiting_count() == 0 for _, q, _ in workers), "done by both")
    for running, queue, wrapped in workers:
        running.stop()
        queue.close()
        wrapped.close()

    assert both, "both were at it at the same time"
    assert bytes(data) == read(store, shard)
    sidecar = CheckpointFolder(store, keys.folder(JOB, key)).sidecar(shard)
    assert shard == sidecar.shard
    assert [] == catalogue.said("persist_failed")


def test_an_upload_aborted_under_our_feet_is_begun_again(
    catalogue, checkpoint, store, store_url, queue_url
):
    """Orphan collection or a second worker may end an upload at any time."""
    key, shard, data = checkpoint
    wrapped = Wrapped(open_store(store_url))
    aborted = []

    def abort(upload, number, view):
        if number == 2 and not aborted:
            aborted.append(upload.id)
            store.abort(upload)

    wrapped.before["put_part"] = abort
    with draining(catalogue, store_url, queue_url, store=wrapped, parts=1):
        until(lambda: catalogue.durable(key), "durable")

    assert 2 == wrapped.count("begin")
    assert bytes(data) == read(store, shard)
    assert [] == catalogue.said("persist_failed")


def test_an_object_that_is_not_what_was_sent_is_written_again(
    catalogue, checkpoint, store, store_url, queue_url
):
    """G10: what the store does not check is read back; a flipped byte there is found."""
    key, shard, data = checkpoint
    wrapped = Wrapped(open_store(store_url))
    flipped = []

    def flip(upload, parts):
        if not flipped:
            bad = bytearray(data[: upload.part_bytes])
            bad[100] ^= 1
            part = store.put_part(upload, 0, memoryview(bad))
            parts[0] = part
            flipped.append(part)

    wrapped.before["finish"] = flip
    with draining(catalogue, store_url, queue_url, store=wrapped):
        until(lambda: catalogue.durable(key), "durable")

    assert flipped
    assert bytes(data) == read(store, shard)


def test_parts_of_a_dead_worker_are_kept_and_all_of_them_proven(
    catalogue, checkpoint, store, store_url, queue_url
):
    """G10: the upload goes on where it was; a part whose bytes are wrong does not survive."""
    key, shard, data = checkpoint
    upload = store.begin(keys.segment_key(JOB, shard.id, 1), len(data), PART_BYTES)
    store.put_part(upload, 0, memoryview(data)[:PART_BYTES])
    wrapped = Wrapped(open_store(store_url))
    with draining(catalogue, store_url, queue_url, store=wrapped):
        until(lambda: catalogue.durable(key), "durable")

    assert [1, 2] == sorted(a[1] for name, a in wrapped.calls if name == "put_part")
    assert str(PART_BYTES) == catalogue.said("persisted")[0].context["kept_bytes"]
    assert bytes(data) == read(store, shard)


def test_a_wrong_part_of_a_dead_worker_is_found_and_sent_again(
    catalogue, checkpoint, store, store_url, queue_url
):
    """P3: nobody who lives has hashed it, so it is read back."""
    key, shard, data = checkpoint
    upload = store.begin(keys.segment_key(JOB, shard.id, 1), len(data), PART_BYTES)
    store.put_part(upload, 1, memoryview(bytes(PART_BYTES)))
    with draining(catalogue, store_url, queue_url):
        until(lambda: catalogue.durable(key), "durable")

    assert bytes(data) == read(store, shard)


def test_an_object_whose_writer_died_before_proving_it_is_proven_not_sent(
    catalogue, checkpoint, store, store_url, queue_url
):
    """Killed between finish and sidecar: all of it is read, none of it is sent."""
    key, shard, data = checkpoint
    upload = store.begin(keys.segment_key(JOB, shard.id, 1), len(data), len(data))
    store.finish(upload, [store.put_part(upload, 0, memoryview(data))])
    wrapped = Wrapped(open_store(store_url))
    with draining(catalogue, store_url, queue_url, store=wrapped):
        until(lambda: catalogue.durable(key), "durable")

    assert (0, 3) == (wrapped.count("put_part"), wrapped.count("read_into") - 1)


@pytest.mark.parametrize("written", [True, False])
def test_a_manifest_whose_answer_is_lost_is_read_back(
    catalogue, checkpoint, store, store_url, queue_url, written
):
    """A lost answer is read back by write id, and never repeated blind."""
    key, _, _ = checkpoint
    wrapped = Wrapped(open_store(store_url))

    def lose(name, data, *, if_absent=False):
        if name.endswith("manifest.json") and wrapped.count("get") < 3:
            if written:
                store.put(name, data, if_absent=if_absent)
            wrapped.before.clear()
            raise OutcomeUnknownError("the answer was lost")

    wrapped.before["put"] = lose
    with draining(catalogue, store_url, queue_url, store=wrapped):
        until(lambda: catalogue.durable(key), "durable")

    tried = [a[0] for name, a in wrapped.calls if name == "put" and a[0].endswith("manifest.json")]
    assert (1 if written else 2) == len(tried)
    failed = [event.context["error"] for event in catalogue.said("persist_failed")]
    assert ([] if written else ["unavailable"]) == failed


@pytest.mark.parametrize("repair", [False, True], ids=["drain", "repair"])
def test_a_checkpoint_of_other_shards_is_never_overwritten(
    catalogue, node, store, store_url, queue_url, repair
):
    """P2: two claims to one folder; all of the first stays, and people hear of the second."""
    shard, data = segment(5000, seed=1)
    node.hold(shard, data)
    key = catalogue.drain([shard], [node.peer])
    with draining(catalogue, store_url, queue_url):
        until(lambda: catalogue.durable(key), "durable")
        before = {o.key: o.etag for o in store.list(keys.folder(JOB, key))}
        other, others = segment(5000, seed=2)
        node.hold(other, others)
        catalogue.drain([other], [node.peer], repair=repair)
        until(lambda: catalogue.said("persist_failed"), "refused")

    assert before == {o.key: o.etag for o in store.list(keys.folder(JOB, key))}
    assert bytes(data) == read(store, shard)
    assert "precondition" == catalogue.said("persist_failed")[0].context["error"]


def test_a_manifest_that_nobody_can_read_is_written_again(
    catalogue, node, store, store_url, queue_url
):
    """It was refused each minute for ever, and nothing later of the run went to the store."""
    shard, data = segment(5000)
    node.hold(shard, data)
    key = keys.manifest_key(JOB, shard.id.checkpoint)
    store.put(key, b"torn")
    catalogue.drain([shard], [node.peer])
    with draining(catalogue, store_url, queue_url):
        until(lambda: catalogue.durable(shard.id.checkpoint), "durable")

    assert (shard,) == decode(store.get(key, length_bytes_max=1 << 20)).shards
    assert not catalogue.said("persist_failed")


def test_a_worker_of_an_older_generation_harms_nothing(
    catalogue, node, store, store_url, queue_url
):
    """P2: it wakes up after the newer manifest; metadata refuses, its folder is its own."""
    newer, data = segment(5000, generation=2, seed=2)
    node.hold(newer, data)
    new = catalogue.drain([newer], [node.peer])
    with draining(catalogue, store_url, queue_url):
        until(lambda: catalogue.durable(new), "durable")
        before = {o.key: o.etag for o in store.list(keys.folder(JOB, new))}
        older, data = segment(5000, generation=1, seed=1)
        node.hold(older, data)
        catalogue.refuse.append(StaleGenerationError("a newer attempt has replaced this one"))
        old = catalogue.drain([older], [node.peer])
        until(lambda: catalogue.said("persist_failed"), "refused")

    assert "stale_generation" == catalogue.said("persist_failed")[0].context["error"]
    assert not catalogue.durable(old)
    assert before == {o.key: o.etag for o in store.list(keys.folder(JOB, new))}


def test_a_shard_that_is_missing_keeps_the_manifest_from_being_written(
    catalogue, node, store, store_url, queue_url
):
    """P1: whatever the catalogue believes, the manifest comes after all shards or not at all."""
    made = [segment(5000, rank=rank, world=2) for rank in range(2)]
    key = catalogue.drain([s for s, _ in made], [node.peer])
    node.hold(*made[0])
    facts = catalogue.checkpoints[key]
    facts.stored.add(made[1][0].id)
    with draining(catalogue, store_url, queue_url):
        until(lambda: catalogue.said("persist_failed"), "refused")

    assert "not_ready" == catalogue.said("persist_failed")[0].context["error"]
    assert made[1][0].id.key in catalogue.said("persist_failed")[0].message
    assert not any(o.key.endswith("manifest.json") for o in store.list())


@pytest.mark.parametrize("harm", ["delete", "truncate", "no sidecar", "header"])
def test_a_shard_that_goes_bad_before_the_manifest_is_sent_again(
    catalogue, node, store, store_url, queue_url, harm
):
    """G10: the catalogue believes it is there; a drain that could not end would stop all later."""
    made = [segment(5000, rank=rank, world=2) for rank in range(2)]
    for shard, data in made:
        node.hold(shard, data)
    shard, data = made[1]
    key = catalogue.drain([s for s, _ in made], [node.peer])
    pool = PartPool(1)
    for plan in catalogue.due().values():
        copies = Sources(plan.shard, plan.sources, pool, TcpTransport())
        ShardUpload(store, pool, Pace(0), plan, threading.Event(), copies).run()
    pool.close()
    catalogue.checkpoints[key].stored.update(s.id for s, _ in made)
    where = (JOB, shard.id, 2)
    if harm == "delete":
        store.delete([keys.segment_key(*where)])
    elif harm == "no sidecar":
        store.delete([keys.sidecar_key(*where)])
    else:
        bad = bytes(data[:-1]) if harm == "truncate" else b"\xff" * len(data)
        store.put(keys.segment_key(*where), bad)

    with draining(catalogue, store_url, queue_url):
        until(lambda: catalogue.durable(key), "durable")

    assert bytes(data) == read(store, shard)
    assert [(key, [shard.id])] == catalogue.scrubbed


def test_a_byte_rate_is_kept(catalogue, checkpoint, store, store_url, queue_url):
    """F88: with a rate the parts wait for each other, and stopping does not wait for the rate."""
    key, _, _ = checkpoint
    wrapped = Wrapped(open_store(store_url))
    with draining(catalogue, store_url, queue_url, store=wrapped, rate=MIB, parts=1):
        until(lambda: wrapped.count("begin"), "begun")

    assert 0 == wrapped.count("put_part"), "16 MiB at 1 MiB/s take sixteen seconds"
    assert not catalogue.durable(key)
