"""Heads and parts of segments with real agents: from memory, from peers, from the object store."""

from __future__ import annotations

import secrets

import pytest

from holdfast.core.decision import DecisionState
from holdfast.core.sources import Memory
from holdfast.format import keys
from holdfast.format.digest import PART_BYTES
from holdfast.format.header import parse_header
from holdfast.format.manifest import Manifest, encode
from holdfast.format.segment import header_length
from holdfast.rpc import codec
from holdfast.v1 import agent_pb2 as pb
from holdfast.v1 import common_pb2

from .harness import Trainer, bytes_of, decision, open_session, reported, until, want

MIB = 1 << 20
LENGTH = 40 * MIB
PARTS_COUNT = 3
LAST = LENGTH - 2 * PART_BYTES


def heads_request(shard, *ranks):
    checkpoint = codec.to_message(shard.id.checkpoint, common_pb2.CheckpointId)
    return pb.HeadsRequest(job="job", checkpoint=checkpoint, ranks=ranks)


class Rank:
    """A rank on a node that has named byte ranges of one shard, and what it is told."""

    def __init__(self, catalogue, node, shard, *ranges, nonce=b"m" * 16):
        self.catalogue, self.node, self.shard = catalogue, node, shard
        self.trainer = Trainer(node.arena, secrets.token_hex(16))
        fields = {"names_needs": True, "world_size": 1}
        self.generation = open_session(node, self.trainer.session, nonce=nonce, **fields)
        self.name(1, *ranges)

    def name(self, number, *ranges):
        need = {"rank": 0, "ranges": [{"begin": begin, "end": end} for begin, end in ranges]}
        checkpoint = codec.to_message(self.shard.id.checkpoint, common_pb2.CheckpointId)
        needs = {"checkpoint": checkpoint, "shards": [need], "number": number}
        self.node.call("Update", pb.UpdateRequest(session=self.trainer.session, needs=needs))

    def told(self, *wants, state=DecisionState.PROPOSED):
        chosen = decision([self.shard], generation=self.generation, state=state)
        wanted = {self.node.name: wants}
        self.catalogue.set_run(wanted, generation=self.generation, decision=chosen)

    def segment(self, *wants):
        """Wait until it is ready; confirm, and return what it is shown."""
        ranks = lambda: self.catalogue.inventories[self.node.name].ranks  # noqa: E731
        until(lambda: any(rank.ready_decision == 1 for rank in ranks()), "ready")
        self.told(*wants, state=DecisionState.CONFIRMED)
        [shown] = until(lambda: self.node.view(self.trainer.session).restore.segments, "segment")
        return shown

    def loaded(self):
        update = pb.UpdateRequest(session=self.trainer.session, report={"loaded": True})
        self.node.call("Update", update)


@pytest.fixture
def rank(catalogue):
    made = []

    def make(node, shard, *ranges):
        made.append(Rank(catalogue, node, shard, *ranges))
        return made[-1]

    yield make
    for one in made:
        one.trainer.end()


def test_the_parts_that_a_rank_named_are_fetched_and_go_once_loaded(node, catalogue, saved, rank):
    """What is in the file is what was saved; the rest of it takes no memory."""
    a, b = node("a"), node("b")
    reported(catalogue, "a", "b")
    t, _, shard = saved(a, length=LENGTH)
    t.end()
    data = bytes_of(a, shard)
    one = rank(b, shard, (0, 100), (LENGTH - 1, LENGTH))
    one.told(want(shard, "a"))
    shown = one.segment(want(shard, "a"))
    [path] = b.arena.glob("*.part")

    assert [(r.begin, r.end) for r in shown.ranges] == [(0, PART_BYTES), (2 * PART_BYTES, LENGTH)]
    assert shown.file_name == path.name
    held = path.read_bytes()
    assert held[:PART_BYTES] == data[:PART_BYTES]
    assert held[2 * PART_BYTES :] == data[2 * PART_BYTES :]
    assert path.stat().st_size == LENGTH
    assert path.stat().st_blocks * 512 <= PART_BYTES + LAST
    assert b.dump()["used_bytes"] == PART_BYTES + LAST
    assert catalogue.held("b") == {}

    one.loaded()
    until(lambda: not list(b.arena.glob("*.part")), "the parts go")
    assert b.dump()["used_bytes"] == 0


def test_a_bad_part_is_asked_of_the_next_source_and_its_holder_accused(
    node, catalogue, saved, rank
):
    a, b, c = node("a"), node("b"), node("c")
    reported(catalogue, "a", "b", "c")
    catalogue.set_run(ring=("a", "c"))
    t, _, shard = saved(a, length=LENGTH)
    rank(c, shard).told(want(shard, "a"))
    until(lambda: shard.id in catalogue.held("c"), "a whole copy at c")
    data = bytes_of(a, shard)
    [path] = a.arena.glob("*.seg")
    with path.open("r+b") as file:
        file.seek(50)
        file.write(bytes([data[50] ^ 1]))
    one = rank(b, shard, (0, 100))
    one.told(want(shard, "a", "c"))
    shown = one.segment(want(shard, "a", "c"))

    assert (b.arena / shown.file_name).read_bytes()[:PART_BYTES] == data[:PART_BYTES]
    accused = [bad.source for bad in catalogue.inventories["b"].bad_sources]
    assert accused == [Memory("a")]
    t.end()


def test_parts_that_lie_here_when_an_agent_starts_are_removed(node, catalogue, saved, rank):
    a, b = node("a"), node("b")
    reported(catalogue, "a", "b")
    t, _, shard = saved(a, length=LENGTH)
    t.end()
    one = rank(b, shard, (0, 100))
    one.told(want(shard, "a"))
    until(lambda: list(b.arena.glob("*.part")), "parts")
    b.kill()
    b.start()
    b.wait_ready()

    assert list(b.arena.glob("*.part")) == []


def test_the_object_store_gives_parts_too(node, catalogue, store, stored, rank):
    shard = stored(length=LENGTH)
    a = node("a", HOLDFAST_STORE=store.url)
    reported(catalogue, "a")
    one = rank(a, shard, (LENGTH - 1, LENGTH))
    one.told(want(shard, stored=True))
    shown = one.segment(want(shard, stored=True))

    assert shown.source == "object"
    assert [(r.begin, r.end) for r in shown.ranges] == [(2 * PART_BYTES, LENGTH)]
    assert a.dump()["used_bytes"] == LAST


def test_heads_are_found_here_and_at_peers(node, catalogue, saved):
    """And what nobody has is left out."""
    a, b = node("a"), node("b")
    reported(catalogue, "a", "b")
    catalogue.set_run(ring=("a", "b"))
    trainer, _, shard = saved(a, rank=0, world_size=4, length=MIB)
    other, _, _ = saved(b, rank=2, world_size=4, length=2 * MIB)
    until(lambda: len(a.dump()["view"]["nodes"]) == 2, "each knows the other")
    found = {head.rank: head for head in a.call("FindHeads", heads_request(shard, 0, 1, 2)).heads}

    assert {rank: head.length_bytes for rank, head in found.items()} == {0: MIB, 2: 2 * MIB}
    for number, head in found.items():
        header = parse_header(head.data, head.length_bytes)
        assert header.identity.id.rank == number
        assert len(head.data) == header_length(head.data)
    trainer.end()
    other.end()


def test_heads_are_found_in_the_object_store(node, catalogue, store, stored):
    shard = stored()
    manifest = Manifest(
        checkpoint=shard.id.checkpoint, job="job", world_size=1, shards=(shard,),
        write_id="0" * 32, created_at_s=1.0,
    )  # fmt: skip
    a = node("a", HOLDFAST_STORE=store.url)
    reported(catalogue, "a")
    asked = heads_request(shard, 0)
    assert list(a.call("FindHeads", asked).heads) == [], "nothing counts without its manifest"
    store.put(keys.manifest_key("job", shard.id.checkpoint), encode(manifest))
    [head] = a.call("FindHeads", asked).heads

    assert head.length_bytes == shard.length_bytes
    assert parse_header(head.data, head.length_bytes).identity.id == shard.id


def test_an_agent_reads_heads_of_its_own_slots_to_others(node, catalogue, saved):
    a = node("a")
    reported(catalogue, "a")
    t, _, shard = saved(a)
    [head] = a.call_peer("ReadHeads", heads_request(shard, 0, 1)).heads

    assert head.data == bytes_of(a, shard)[: len(head.data)]
    assert list(a.call_peer("ReadHeads", heads_request(shard, 1)).heads) == []
    t.end()
