"""Which pieces of a stripe are opened: what a node says of one must be what the catalogue knows."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest
from tests.said import tcp

from holdfast.core.ids import ShardId
from holdfast.core.inventory import Peer
from holdfast.core.shard import Shard
from holdfast.core.stripes import Element, Stripe
from holdfast.errors import NotFoundError
from holdfast.format.digest import root_digest
from holdfast_services.agent.domain import HeldSum
from holdfast_services.agent.domain.state import GivenPiece
from holdfast_services.agent.summing import Summing
from holdfast_services.transport.located import Located

LENGTH = 100
DIGEST = b"d" * 16
ROOT = root_digest(LENGTH, (DIGEST,))
A, B = (Peer(node=name, rpc_address="", endpoints=tcp("x:1")) for name in "ab")


def shard(rank):
    return Shard(
        id=ShardId("r1", 5, 1, rank), job="job", world_size=2, plan_hash="p",
        length_bytes=LENGTH, root_digest=ROOT,
    )  # fmt: skip


STRIPE = Stripe(members=(shard(0), shard(1)), elements_count=1)
MEMBER = Located(shard=shard(0), slot_incarnation=1, part_digests=DIGEST)
ELEMENT = HeldSum(
    element=Element(stripe=STRIPE, number=0), root_digest=ROOT, digests=DIGEST,
    member_digests=(DIGEST, DIGEST),
)  # fmt: skip


class Peers:
    """What nodes say of a piece, by name."""

    def __init__(self, **said):
        self.said = said

    async def locate(self, peer, key):
        return self._said(peer)

    async def locate_element(self, peer, element):
        return self._said(peer), 1

    def _said(self, peer):
        said = self.said[peer.node]
        if isinstance(said, Exception):
            raise said
        return said


def opened(*, is_element, **said):
    """Return who gives the piece, and why others do not."""
    piece = GivenPiece(number=0, is_element=is_element, root_digest=ROOT, peers=(A, B))
    reasons = []
    summing = Summing(None, Peers(**said), threading.Event())
    found = asyncio.run(summing.open_pieces(STRIPE, [piece], reasons))
    return [one.peer.node for one in found], reasons


OTHER = b"o" * 16
SAID = {
    "of another root": replace(ELEMENT, root_digest=root_digest(LENGTH, (OTHER,)), digests=OTHER),
    "with digests of other bytes": replace(ELEMENT, digests=OTHER),
    "with too many digests": replace(ELEMENT, digests=DIGEST + OTHER),
    "with torn digests": replace(ELEMENT, digests=b"torn"),
    "gone": NotFoundError("not here"),
}


@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
def test_an_element_that_is_not_the_one_that_is_known_is_asked_for_elsewhere(said):
    found, [reason] = opened(is_element=True, a=said, b=ELEMENT)
    assert found == ["b"]
    assert reason.startswith("a: ")


MEMBERS = {
    "another shard": replace(MEMBER, shard=replace(shard(0), root_digest=OTHER)),
    "with digests of other bytes": replace(MEMBER, part_digests=OTHER),
    "gone": NotFoundError("not here"),
}


@pytest.mark.parametrize("said", MEMBERS.values(), ids=MEMBERS)
def test_a_member_that_is_not_the_one_that_is_known_is_asked_for_elsewhere(said):
    found, [reason] = opened(is_element=False, a=said, b=MEMBER)
    assert found == ["b"]
    assert reason.startswith("a: ")


def test_a_piece_that_nobody_gives_is_left_out():
    found, reasons = opened(is_element=True, a=NotFoundError("no"), b=NotFoundError("no"))
    assert found == []
    assert len(reasons) == 2
