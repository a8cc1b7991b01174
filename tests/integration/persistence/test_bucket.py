"""The drain against a real S3 server, and against one that fails as servers do."""

from __future__ import annotations

import pytest
from tests.integration.persistence.harness import (
    JOB,
    Wrapped,
    draining,
    read,
    segment,
    until,
)
from tests.servers.proxy import Answer, Delay, Drop, Truncate

from holdfast.bucket.folder import CheckpointFolder
from holdfast.bucket.verify import verify
from holdfast.format import keys
from holdfast.format.digest import PART_BYTES
from holdfast.format.manifest import decode
from holdfast.objectstore import open_store

BIG = 2 * PART_BYTES + 1000


@pytest.fixture
def bucket_url(ceph):
    return ceph.url("some/prefix")


@pytest.fixture
def bucket(bucket_url):
    made = open_store(bucket_url)
    yield made
    made.close()


def whole(store, checkpoint):
    folder = CheckpointFolder(store, keys.folder(JOB, checkpoint))
    return all(verdict.ok for verdict in verify(folder, folder.manifest()))


def test_checkpoints_go_to_a_bucket_and_share_what_has_not_changed(
    catalogue, node, bucket, bucket_url, queue_url
):
    """F85, G10, G16: multipart, copied on the server, the parts of a dead worker kept."""
    first, old = segment(BIG, step=10)
    second, new = segment(BIG, step=20, change=[PART_BYTES + 77])
    node.hold(first, old)
    node.hold(second, new)
    upload = bucket.begin(keys.segment_key(JOB, first.id, 1), len(old), PART_BYTES)
    bucket.put_part(upload, 1, memoryview(old)[PART_BYTES : 2 * PART_BYTES])
    before = catalogue.drain([first], [node.peer])
    wrapped = Wrapped(open_store(bucket_url))
    with draining(catalogue, bucket_url, queue_url, store=wrapped):
        until(lambda: catalogue.durable(before), "durable")
    after = catalogue.drain([second], [node.peer], earlier=(before,))
    again = Wrapped(open_store(bucket_url))
    with draining(catalogue, bucket_url, queue_url, store=again):
        until(lambda: catalogue.durable(after), "durable")

    assert 2 == wrapped.count("put_part"), "one of three was there"
    assert (2, 1) == (again.count("put_part"), again.count("copy_part"))
    assert whole(bucket, before)
    assert whole(bucket, after)
    assert bytes(new) == read(bucket, second)
    assert [] == list(bucket.open_uploads())


FAULTS = {
    "500": lambda p: p.fail(Answer(500, "InternalError"), method="PUT", path="partNumber", times=2),
    "503": lambda p: p.fail(Answer(503, "SlowDown"), times=2),
    "broken off": lambda p: p.fail(Drop(), method="PUT", path="partNumber"),
    "answer lost": lambda p: p.fail(Drop(after=True), method="POST", path="uploadId"),
    "slow": lambda p: p.fail(Delay(0.2), times=2),
    "truncated": lambda p: p.fail(Truncate(1000), method="GET", path="safetensors", times=2),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_fails_costs_time_and_nothing_else(
    catalogue, node, ceph, queue_url, fault_proxy, fault
):
    """F88, P3: 500, 503, connections broken before and after the deed, slow, truncated bodies."""
    proxy = fault_proxy(ceph.endpoint)
    url = ceph.at(ceph.bucket(), endpoint=proxy.endpoint)
    shard, data = segment(PART_BYTES + 1000)
    node.hold(shard, data)
    FAULTS[fault](proxy)
    key = catalogue.drain([shard], [node.peer])
    with draining(catalogue, url, queue_url):
        until(lambda: catalogue.durable(key), "durable")
    proxy.heal()
    store = open_store(url)

    assert whole(store, key)
    assert [] == list(store.open_uploads())
    store.close()


def test_credentials_that_expire_while_it_uploads_are_waited_for(
    catalogue, node, ceph, queue_url, fault_proxy
):
    """The event says so; with new ones the upload goes on where it was."""
    proxy = fault_proxy(ceph.endpoint)
    url = ceph.at(ceph.bucket(), endpoint=proxy.endpoint)
    shard, data = segment(BIG)
    node.hold(shard, data)
    proxy.fail(Answer(403, "ExpiredToken"), path="partNumber", skip=3, times=1000)
    key = catalogue.drain([shard], [node.peer])
    wrapped = Wrapped(open_store(url))
    with draining(catalogue, url, queue_url, store=wrapped, parts=1):
        until(lambda: catalogue.said("persist_failed"), "said so")
        sent = wrapped.count("put_part")
        proxy.heal()
        until(lambda: catalogue.durable(key), "durable")

    assert "access" == catalogue.said("persist_failed")[0].context["error"]
    assert "expired" in catalogue.said("persist_failed")[0].message
    assert sent < wrapped.count("put_part") <= sent + 3
    assert whole(wrapped.inner, key)


def test_a_bucket_that_is_missing_is_named_and_waited_for(catalogue, node, moto, queue_url):
    shard, data = segment(5000)
    node.hold(shard, data)
    key = catalogue.drain([shard], [node.peer])
    url = moto.at("holdfast-not-yet")
    with draining(catalogue, url, queue_url):
        until(lambda: catalogue.said("persist_failed"), "said so")
        assert "holdfast-not-yet" in catalogue.said("persist_failed")[0].message
        with moto.client() as s3:
            s3.create_bucket(Bucket="holdfast-not-yet")
        moto.buckets.append("holdfast-not-yet")
        until(lambda: catalogue.durable(key), "durable")


def test_a_manifest_whose_answer_is_lost_is_read_back_from_the_bucket(
    catalogue, node, ceph, queue_url, fault_proxy
):
    """The connection breaks after the conditional create was done: it is created once."""
    proxy = fault_proxy(ceph.endpoint)
    url = ceph.at(ceph.bucket(), endpoint=proxy.endpoint)
    shard, data = segment(5000)
    node.hold(shard, data)
    proxy.fail(Drop(after=True), method="PUT", path="manifest.json")
    key = catalogue.drain([shard], [node.peer])
    with draining(catalogue, url, queue_url):
        until(lambda: catalogue.durable(key), "durable")
    store = open_store(url)
    text = store.get(keys.manifest_key(JOB, key), length_bytes_max=1 << 20)
    store.close()

    assert 1 == proxy.count("PUT", "manifest.json")
    assert (shard,) == decode(text).shards
    assert [] == catalogue.said("persist_failed")
