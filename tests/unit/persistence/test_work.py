"""What metadata answers is done only if it is what the item is about (P9)."""

import threading

import pytest

from holdfast.core.ids import CheckpointId, ShardId
from holdfast.core.persistence_work import CheckpointWork, ShardWork, SweepWork
from holdfast.core.queue_items import ORPHANS, Item, Kind, shard_item
from holdfast.core.shard import Shard
from holdfast.errors import InvalidRequestError
from holdfast.objectstore.memory import MemoryStore
from holdfast.v1 import persistence_pb2 as pb
from holdfast_services.kit.pace import Pace
from holdfast_services.persistence import clients
from holdfast_services.persistence.service import PersistService

KEY = CheckpointId("r1", 10, 1)
SHARD = Shard(
    id=ShardId("r1", 10, 1, 0),
    job="j",
    world_size=1,
    plan_hash="p",
    length_bytes=100,
    root_digest=b"\1" * 16,
)
OF_SHARD = ShardWork(shard=SHARD)
OF_ALL = CheckpointWork(checkpoint=KEY, job="j", shards=(SHARD,))


def test_the_work_of_a_shard_names_its_checkpoint_and_job():
    assert (KEY, "j") == (OF_SHARD.checkpoint, OF_SHARD.job)


@pytest.mark.parametrize(
    ("item", "work"),
    [
        (shard_item(SHARD.id), OF_ALL),
        (Item(Kind.MANIFEST, KEY), OF_SHARD),
        (Item(Kind.COLLECT, KEY), SweepWork()),
        (Item(Kind.SCRUB, KEY), OF_SHARD),
        (ORPHANS, OF_ALL),
    ],
)
def test_work_of_another_kind_than_the_item_is_refused(item, work):
    service = PersistService(MemoryStore(), None, None, Pace(0), Pace(0), sources=None)

    with pytest.raises(InvalidRequestError, match=f"was answered with {type(work).__name__}"):
        service.do(item, work, threading.Event())


def test_an_answer_without_work_is_refused_and_says_the_cure():
    with pytest.raises(InvalidRequestError, match="upgrade it"):
        clients._work(pb.PlanResponse())
