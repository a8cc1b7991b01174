"""Collecting, scrubbing, and what nobody will finish or read."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.integration.persistence.harness import (
    JOB,
    WAIT_S,
    Wrapped,
    draining,
    segment,
    until,
)

from holdfast.bucket.folder import CheckpointFolder
from holdfast.core.persistence_work import CheckpointWork, SweepWork
from holdfast.errors import NotFoundError, UnavailableError
from holdfast.format import keys
from holdfast.objectstore import open_store
from holdfast_services.kit.pace import Pace
from holdfast_services.persistence import worker
from holdfast_services.persistence.collect import collect
from holdfast_services.persistence.orphans import Swept, sweep
from holdfast_services.persistence.scrub import scrub

LENGTH = 5000


@pytest.fixture
def durable(catalogue, node, store, store_url, queue_url):
    """Make checkpoints of two shards durable; return their ids and their shards."""

    def make(*steps, length=LENGTH):
        made = {}
        for step in steps:
            pairs = [segment(length, step=step, rank=rank, world=2) for rank in range(2)]
            for shard, data in pairs:
                node.hold(shard, data)
            made[catalogue.drain([s for s, _ in pairs], [node.peer])] = [s for s, _ in pairs]
        with draining(catalogue, store_url, queue_url):
            until(lambda: all(map(catalogue.durable, made)), "durable")
        return made

    return make


def item(kind, checkpoint):
    return f"{kind}/{checkpoint.run}/{checkpoint.step}/{checkpoint.generation}"


def ask(catalogue, kind, checkpoint, shards=()):
    catalogue.plans[item(kind, checkpoint)] = CheckpointWork(
        checkpoint=checkpoint, job=JOB, shards=tuple(shards)
    )


def under(store, checkpoint):
    return [entry.key for entry in store.list(keys.folder(JOB, checkpoint))]


def test_a_collected_checkpoint_is_gone_and_the_others_stay(
    catalogue, store, store_url, queue_url, durable
):
    """F87, G11: the manifest first, then the rest; the bytes freed are told."""
    first, second = durable(10, 20)
    store.begin(keys.folder(JOB, first) + "shard-00009-of-00010.safetensors", 100, 100)
    lengths = sum(entry.length_bytes for entry in store.list(keys.folder(JOB, first)))
    before = under(store, second)
    wrapped = Wrapped(open_store(store_url))
    ask(catalogue, "collect", first)
    with draining(catalogue, store_url, queue_url, store=wrapped):
        until(lambda: catalogue.collected, "collected")

    assert [(first, lengths)] == catalogue.collected
    assert [] == under(store, first)
    assert [] == list(store.open_uploads())
    assert before == under(store, second)
    deleted = [args[0] for name, args in wrapped.calls if name == "delete"]
    assert [keys.manifest_key(JOB, first)] == deleted[0]


def test_a_drain_that_begins_while_the_last_folder_goes_loses_nothing(store, durable):
    """The run's index goes with its last folder; what is stored at that moment stays."""
    (first,) = durable(10)
    later = keys.segment_key(JOB, segment(LENGTH, step=20)[0].id, 1)
    wrapped = Wrapped(store)
    run = keys.run_folder(JOB, first.run)
    wrapped.before["list"] = lambda prefix="": prefix == run and store.put(later, b"new")

    collect(wrapped, JOB, first, threading.Event())

    assert [later] == [entry.key for entry in store.list()]


def test_collecting_goes_on_after_a_failure(catalogue, store, store_url, queue_url, durable):
    """G11: cut off after the manifest nobody believes the rest, and the repeat takes it away."""
    (first,) = durable(10)
    wrapped = Wrapped(open_store(store_url))
    failed = []

    def fail(names):
        if len(failed) == 0 and "manifest" not in names[0]:
            failed.append(names)
            raise UnavailableError("503")

    wrapped.before["delete"] = fail
    ask(catalogue, "collect", first)
    with draining(catalogue, store_url, queue_url, store=wrapped):
        until(lambda: catalogue.collected, "collected")

    assert failed
    assert [] == list(store.list()), "the index of the run went with its last folder"


def test_a_scrub_finds_what_is_bad_and_nothing_else(
    catalogue, store, store_url, queue_url, durable, monkeypatch
):
    """G20: every byte is read back and hashed against the sidecar and the manifest."""
    made = durable(10, 20)
    (first, shards), (second, others) = made.items()
    path = store.url.removeprefix("file://") + "/" + keys.segment_key(JOB, shards[1].id, 2)
    with Path(path).open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"\xff\x00\xff")
    ask(catalogue, "scrub", first, shards)
    ask(catalogue, "scrub", second, others)
    # Not both at once: the second rests first.
    monkeypatch.setattr(worker, "BACKGROUND_REST_S", 0.05)
    with draining(catalogue, store_url, queue_url):
        until(lambda: len({key for key, _ in catalogue.scrubbed}) == 2, "scrubbed")

    found = dict(catalogue.scrubbed)
    assert {first: [shards[1].id], second: []} == found


def test_scrubs_leave_a_hand_free_for_what_is_to_be_saved(
    catalogue, node, store, store_url, queue_url, durable
):
    """F88: reading old checkpoints back takes hours; two of them must not stop the drain."""
    made = durable(10, 20)
    slow, hold = Wrapped(open_store(store_url)), threading.Event()
    scrubbing = threading.Event()

    def wait(key, begin, view):
        if "step-30" not in key:
            scrubbing.set()
            assert hold.wait(WAIT_S)

    slow.before["read_into"] = wait
    for key, shards in made.items():
        ask(catalogue, "scrub", key, shards)
    shard, data = segment(LENGTH, step=30)
    node.hold(shard, data)
    with draining(catalogue, store_url, queue_url, store=slow, lease_s=60.0):
        until(scrubbing.is_set, "a scrub is under way")
        key = catalogue.drain([shard], [node.peer])
        until(lambda: catalogue.durable(key), "durable")
        assert [] == catalogue.scrubbed
        hold.set()
        until(lambda: catalogue.scrubbed, "scrubbed")


@pytest.mark.parametrize("gone", ["segment", "sidecar", "manifest", "changed"])
def test_a_scrub_tells_what_is_gone(catalogue, store, store_url, queue_url, durable, gone):
    """G20: without its sidecar a shard is bad; a manifest that is lost is written again."""
    ((key, shards),) = durable(10).items()
    first = shards[0].id
    if gone == "changed":  # the catalogue means another checkpoint than the manifest
        shards = [replace(shard, root_digest=b"\1" * 16) for shard in shards]
    else:
        name = {
            "segment": keys.segment_key(JOB, first, 2),
            "sidecar": keys.sidecar_key(JOB, first, 2),
            "manifest": keys.manifest_key(JOB, key),
        }[gone]
        store.delete([name])
    ask(catalogue, "scrub", key, shards)
    with draining(catalogue, store_url, queue_url):
        until(lambda: catalogue.scrubbed, "scrubbed")

    everything = [shard.id for shard in shards]
    wanted = {"segment": [first], "sidecar": [first], "manifest": [], "changed": everything}
    assert wanted[gone] == catalogue.scrubbed[0][1]
    assert key == CheckpointFolder(store, keys.folder(JOB, key)).manifest().checkpoint


def test_a_scrub_writes_no_manifest_of_what_has_expired_meanwhile(store, durable):
    """Reading takes long, and the folder may have been collected: nobody would collect it again."""
    ((key, shards),) = durable(10).items()
    store.delete([keys.manifest_key(JOB, key)])
    plan = CheckpointWork(checkpoint=key, job=JOB, shards=tuple(shards))

    def expired():
        raise NotFoundError("it has expired")

    with pytest.raises(NotFoundError):
        scrub(store, plan, Pace(0), threading.Event(), check_kept=expired)

    assert keys.manifest_key(JOB, key) not in under(store, key)


def test_a_scrub_writes_over_a_manifest_that_cannot_be_read(
    catalogue, store, store_url, queue_url, durable
):
    """G20: the catalogue is the other tier that a manifest is repaired from."""
    ((key, shards),) = durable(10).items()
    name = keys.manifest_key(JOB, key)
    store.put(name, store.get(name, length_bytes_max=1 << 20)[:-40])
    ask(catalogue, "scrub", key, shards)
    with draining(catalogue, store_url, queue_url):
        until(lambda: catalogue.scrubbed, "scrubbed")

    assert [] == catalogue.scrubbed[0][1]
    found = CheckpointFolder(store, keys.folder(JOB, key)).manifest()
    assert {s.id for s in shards} == {s.id for s in found.shards}


def test_a_manifest_does_not_come_back_after_its_folder_was_collected(
    catalogue, store, store_url, queue_url, durable
):
    """G11: it expired while it was read; the scrub must not make a folder of nothing but it."""
    ((key, shards),) = durable(10).items()
    store.delete([keys.manifest_key(JOB, key)])
    wrapped = Wrapped(open_store(store_url))
    read = threading.Event()

    def expire(*_):
        catalogue.plans.pop(item("scrub", key), None)
        read.set()

    wrapped.before["read_into"] = expire
    ask(catalogue, "scrub", key, shards)
    with draining(catalogue, store_url, queue_url, store=wrapped):
        until(read.is_set, "a part is read")
        until(lambda: catalogue.said("persist_failed"), "given up")

    assert keys.manifest_key(JOB, key) not in under(store, key)
    assert [] == catalogue.scrubbed


def test_a_store_that_is_away_condemns_no_checkpoint(
    catalogue, store, store_url, queue_url, durable, tmp_path
):
    """G20: a bucket that is missing says nothing of its shards."""
    ((key, shards),) = durable(10).items()
    aside = tmp_path / "aside"
    (tmp_path / "store").rename(aside)
    ask(catalogue, "scrub", key, shards)
    with draining(catalogue, store_url, queue_url):
        until(lambda: catalogue.said("persist_failed"), "said so")
        assert [] == catalogue.scrubbed
        aside.rename(tmp_path / "store")
        until(lambda: catalogue.scrubbed, "scrubbed")

    assert [] == catalogue.scrubbed[0][1]


def test_orphans_are_taken_away_and_nothing_else(store, durable):
    """G11: folders without a manifest and uploads that nobody ends, when they are old enough;
    never what is draining, never what has a manifest, never what is not ours."""
    kept, torn, now = durable(10, 20, 30)
    store.delete([keys.manifest_key(JOB, torn), keys.manifest_key(JOB, now)])
    foreign = {"notes.txt", f"{JOB}/readme", f"{JOB}/r1/step-x.g1/shard", "other/r1/step-01.g1/x"}
    for name in foreign:
        store.put(name, b"not ours")
    stem = "shard-00000-of-00002.safetensors"
    theirs, mine, alive = (
        store.begin(key, 100, 100)
        for key in ("other/file", keys.folder(JOB, torn) + stem, keys.folder(JOB, now) + stem)
    )
    before = under(store, now)

    def found(before_s):
        return sweep(store, before_s, {now}, threading.Event(), durable=lambda _: False)

    assert Swept() == found(time.time() - 3600), "all is young"
    swept = found(time.time() + 3600)

    assert (1, 1) == (swept.folders, swept.uploads)
    assert swept.freed_bytes > 2 * LENGTH
    assert [] == under(store, torn)
    assert before == under(store, now)
    assert 5 == len(under(store, kept))
    assert foreign <= {entry.key for entry in store.list()}
    assert {theirs.id, alive.id} == {upload.id for upload in store.open_uploads()} - {mine.id}
    assert mine.id not in {upload.id for upload in store.open_uploads()}


def test_a_worker_looks_for_orphans_when_it_is_asked(
    catalogue, store, store_url, queue_url, durable
):
    """G11: by the time that metadata says, which is the database's. What is durable there, and
    has lost its manifest to somebody, can still be restored from: it stays."""
    made = durable(10, 20)
    torn, lost = made
    store.delete([keys.manifest_key(JOB, torn), keys.manifest_key(JOB, lost)])
    ask(catalogue, "scrub", lost, made[lost])
    before = under(store, lost)
    catalogue.plans["orphans/all"] = SweepWork(before_s=time.time() + 3600)
    with draining(catalogue, store_url, queue_url):
        until(lambda: catalogue.said("orphans_deleted"), "swept")

    assert [] == under(store, torn)
    assert before == under(store, lost)
