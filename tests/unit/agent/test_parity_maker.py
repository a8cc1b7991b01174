"""Sums of pieces that may be bad: who is left out, who is told, and what counts as made (P3)."""

from __future__ import annotations

import asyncio
import struct
import threading
from dataclasses import replace

import pytest
from tests.said import tcp

from holdfast.core.ids import ShardId
from holdfast.core.inventory import Peer
from holdfast.core.shard import Shard
from holdfast.core.stripes import Element, Stripe
from holdfast.errors import DigestMismatchError, ManifestError, UnavailableError
from holdfast.format import parity
from holdfast.format.digest import part_digest, root_digest
from holdfast_services.agent import isal
from holdfast_services.agent.domain import HeldSum
from holdfast_services.agent.domain import events as ev
from holdfast_services.agent.domain.state import GivenPiece, Rebuilding
from holdfast_services.agent.parity_maker import ParityMaker, Rebuild
from holdfast_services.agent.summing import Opened, PieceError, Summing

PART = 64
LENGTH = 160
HEAD = 100
"""Of each member: two parts."""


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    for module in ("holdfast.format.digest", "holdfast_services.agent.summing"):
        monkeypatch.setattr(f"{module}.PART_BYTES", PART)


def digests_of(data):
    return tuple(part_digest(data[at : at + PART]) for at in range(0, len(data), PART))


def member(rank):
    rest = bytes((31 * rank + at) % 251 for at in range(LENGTH - 8))
    return struct.pack("<Q", HEAD - 8) + rest


MEMBERS = [member(rank) for rank in range(2)]


def shard(rank):
    return Shard(
        id=ShardId("r1", 5, 1, rank), job="job", world_size=2, plan_hash="p", length_bytes=LENGTH,
        root_digest=root_digest(LENGTH, digests_of(MEMBERS[rank])),
    )  # fmt: skip


class Peers:
    """Nodes that have pieces, by name; what they are told is kept."""

    def __init__(self):
        self.told = []

    async def suspect(self, peer, shard, incarnation, length_bytes):
        self.told.append((peer.node, shard.key))

    async def suspect_element(self, peer, key, incarnation, length_bytes):
        self.told.append((peer.node, key))


class Wire:
    """Serves pieces by key; of a key among the ``bad`` bytes that do not match their digests."""

    def __init__(self, pieces):
        self.pieces, self.bad, self.gone = pieces, set(), set()

    def fetch(self, endpoints, fetch):
        key, asked = fetch.request.key, fetch.request
        if key in self.gone:
            raise UnavailableError("out of reach")
        begin = asked.offset_bytes
        data = self.pieces[key][begin : begin + asked.length_bytes]
        if key in self.bad or digests_of(data) != tuple(asked.digests):
            raise DigestMismatchError(f"a part of {key}")
        fetch.destination[:] = data


class Scene:
    """A stripe of two members and two elements; rank 0 is lost unless it is said to be there."""

    def __init__(self):
        self.stripe = Stripe(members=(shard(0), shard(1)), elements_count=2)
        self.peers, self.opened, pieces = Peers(), [], {}
        for number, data in enumerate(MEMBERS):
            key = shard(number).id.key
            pieces[key] = data
            self.opened.append(self._opened(False, number, key, data, shard=shard(number)))
        for number in range(2):
            self._add_element(number, pieces)
        self.wire = Wire(pieces)
        summing = Summing(self.wire, self.peers, threading.Event())
        summing.open_pieces = self._open
        self.maker = ParityMaker(summing, self.peers, self._at_once)

    def _add_element(self, number, pieces):
        data = bytearray(LENGTH)
        terms = parity.terms_of_element(number, 2)
        pairs = [(t.weight, memoryview(bytearray(MEMBERS[t.number]))) for t in terms]
        isal.write_sum(memoryview(data), pairs)
        key = Element(stripe=self.stripe, number=number).key
        pieces[key] = bytes(data)
        self.opened.append(self._opened(True, number, key, pieces[key], held=self.held(number)))

    def held(self, number, **fields):
        members = tuple(b"".join(digests_of(data)) for data in MEMBERS)
        element = Element(stripe=self.stripe, number=number)
        known = {"root_digest": b"r" * 16, "digests": b"", "member_digests": members}
        return HeldSum(element=element, **{**known, **fields})

    def _opened(self, is_element, number, key, data, **what):
        peer = Peer(node="abcd"[number + 2 * is_element], rpc_address="", endpoints=tcp("x:1"))
        given = GivenPiece(number=number, is_element=is_element, root_digest=b"", peers=(peer,))
        return Opened(
            piece=given, peer=peer, key=key, incarnation=1, length_bytes=len(data),
            digests=digests_of(data), **what,
        )  # fmt: skip

    def made_wrong(self, number):
        """The element is what its holder says, and not what it should be."""
        at = 2 + number
        data = bytes(self.wire.pieces[self.opened[at].key])
        wrong = data[:PART] + bytes([data[PART] ^ 1]) + data[PART + 1 :]
        self.wire.pieces[self.opened[at].key] = wrong
        self.opened[at] = self._opened(
            True, number, self.opened[at].key, wrong, held=self.opened[at].held
        )

    async def _open(self, stripe, pieces, reasons):
        return [one for one in self.opened if one is not None]

    async def _at_once(self, work):
        return await asyncio.to_thread(work)

    def rebuild(self, done=()):
        lost = Rebuild(shard(0), memoryview(bytearray(LENGTH)), set(done))
        source = Rebuilding(stripe=self.stripe, pieces=())
        reasons = []
        try:
            asyncio.run(self.maker.rebuild(lost, source, reasons))
        finally:
            self.lost, self.reasons = lost, reasons
        return bytes(lost.target)


@pytest.fixture
def scene():
    made = Scene()
    made.opened[0] = None
    return made


def test_a_lost_shard_is_what_it_was(scene):
    assert scene.rebuild() == MEMBERS[0]
    assert scene.peers.told == []


def test_an_element_that_was_made_wrong_is_left_out_and_good_parts_stay(scene):
    """Its bytes match its own digests: only the shard's tell."""
    scene.made_wrong(0)
    assert scene.rebuild() == MEMBERS[0]


def test_a_stripe_that_gives_another_shard_is_blamed(scene):
    for number in range(2):
        scene.made_wrong(number)
    with pytest.raises(DigestMismatchError, match="does not follow"):
        scene.rebuild()
    assert scene.lost.done == {0, 2}, "what matched"


@pytest.mark.parametrize("digests", [b"x" * 48, b"x" * 32, b"torn"])
def test_member_digests_that_do_not_give_the_root_of_the_shard_are_no_measure(scene, digests):
    """Else bytes of another shard would be sealed as this one; the next element may know it."""
    element = scene.opened[2]
    wrong = scene.held(0, member_digests=(digests, b""))
    scene.opened[2] = replace(element, held=wrong)
    assert scene.rebuild() == MEMBERS[0]


def test_a_bad_piece_is_left_out_and_its_holder_is_told(scene):
    scene.wire.bad.add(scene.opened[2].key)
    assert scene.rebuild() == MEMBERS[0]
    assert scene.peers.told == [("c", scene.opened[2].key)]
    assert "c: " in scene.reasons[0]


def test_a_piece_that_is_out_of_reach_is_nobody_s_fault(scene):
    scene.wire.gone |= {scene.opened[1].key}
    assert scene.rebuild() == MEMBERS[0]
    assert scene.peers.told == []
    scene.wire.gone |= {scene.opened[3].key}
    with pytest.raises(UnavailableError, match="fewer than 2 pieces"):
        scene.rebuild()


def make(scene):
    element = Element(stripe=scene.stripe, number=1)
    action = ev.MakeElement(None, element, Rebuilding(stripe=scene.stripe, pieces=()))
    target = memoryview(bytearray(LENGTH))
    held = asyncio.run(scene.maker.make(action, target))
    return held, bytes(target)


def test_an_element_knows_the_digests_of_its_members_and_its_own():
    scene = Scene()
    held, data = make(scene)
    assert data == scene.wire.pieces[held.element.key]
    assert held.member_digests == tuple(b"".join(digests_of(one)) for one in MEMBERS)
    assert held.root_digest == root_digest(LENGTH, digests_of(data))


def test_no_element_is_made_without_all_members(scene):
    with pytest.raises(UnavailableError, match="a member is with nobody"):
        make(scene)


def test_the_holder_of_a_bad_member_is_told():
    scene = Scene()
    scene.wire.bad.add(scene.opened[1].key)
    with pytest.raises(PieceError):
        make(scene)
    assert scene.peers.told == [("b", shard(1).id.key)]


def test_a_head_is_made_of_the_parts_that_have_it(scene):
    source = Rebuilding(stripe=scene.stripe, pieces=())
    assert asyncio.run(scene.maker.head(shard(0), source)) == MEMBERS[0][:HEAD]


def test_a_head_longer_than_its_segment_is_none(scene, monkeypatch):
    monkeypatch.setattr("holdfast_services.agent.parity_maker.header_length", lambda _: LENGTH + 1)
    with pytest.raises(ManifestError, match="a head of"):
        asyncio.run(scene.maker.head(shard(0), Rebuilding(stripe=scene.stripe, pieces=())))
