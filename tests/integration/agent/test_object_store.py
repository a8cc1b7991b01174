"""Restores that take shards from the object store, with real agents and a real folder."""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.core.decision import DecisionState
from holdfast.core.reports import StepNote
from holdfast.core.sources import Memory, Object
from holdfast.format import sidecar as bucket_sidecar
from holdfast.format.digest import part_digests, root_digest
from holdfast.format.sidecar import Sidecar
from holdfast.rpc import codec
from holdfast.v1 import agent_pb2 as pb
from holdfast.v1 import common_pb2

from .harness import (
    RUN,
    Trainer,
    bytes_of,
    decision,
    open_session,
    reported,
    restart,
    segment_key,
    sidecar_key,
    until,
    upload,
    want,
)
from .s3 import BUCKET, S3Server

MIB = 1 << 20


@pytest.fixture
def node(node, store):
    """Agents that know the store, unless told otherwise."""

    def start(name="a", **environ):
        return node(name, **{"HOLDFAST_STORE": store.url, **environ})

    return start


class Restore:
    """One rank's restore on one node, against the catalogue that the test writes."""

    def __init__(self, catalogue, node):
        self.catalogue, self.node = catalogue, node
        self.trainer = Trainer(node.arena, secrets.token_hex(16))
        self.nonce = secrets.token_bytes(16)
        self.open()
        self.number = 0

    def open(self):
        """Open the rank's session, also again at an agent that was restarted."""
        self.generation = open_session(self.node, self.trainer.session, nonce=self.nonce)

    def propose(self, *wants, shards=()):
        """Propose what is wanted, beside ``shards`` that are here already."""
        self.number += 1
        self.shards = [*shards, *(w.shard for w in wants)]
        self._set(DecisionState.PROPOSED, wants={self.node.name: wants})

    def _set(self, state, **fields):
        chosen = decision(self.shards, number=self.number, generation=self.generation, state=state)
        self.catalogue.set_run(generation=self.generation, decision=chosen, **fields)

    def ready(self):
        ranks = self.catalogue.inventories[self.node.name].ranks
        return any(rank.ready_decision == self.number for rank in ranks)

    def segments(self):
        """Wait until all is here, confirm it, return what the rank is shown, by rank."""
        until(self.ready, "ready")
        self._set(DecisionState.CONFIRMED)
        shown = until(lambda: self.node.view(self.trainer.session).restore.segments, "segments")
        return {segment.shard.id.rank: segment for segment in shown}

    def bad(self):
        return [b.source for b in self.catalogue.inventories[self.node.name].bad_sources]


@pytest.fixture
def restoring(catalogue):
    made = []

    def begin(node):
        reported(catalogue, node.name)
        made.append(Restore(catalogue, node))
        return made[-1]

    yield begin
    for restore in made:
        restore.trainer.end()


def test_a_node_whose_memory_is_gone_restores_from_the_object_store(
    node, catalogue, store, stored, restoring
):
    """F67, F72, F74, P3: straight into the arena, part by part, byte for byte."""
    shard = stored(length=40 * MIB)
    a = node("a")
    restore = restoring(a)
    restore.propose(want(shard, stored=True, owner="b"))

    segment = restore.segments()[0]
    assert ("object", shard) == (segment.source, segment.shard)
    assert "b" == catalogue.held("a")[shard.id].owner
    data = store.get(segment_key(shard), length_bytes_max=1 << 30)
    assert data == (a.arena / segment.file_name).read_bytes()
    assert [] == restore.bad()


def test_sources_are_mixed_shard_by_shard(node, catalogue, store, stored, saved, restoring):
    """F67: one from memory, one from a peer, one from the object store."""
    third = stored(rank=2, world_size=3)
    a, b = node("a"), node("b")
    reported(catalogue, "a", "b")
    mine, _, first = saved(a, rank=0, world_size=3)
    theirs, _, second = saved(b, rank=1, world_size=3)
    restore = restoring(a)
    restore.propose(want(second, "b", stored=True), want(third, stored=True), shards=[first])

    segments = restore.segments()
    assert {0: "memory", 1: "peer", 2: "object"} == {r: s.source for r, s in segments.items()}
    assert bytes_of(b, second) == (a.arena / segments[1].file_name).read_bytes()
    mine.end()
    theirs.end()


def test_the_object_store_gives_the_parts_that_a_bad_peer_could_not(
    node, catalogue, store, stored, saved, restoring
):
    """P3, F70: the peer is accused, the object is not; the restore goes on."""
    a, b = node("a"), node("b")
    reported(catalogue, "a", "b")
    _, _, shard = saved(b, length=40 * MIB)
    upload(store, shard, bytes_of(b, shard))
    with (b.arena / b.files("seg")[0]).open("r+b") as file:
        file.seek(39 * MIB)
        file.write(b"?????")
    restore = restoring(a)
    restore.propose(want(shard, "b", stored=True))

    assert "object" == restore.segments()[0].source
    assert [Memory("b")] == restore.bad()


def flip(store, shard):
    path = Path(store.url.removeprefix("file://")) / segment_key(shard)
    with path.open("r+b") as file:
        file.seek(MIB // 2)
        byte = file.read(1)
        file.seek(MIB // 2)
        file.write(bytes([byte[0] ^ 1]))


def cut(store, shard):
    path = Path(store.url.removeprefix("file://")) / segment_key(shard)
    with path.open("r+b") as file:
        file.truncate(MIB // 2)


def lose_segment(store, shard):
    store.delete([segment_key(shard)])


def lose_sidecar(store, shard):
    store.delete([sidecar_key(shard)])


def swap_sidecar(store, shard):
    """Digests that fit each other, of bytes that lie there, and not those that were committed."""
    other = bytes(MIB)
    digests = tuple(part_digests(memoryview(other)))
    lied = replace(shard, root_digest=root_digest(MIB, digests))
    store.put(segment_key(shard), other)
    store.put(sidecar_key(shard), bucket_sidecar.encode(Sidecar(shard=lied, digests=digests)))


def newer_sidecar(store, shard):
    text = store.get(sidecar_key(shard), length_bytes_max=MIB)
    store.put(sidecar_key(shard), text.replace(b'"version":1', b'"version":9'))


@pytest.mark.parametrize(
    "harm", [flip, cut, lose_segment, lose_sidecar, swap_sidecar, newer_sidecar]
)
def test_a_bad_object_is_accused_and_an_older_step_restored(
    node, catalogue, store, stored, restoring, harm
):
    """P3, F68, F70, G22: never loaded, named to metadata, which chooses again."""
    older, newer = stored(step=3), stored(step=7)
    harm(store, newer)
    restore = restoring(node("a"))
    restore.propose(want(newer, stored=True))
    until(lambda: restore.bad() == [Object()], "accused")
    assert not restore.ready()
    until(lambda: catalogue.said("bad_source"), "said")

    restore.propose(want(older, stored=True))
    assert [3] == [s.shard.id.step for s in restore.segments().values()]


def test_a_store_that_is_away_is_waited_for_and_not_accused(
    node, catalogue, store, stored, restoring, tmp_path
):
    """G22: a folder that is not mounted says nothing of what is in it."""
    shard = stored()
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    restore = restoring(node("a"))
    restore.propose(want(shard, stored=True))
    message = until(lambda: catalogue.said("object_store_failed"), "said")[0]
    assert "mount the folder" in message
    assert [] == restore.bad()

    (tmp_path / "elsewhere").rename(tmp_path / "store")
    assert "object" == restore.segments()[0].source


def test_an_agent_that_was_told_of_no_store_says_what_to_set(
    node, catalogue, store, stored, restoring
):
    shard = stored()
    restore = restoring(node("a", HOLDFAST_STORE=""))
    restore.propose(want(shard, stored=True))

    message = until(lambda: catalogue.said("object_store_failed"), "said")[0]
    assert "HOLDFAST_STORE is not set for this agent: set it" in message
    assert [] == restore.bad()


def test_an_agent_restarted_knows_what_came_from_the_object_store(
    node, catalogue, stored, restoring
):
    """F41: the sources that a restore reports do not depend on who was restarted meanwhile."""
    shard = stored()
    a = node("a")
    restore = restoring(a)
    restore.propose(want(shard, stored=True))
    until(restore.ready, "ready")
    restart(a, catalogue)
    restore.open()
    restore.propose(shards=[shard])

    assert "object" == restore.segments()[0].source


def test_a_file_of_the_arena_can_be_located_and_its_incarnation_told(node, catalogue, saved):
    """A persistence worker on the same machine maps it instead of fetching it."""
    a = node("a")
    reported(catalogue, "a")
    _, _, shard = saved(a)
    request = pb.LocateRequest(id=codec.to_message(shard.id, common_pb2.ShardId))
    found = a.call_peer("Locate", request)

    assert bytes_of(a, shard) == Path(found.path).read_bytes()
    assert f".{found.slot_incarnation}.seg" in found.path


def test_what_a_rank_wants_kept_goes_to_metadata_with_its_registration(node, catalogue):
    """F86, F87; a rank that says nothing leaves the job the policy it has."""
    a = node("a")
    reported(catalogue, "a")
    t = Trainer(a.arena, secrets.token_hex(16))
    open_session(a, t.session)
    open_session(
        a,
        t.session,
        persist=common_pb2.PersistRule(steps=100),
        retention=common_pb2.Retention(last=5),
    )
    t.end()

    silent, told = catalogue.registrations
    assert not silent.spec.persist.steps
    assert not silent.spec.HasField("retention")
    assert (100, 5) == (told.spec.persist.steps, told.spec.retention.last)


def test_what_a_rank_says_of_a_step_is_reported_with_it(node, catalogue):
    a = node("a")
    reported(catalogue, "a")
    t = Trainer(a.arena, secrets.token_hex(16))
    open_session(a, t.session)
    note = pb.UpdateRequest(session=t.session)
    note.report.notes.add(step=7, json='{"loss":0.5}')
    a.call("Update", note)

    ranks = until(lambda: [r for r in catalogue.inventories["a"].ranks if r.report.notes], "notes")
    assert (RUN, (StepNote(step=7, json='{"loss":0.5}'),)) == (ranks[0].run, ranks[0].report.notes)
    t.end()


@pytest.fixture
def s3():
    server = S3Server()
    yield server
    server.stop()


def serve(s3, store):
    """Let the bucket hold what the folder holds; returns the agent's settings."""
    for info in store.list():
        s3.objects[info.key] = store.get(info.key, length_bytes_max=1 << 30)
    return {
        "HOLDFAST_STORE": f"s3://{BUCKET}?endpoint={s3.endpoint}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
    }


def test_a_store_that_fails_now_and_then_costs_time_and_nothing_else(
    node, catalogue, store, stored, restoring, s3
):
    """G22: 503, bodies that break off, a connection that is reset: repeated, never accused."""
    shard = stored(length=40 * MIB)
    a = node("a", **serve(s3, store))
    s3.faults += ["busy", "cut", "reset", "cut"]
    restore = restoring(a)
    restore.propose(want(shard, stored=True))

    segment = restore.segments()[0]
    assert "object" == segment.source
    assert s3.objects[segment_key(shard)] == (a.arena / segment.file_name).read_bytes()
    assert [] == restore.bad()
    assert [] == s3.faults, "all of them happened"


def test_credentials_that_are_refused_are_said_and_tried_again(
    node, catalogue, store, stored, restoring, s3
):
    """G22: they may have expired; whoever reads the event can put new ones."""
    shard = stored()
    a = node("a", **serve(s3, store))
    s3.forbidden = True
    restore = restoring(a)
    restore.propose(want(shard, stored=True))
    message = until(lambda: catalogue.said("object_store_failed"), "said")[0]
    assert "give this node's agent credentials" in message
    assert [] == restore.bad()

    s3.forbidden = False
    assert "object" == restore.segments()[0].source


def test_a_store_that_hangs_does_not_keep_a_stopped_agent_alive(
    node, catalogue, store, stored, restoring, s3
):
    """The read has a deadline of its own, which is longer than anybody waits for a shutdown."""
    shard = stored()
    a = node("a", **serve(s3, store))
    s3.hang = True
    restore = restoring(a)
    restore.propose(want(shard, stored=True))
    until(lambda: s3.hanging, "a read hangs")

    assert 0 == a.stop()
