"""A checkpoint goes from memory to the object store, whole, verified, the manifest last."""

from __future__ import annotations

import pytest
from tests.integration.persistence.harness import JOB, Wrapped, draining, read, segment, until
from tests.said import tcp

from holdfast.bucket.folder import CheckpointFolder
from holdfast.bucket.verify import strangers, verify
from holdfast.core.ids import CheckpointId
from holdfast.core.inventory import Peer
from holdfast.core.shard import Shard
from holdfast.format import index, keys
from holdfast.format.digest import PART_BYTES, part_digest
from holdfast.objectstore import open_store
from holdfast_services.kit.queue import open_queue

BIG = 2 * PART_BYTES + 1000


def folder_of(store, checkpoint):
    return CheckpointFolder(store, keys.folder(JOB, checkpoint))


@pytest.mark.parametrize("where", ["node", "far"])
def test_a_checkpoint_becomes_durable_and_reads_back_whole(
    request, where, catalogue, store, store_url, queue_url
):
    """F85, G10, P3, P6: from the slot's file on this machine, or part by part over the wire."""
    holder = request.getfixturevalue(where)
    made = [segment(BIG, rank=rank, world=2, seed=rank) for rank in range(2)]
    for shard, data in made:
        holder.hold(shard, data)
    parent = CheckpointId("r1", 5, 1)
    checkpoint = catalogue.drain([s for s, _ in made], [holder.peer], parent=parent)
    with draining(catalogue, store_url, queue_url):
        until(lambda: catalogue.durable(checkpoint), "durable")

    folder = folder_of(store, checkpoint)
    manifest = folder.manifest()
    assert tuple(shard for shard, _ in made) == manifest.shards
    assert (parent, {"loss": 0.5}, {"dp": 2}) == (manifest.parent, manifest.notes, manifest.mesh)
    assert all(verdict.ok for verdict in verify(folder, manifest))
    assert () == strangers(folder, manifest)
    assert [bytes(data) for _, data in made] == [read(store, shard) for shard, _ in made]
    written = store.get(keys.manifest_key(JOB, checkpoint), length_bytes_max=1 << 20)
    assert part_digest(written) == catalogue.checkpoints[checkpoint].manifest_digest
    assert [] == list(store.open_uploads())


def test_the_index_of_the_plan_is_written_once(catalogue, node, store, store_url, queue_url):
    """P7: resharding opens one object; every checkpoint of the plan shares it."""
    for step in (10, 20):
        made = [segment(5000, step=step, rank=rank, world=2) for rank in range(2)]
        for shard, data in made:
            node.hold(shard, data)
        checkpoint = catalogue.drain([s for s, _ in made], [node.peer])
        wrapped = Wrapped(open_store(store_url))
        with draining(catalogue, store_url, queue_url, store=wrapped):
            until(lambda key=checkpoint: catalogue.durable(key), "durable")
        puts = [args[0] for name, args in wrapped.calls if name == "put"]

        assert keys.manifest_key(JOB, checkpoint) == puts[-1], "the manifest is last of all"
        assert (step == 10) == any("index-" in key for key in puts)
    plan = folder_of(store, checkpoint).manifest().plan
    data = store.get(keys.index_key(JOB, "r1", plan), length_bytes_max=1 << 20)
    assert {"w0", "w1"} == {tensor.fqn for tensor in index.decode(data).tensors}


def test_events_say_what_went_and_how_fast(catalogue, node, store, store_url, queue_url):
    shard, data = segment(5000)
    node.hold(shard, data)
    checkpoint = catalogue.drain([shard], [node.peer])
    with draining(catalogue, store_url, queue_url):
        until(lambda: catalogue.durable(checkpoint), "durable")

    (persisted,) = catalogue.said("persisted")
    assert [JOB] == [event.job for event in catalogue.said("persist_started")]
    assert str(shard.length_bytes) == persisted.context["bytes"] == persisted.context["sent_bytes"]
    assert float(persisted.context["seconds"]) > 0


def test_parts_that_have_not_changed_are_copied_inside_the_store(
    catalogue, node, store, store_url, queue_url
):
    """G16: of three parts one differs, so one is sent; the folder is whole all the same."""
    first, old = segment(BIG, step=10)
    second, new = segment(BIG, step=20, change=[PART_BYTES + 77])
    before, wrapped = None, None
    for shard, data in ((first, old), (second, new)):
        node.hold(shard, data)
        earlier = () if before is None else (before,)
        before = catalogue.drain([shard], [node.peer], earlier=earlier)
        wrapped = Wrapped(open_store(store_url))
        with draining(catalogue, store_url, queue_url, store=wrapped):
            until(lambda key=before: catalogue.durable(key), "durable")

    # The header differs (it says the step), the changed byte lies in the second part.
    assert (2, 1) == (wrapped.count("put_part"), wrapped.count("copy_part"))
    assert bytes(new) == read(store, second)
    copied = catalogue.said("persisted")[-1].context["copied_bytes"]
    assert str(second.length_bytes - 2 * PART_BYTES) == copied


def rot(store, shard: Shard, at: int) -> None:
    """Flip a bit of the shard's object, as a disk does: length and sidecar stay."""
    data = bytearray(read(store, shard))
    data[at] ^= 1
    upload = store.begin(keys.segment_key(JOB, shard.id, 1), len(data), len(data))
    store.finish(upload, [store.put_part(upload, 0, memoryview(data))])


def test_rot_in_an_earlier_object_is_not_copied_into_the_next(
    catalogue, node, store, store_url, queue_url
):
    """P3; defect A6: the copy is found bad, and all is sent from memory, at the first try."""
    first, old = segment(BIG, step=10)
    second, new = segment(BIG, step=20)
    node.hold(first, old)
    node.hold(second, new)
    with draining(catalogue, store_url, queue_url):
        before = catalogue.drain([first], [node.peer])
        until(lambda: catalogue.durable(before), "durable")
        rot(store, first, BIG - 5)
        after = catalogue.drain([second], [node.peer], earlier=(before,))
        until(lambda: catalogue.durable(after), "durable")

    assert bytes(new) == read(store, second)
    assert [] == catalogue.said("persist_failed")


def test_a_repair_copies_nothing_from_other_objects(catalogue, node, store, store_url, queue_url):
    """G20; defect A6: where one object has rotted its twin may have too; memory has not."""
    made = [segment(BIG, step=step) for step in (10, 20)]
    before: tuple[CheckpointId, ...] = ()
    wrapped = Wrapped(open_store(store_url))
    with draining(catalogue, store_url, queue_url, store=wrapped):
        for shard, data in made:
            node.hold(shard, data)
            before = (catalogue.drain([shard], [node.peer], earlier=before),)
            until(lambda key=before[0]: catalogue.durable(key), "durable")
        copied = wrapped.count("copy_part")
        for shard, _ in made:
            rot(store, shard, BIG - 5)
        catalogue.drain([made[1][0]], [node.peer], earlier=(made[0][0].id.checkpoint,), repair=True)
        until(lambda: catalogue.durable(before[0]), "durable again")

    assert copied == wrapped.count("copy_part") > 0
    assert bytes(made[1][1]) == read(store, made[1][0])


def test_when_the_earlier_object_is_gone_the_bytes_are_sent(
    catalogue, node, store, store_url, queue_url
):
    """G16: copying is a saving, never a condition."""
    first, old = segment(BIG, step=10)
    second, new = segment(BIG, step=20)
    node.hold(first, old)
    node.hold(second, new)
    before = catalogue.drain([first], [node.peer])
    with draining(catalogue, store_url, queue_url):
        until(lambda: catalogue.durable(before), "durable")
    store.delete([keys.segment_key(JOB, first.id, 1)])
    after = catalogue.drain([second], [node.peer], earlier=(before,))
    with draining(catalogue, store_url, queue_url):
        until(lambda: catalogue.durable(after), "durable")

    assert bytes(new) == read(store, second)


def test_a_segment_of_another_plan_lends_no_parts(catalogue, node, store, store_url, queue_url):
    """G16: only equal length and plan hash; the sidecar is checked as all that is read is."""
    first, old = segment(BIG, step=10)
    second, new = segment(BIG + 1, step=20)
    node.hold(first, old)
    node.hold(second, new)
    before = catalogue.drain([first], [node.peer])
    after = catalogue.drain([second], [node.peer], earlier=(before, CheckpointId("r1", 1, 1)))
    wrapped = Wrapped(open_store(store_url))
    with draining(catalogue, store_url, queue_url, store=wrapped):
        until(lambda: catalogue.durable(before) and catalogue.durable(after), "durable")

    assert 0 == wrapped.count("copy_part")
    assert bytes(new) == read(store, second)


def test_what_is_there_with_its_sidecar_is_not_sent_again(
    catalogue, node, store, store_url, queue_url
):
    """Doing an item twice is harmless and cheap."""
    shard, data = segment(BIG)
    node.hold(shard, data)
    checkpoint = catalogue.drain([shard], [node.peer])
    with draining(catalogue, store_url, queue_url):
        until(lambda: catalogue.durable(checkpoint), "durable")
    catalogue.checkpoints[checkpoint].stored.clear()
    catalogue.checkpoints[checkpoint].manifest_digest = b""
    wrapped = Wrapped(open_store(store_url))
    with draining(catalogue, store_url, queue_url, store=wrapped):
        until(lambda: catalogue.durable(checkpoint), "durable again")

    assert (0, 0) == (wrapped.count("put_part"), wrapped.count("begin"))
    assert 2 == len(catalogue.reports)


def test_repair_writes_again_what_is_known_to_be_bad(catalogue, node, store, store_url, queue_url):
    """G20: length and sidecar look right, the catalogue knows better."""
    shard, data = segment(BIG)
    node.hold(shard, data)
    checkpoint = catalogue.drain([shard], [node.peer])
    with draining(catalogue, store_url, queue_url):
        until(lambda: catalogue.durable(checkpoint), "durable")
        bad = bytearray(data)
        bad[-1] ^= 1
        upload = store.begin(keys.segment_key(JOB, shard.id, 1), len(bad), len(bad))
        store.finish(upload, [store.put_part(upload, 0, memoryview(bad))])
        catalogue.drain([shard], [node.peer], repair=True)
        until(lambda: catalogue.durable(checkpoint), "durable again")

    assert bytes(data) == read(store, shard)


def test_an_item_that_is_no_longer_due_or_known_is_dropped(catalogue, store, store_url, queue_url):
    """An old item is harmless: what it stands for is asked when it is claimed."""
    queue = open_queue(queue_url, lease_s=5.0)
    queue.offer(["shard/r1/1/1/0/0", "paint/the/house", "manifest/r1/1/1"])
    with draining(catalogue, store_url, queue_url):
        until(lambda: queue.waiting_count() == 0, "claimed")
    left = queue.waiting_count()  # what was given back waits again
    queue.close()

    assert 0 == left
    assert [] == list(store.list())


def test_a_source_with_bad_bytes_is_told_and_the_next_one_is_taken(
    catalogue, node, far, store, store_url, queue_url
):
    """P3: every part is hashed before it is sent, whatever it comes from."""
    shard, data = segment(BIG)
    bad = bytearray(data)
    bad[PART_BYTES + 5] ^= 1
    good = catalogue.drain([shard], [node.peer, far.peer])
    digests = [part_digest(bytes(data[at : at + PART_BYTES])) for at in range(0, BIG, PART_BYTES)]
    node.hold(shard, bad, digests=digests)
    far.hold(shard, data)
    with draining(catalogue, store_url, queue_url):
        until(lambda: catalogue.durable(good), "durable")

    assert bytes(data) == read(store, shard)
    assert [shard.id] == node.suspected
    assert [] == far.suspected


def test_a_peer_that_serves_bad_bytes_is_told(catalogue, far, store, store_url, queue_url):
    """P3: over the wire as from a file; the item waits for a source that is good."""
    shard, data = segment(BIG)
    bad = bytearray(data)
    bad[5000] ^= 1
    digests = [part_digest(bytes(data[at : at + PART_BYTES])) for at in range(0, BIG, PART_BYTES)]
    far.hold(shard, bad, digests=digests)
    checkpoint = catalogue.drain([shard], [far.peer])
    with draining(catalogue, store_url, queue_url):
        until(lambda: catalogue.said("persist_failed"), "failed, and said so")
        assert [shard.id] == far.suspected
        far.hold(shard, data)
        until(lambda: catalogue.durable(checkpoint), "durable once the bytes are good")

    assert bytes(data) == read(store, shard)


def test_a_node_that_is_gone_is_passed_over(catalogue, far, store, store_url, queue_url):
    shard, data = segment(5000)
    far.hold(shard, data)
    gone = Peer(node="gone", rpc_address="127.0.0.1:1", endpoints=tcp("127.0.0.1:1"))
    checkpoint = catalogue.drain([shard], [gone, far.peer])
    with draining(catalogue, store_url, queue_url):
        until(lambda: catalogue.durable(checkpoint), "durable")


def test_a_slot_that_is_reused_while_it_is_sent_is_not_believed(
    catalogue, node, far, store, store_url, queue_url
):
    """P3: hashed, overwritten, sent: the name tells, and the part comes from elsewhere."""
    shard, data = segment(BIG)
    path = node.hold(shard, data)
    far.hold(shard, data)
    checkpoint = catalogue.drain([shard], [node.peer, far.peer])
    wrapped = Wrapped(open_store(store_url))

    def reuse(upload, number, view):
        if number == 1 and path.exists():
            node.drop(shard)
            with path.with_suffix(".free").open("r+b") as file:
                file.write(bytes(BIG))

    wrapped.before["put_part"] = reuse
    with draining(catalogue, store_url, queue_url, store=wrapped, parts=1):
        until(lambda: catalogue.durable(checkpoint), "durable")

    assert bytes(data) == read(store, shard)
    assert wrapped.count("put_part") > 3
    assert [] == node.suspected, "a slot that was reused is not corruption"
