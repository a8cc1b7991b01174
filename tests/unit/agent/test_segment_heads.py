"""Which heads an agent reads of its own slots, and whom it asks for the others."""

from __future__ import annotations

import asyncio
import struct
from types import SimpleNamespace

import pytest
from tests.unit.agent.test_machine import ME, B, C, run_view, state, view

from holdfast.core.ids import ShardId
from holdfast.core.needs import HEADS_BYTES_MAX, Head
from holdfast.core.node_view import Want, WantReason
from holdfast.core.shard import Shard
from holdfast.core.slot_names import SlotName, SlotState
from holdfast.core.sources import Rebuilt
from holdfast.core.stripes import Piece, Stripe
from holdfast.errors import NotFoundError, UnavailableError
from holdfast_services.agent import segment_heads
from holdfast_services.agent.domain import Content, Slot, handle
from holdfast_services.agent.segment_heads import HeadFinder

KEY = ShardId("r1", 5, 1, 0).checkpoint
LENGTH = HEADS_BYTES_MAX + (8 << 20)


def segment(header_bytes):
    return struct.pack("<Q", header_bytes - 8) + bytes(LENGTH - 8)


def slot(number, step=5):
    shard = Shard(
        id=ShardId("r1", step, 1, number), job="job", world_size=9, plan_hash="p",
        length_bytes=LENGTH, root_digest=b"",
    )  # fmt: skip
    return Slot(
        name=SlotName(f"s{step}{number}", 1, SlotState.SEALED), length_bytes=LENGTH,
        content=Content(shard=shard, owner="a", digests=b""),
    )  # fmt: skip


class Arena:
    """Slots by name; what is in each is a header of some length."""

    def __init__(self, lengths):
        self.lengths = lengths

    def file(self, name):
        return SimpleNamespace(view=memoryview(segment(self.lengths[name])))


class Peers:
    """Other nodes: their answers by name, an error among them."""

    def __init__(self, **answers):
        self.answers, self.asked = answers, []

    async def read_heads(self, peer, checkpoint, ranks):
        self.asked.append((peer.node, set(ranks)))
        answer = self.answers[peer.node]
        if isinstance(answer, Exception):
            raise answer
        return answer


class Shell:
    """The agent's state; whoever waits sees the views that come, one after the other."""

    def __init__(self, state, *views):
        self.state, self._views = state, list(views)

    async def until(self, met, wait_s):
        assert wait_s == segment_heads.AGAIN_S
        if self._views:
            self.state, _ = handle(self.state, self._views.pop(0))
            assert met()


class Store:
    """An object store without the checkpoint."""

    def heads(self, job, checkpoint, ranks):
        raise NotFoundError("there is no such checkpoint")


class Stripes:
    """What is left of stripes: heads by rank, an error among them."""

    def __init__(self, **heads):
        self.heads, self.asked = heads, []

    async def head(self, shard, source):
        self.asked.append((shard.id.rank, [piece.peers for piece in source.pieces]))
        made = self.heads[f"r{shard.id.rank}"]
        if isinstance(made, Exception):
            raise made
        return made


def finder(lengths=None, *, old=(), **answers):
    lengths = lengths or {}
    slots = [slot(number) for number in lengths] + [slot(number, step=4) for number in old]
    by_name = {f"s5{number}": length for number, length in lengths.items()}
    now, _ = handle(state(*slots), view())
    peers = Peers(**answers)
    made = HeadFinder(
        shell=Shell(now), arena=Arena(by_name), peers=peers, tier=Store(), parity=Stripes()
    )
    return made, peers


def ranks(heads):
    return {head.rank for head in heads}


def head(rank):
    return Head(rank=rank, length_bytes=64, data=b"")


def test_heads_of_other_checkpoints_and_ranks_are_not_read():
    made, _ = finder({0: 64, 1: 64}, old=(2,))

    assert ranks(made.read(KEY, [1, 2, 3])) == {1}


@pytest.mark.parametrize("length", [1 << 60, HEADS_BYTES_MAX + 8], ids=["broken", "too long"])
def test_a_head_that_cannot_be_told_hides_no_other(length):
    """A byte that turned in memory, or more than one answer may hold."""
    made, _ = finder({0: length, 1: 64, 2: 128})
    found = made.read(KEY, [0, 1, 2])

    assert [(one.rank, len(one.data)) for one in found] == [(1, 64), (2, 128)]


def test_peers_are_asked_for_what_is_not_here_whoever_of_them_does_not_answer():
    made, peers = finder({0: 64}, b=UnavailableError("out of reach"), c=[head(1)])
    found = asyncio.run(made.find("job", KEY, [0, 1, 2]))

    assert ranks(found) == {0, 1}
    assert peers.asked == [("b", {1, 2}), ("c", {1, 2})]


def test_a_node_of_the_job_that_is_not_there_yet_is_waited_for():
    """An agent that was just restarted, or a machine so busy that leases run out for a moment."""
    made, peers = finder(b=[], c=[head(1)])
    alone, _ = handle(state(), view(run_view(ring=("a", "b", "c")), nodes=(ME, B)))
    made._shell = Shell(alone, view(run_view(ring=("a", "b", "c"))))
    [found] = asyncio.run(made.find("job", KEY, [1]))

    assert found.rank == 1
    assert [node for node, _ in peers.asked] == ["b", "b", "c"]


def test_a_node_of_the_job_that_is_silent_is_asked_again_but_not_for_ever(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(
        segment_heads, "time", SimpleNamespace(monotonic=lambda: float(next(clock)))
    )
    made, peers = finder(b=UnavailableError("out of reach"), c=[])
    made._shell = Shell(handle(state(), view(run_view(ring=("a", "b"))))[0])

    assert asyncio.run(made.find("job", KEY, [1])) == []
    assert 5 < len(peers.asked) < 50


def test_what_a_peer_was_not_asked_for_is_not_taken():
    made, _ = finder({0: 64}, b=[head(0), head(7)], c=[])
    [found] = asyncio.run(made.find("job", KEY, [0, 1]))

    assert (found.rank, found.length_bytes) == (0, LENGTH)


def test_nobody_is_asked_for_nothing():
    made, peers = finder(b=[head(1)], c=[])

    assert asyncio.run(made.find("job", KEY, [])) == []
    assert peers.asked == []
    assert {B.node, C.node} == set(peers.answers)


def lost(rank, *, step=5):
    """A shard that nobody has: an element on node b, and the other member on c, are left of it."""
    gone, other = (
        Shard(
            id=ShardId("r1", step, 1, number), job="job", world_size=9, plan_hash="p",
            length_bytes=LENGTH, root_digest=b"",
        )
        for number in (rank, 8)
    )  # fmt: skip
    pieces = (
        Piece(number=1, is_element=False, nodes=("c",), root_digest=b""),
        Piece(number=0, is_element=True, nodes=("b",), root_digest=b""),
    )
    source = Rebuilt(Stripe(members=(gone, other), elements_count=1), pieces)
    return Want(shard=gone, sources=(source,), reason=WantReason.HEAD)


def test_a_head_that_nobody_has_is_made_of_the_rest_of_its_stripe():
    made, _ = finder(b=[head(1)], c=[])
    made._parity = Stripes(r2=b"a head", r3=UnavailableError("an element went"))
    told = view(wants=(lost(1), lost(2), lost(3), lost(4, step=4)), nodes=(ME, B, C))
    made._shell = Shell(handle(state(), told)[0])

    found = {one.rank: one for one in asyncio.run(made.find("job", KEY, [1, 2, 3, 4]))}
    assert found.keys() == {1, 2}
    assert (found[2].length_bytes, found[2].data) == (LENGTH, b"a head")
    assert made._parity.asked == [(2, [(C,), (B,)]), (3, [(C,), (B,)])]


def test_heads_of_stripes_are_no_more_than_one_answer_may_hold():
    made, _ = finder(b=[], c=[])
    made._parity = Stripes(r2=bytes(HEADS_BYTES_MAX - 8), r3=bytes(16))
    made._shell = Shell(handle(state(), view(wants=(lost(2), lost(3)), nodes=(ME, B, C)))[0])

    assert [2] == [one.rank for one in asyncio.run(made.find("job", KEY, [2, 3]))]
