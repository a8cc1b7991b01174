"""A catalogue with an object tier: the service, its gRPC edge and a queue; workers are values."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager

from sqlalchemy import text
from tests.said import changed_wish

from holdfast.core.persistence_rules import PersistRule
from holdfast.core.persistence_work import CheckpointWork, ShardWork, SweepWork
from holdfast.errors import NotFoundError
from holdfast.rpc.channel import async_channel, call_async
from holdfast.rpc.codec import from_message, to_message
from holdfast.v1 import common_pb2 as common
from holdfast.v1 import persistence_pb2 as pb
from holdfast.v1.persistence_pb2_grpc import PersistenceStub, add_PersistenceServicer_to_server
from holdfast_services.kit.queue.memory import MemoryQueue
from holdfast_services.kit.server import make_server
from holdfast_services.metadata.domain.model import Limits
from holdfast_services.metadata.edges.rpc_workers import PersistenceRpc
from holdfast_services.metadata.loops.offers import ORPHANS, Reconciler
from holdfast_services.metadata.usecases.workers import Ages

LIMITS = Limits(node_lease_s=600.0, decide_wait_s=600.0, object_tier=True)
RULE = PersistRule(steps=10)
DIGEST = b"m" * 16
WAIT_S_MAX = 30.0
WORK = {"shard": ShardWork, "checkpoint": CheckpointWork, "sweep": SweepWork}


class Tier:
    """A service with its edge and a queue, and what a worker would do."""

    def __init__(self, service, stub, queue, kit):
        self.service, self.stub, self.queue, self.kit = service, stub, queue, kit

    async def call(self, name, request):
        return await call_async(getattr(self.stub, name), request, timeout_s=30)

    async def plan(self, item):
        answer = await self.call("Plan", pb.PlanRequest(item=item))
        kind = answer.WhichOneof("work")
        return from_message(getattr(answer, kind), WORK[kind])

    async def is_durable(self, key):
        return (await self.call("IsDurable", pb.IsDurableRequest(checkpoint=_key(key)))).durable

    async def stored(self, shard):
        request = pb.ShardStoredRequest(shard=to_message(shard, common.Shard))
        return (await self.call("ShardStored", request)).missing

    async def durable(self, key, digest=DIGEST):
        request = pb.DurableRequest(checkpoint=_key(key), manifest_digest=digest)
        await self.call("Durable", request)

    async def collected(self, key):
        await self.call("Collected", pb.CollectedRequest(checkpoint=_key(key), freed_bytes=5))

    async def scrubbed(self, key, *bad):
        names = [to_message(shard, common.ShardId) for shard in bad]
        await self.call("Scrubbed", pb.ScrubbedRequest(checkpoint=_key(key), bad=names))

    async def claim(self):
        """Return the next claim; orphans are done at once."""
        ends = time.monotonic() + WAIT_S_MAX
        while time.monotonic() < ends:
            claims = await asyncio.to_thread(self.queue.claim, "w", count_max=1, wait_s=0.5)
            for claim in claims:
                if claim.item != ORPHANS:
                    return claim
                self.queue.acknowledge(claim)
        raise AssertionError("nothing was offered in time")

    async def do_next(self):
        """Do one item as a worker does, and return it; what was done since its offer is not one."""
        claim = await self.claim()
        try:
            plan = await self.plan(claim.item)
        except NotFoundError:
            self.queue.acknowledge(claim)
            return await self.do_next()
        if claim.item.startswith("shard"):
            assert plan.sources
            await self.stored(plan.shard)
        else:
            await self.durable(plan.checkpoint)
        self.queue.acknowledge(claim)
        return claim.item

    async def launch(self, agents, nonce=b"first", rule=RULE):
        for rank, agent in enumerate(agents):
            wish = changed_wish(self.kit.wish(rank, agent.name, nonce), persist=rule)
            seat = await self.service.register(wish)
            agent.serve(seat, rank)
        for agent in agents:
            await self.service.report(agent.inventory())
        return seat

    async def commit(self, agents, seat, step):
        for agent in agents:
            for rank, owner in enumerate(agents):
                agent.hold(seat.run, step, seat.generation, rank, owner=owner.name)
        for agent in agents:
            view = await self.service.report(agent.inventory())
        return view.runs[0]

    async def run(self):
        return (await self.service.world()).runs[0]

    async def row(self, key):
        return await self.service.read(lambda c: c.checkpoint(key))

    async def kinds(self):
        return [row["kind"] for row in await self.service.read(lambda c: c.last_events(100))]

    async def drained(self, key):
        """Upload all shards of a draining checkpoint."""
        for shard in await self.service.read(lambda c: c.drained_shards(key)):
            await self.stored(shard)


def _key(key):
    return to_message(key, common.CheckpointId)


@asynccontextmanager
async def tier_over(url, kit, *, limits=LIMITS, ages=None, offers=True):
    queue = MemoryQueue(lease_s=30)
    ages = ages or Ages()
    server = make_server()
    async with kit.running(url, limits) as service:
        add_PersistenceServicer_to_server(PersistenceRpc(service, "http://r", ages), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        reconciler = Reconciler(service, queue, ages)
        if offers:
            reconciler.start()
        async with async_channel(f"127.0.0.1:{port}") as channel:
            yield Tier(service, PersistenceStub(channel), queue, kit)
        await reconciler.stop()
        await server.stop(1)


async def expire(tier, key):
    """Do what retention does when it expires a checkpoint."""

    def mark(catalogue):
        sql = text("UPDATE objects SET expired_at_s = 1 WHERE run = :run AND step = :step")
        catalogue._db.execute(sql, {"run": key.run, "step": key.step})

    await tier.service.write(mark)


async def until(condition):
    """Wait until the awaited condition holds."""
    ends = time.monotonic() + WAIT_S_MAX
    while not await condition():
        assert time.monotonic() < ends, "not in time"
        await asyncio.sleep(0.02)
