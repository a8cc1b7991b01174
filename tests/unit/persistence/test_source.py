"""``RemoteCopy``: the worker fetches over the transport that it was given, whatever that is."""

from __future__ import annotations

import threading

import pytest

from holdfast.core.ids import Generation, Rank, RunId, ShardId, Step
from holdfast.core.inventory import Endpoint, Peer
from holdfast.core.shard import Shard
from holdfast.core.slot_names import SlotName, SlotState
from holdfast.errors import NotFoundError
from holdfast.format.digest import PART_BYTES, part_digests
from holdfast_services.persistence.domain.upload_plan import Part
from holdfast_services.persistence.pool import PartPool
from holdfast_services.persistence.source import RemoteCopy
from holdfast_services.transport import ServedSegments
from holdfast_services.transport.located import Located
from holdfast_services.transport.memory import MemoryNetwork, MemoryTransport

PEER = Peer(node="a", rpc_address="nowhere:1", endpoints=(Endpoint(kind="memory", address="a"),))
KEY = ShardId(RunId("r1"), Step(7), Generation(1), Rank(0))
BYTES = bytes(range(256)) * (PART_BYTES // 256) + b"the rest"


@pytest.fixture
def copy():
    """(a copy at another node, what that node serves)."""
    network, served = MemoryNetwork(), ServedSegments()
    MemoryTransport(network, "a").serve(served)
    served.put(KEY.key, SlotName("s1", 4, SlotState.SEALED), memoryview(BYTES))
    shard = Shard(
        id=KEY, job="job", world_size=1, plan_hash="p", length_bytes=len(BYTES), root_digest=b""
    )
    digests = b"".join(part_digests(memoryview(BYTES)))
    located = Located(shard=shard, slot_incarnation=4, part_digests=digests)
    pool = PartPool(1)
    yield RemoteCopy(PEER, shard, located, pool, MemoryTransport(network, "w")), served
    pool.close()


def last_part():
    digests = tuple(part_digests(memoryview(BYTES)))
    return Part(number=2, begin=PART_BYTES, end=len(BYTES), digests=digests[1:])


def test_a_part_is_fetched_over_the_transport_that_was_given(copy):
    source, _ = copy

    assert [b"the rest"] == [bytes(view) for view in source.part(last_part(), threading.Event())]


def test_a_slot_that_is_served_no_more_is_not_found(copy):
    source, served = copy
    served.withdraw(SlotName("s1", 4, SlotState.SEALED))

    with pytest.raises(NotFoundError):
        list(source.part(last_part(), threading.Event()))
