"""The real service over a real database; agents are values."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from tests.integration.metadata.service import Service
from tests.said import rank_status, registration, tcp

from holdfast.core.ids import ShardId
from holdfast.core.inventory import HeldShard, HeldState, Inventory, Peer
from holdfast.core.shard import Shard
from holdfast_services.kit.db import make_engine
from holdfast_services.metadata.domain.model import Limits
from holdfast_services.metadata.migrations import upgrade

JOB = "gpt/small"
LIMITS = Limits(node_lease_s=30.0, decide_wait_s=60.0)


class Agent:
    """What one node reports; the sequence grows by itself."""

    def __init__(self, name):
        self.name = name
        self.incarnation = 1
        self.sequence = 0
        self.shards = []
        self.ranks = ()
        self.leaving = False
        self.seen = ()

    def hold(self, run, step, generation, rank, *, owner=None, world=2):
        shard = Shard(
            id=ShardId(run, step, generation, rank),
            job=JOB,
            world_size=world,
            plan_hash="plan",
            length_bytes=100,
            root_digest=bytes([rank]) * 16,
        )
        self.shards.append(
            HeldShard(
                shard=shard, state=HeldState.SEALED, owner=owner or self.name, slot_incarnation=1
            )
        )

    def serve(self, seat, rank, **facts):
        self.ranks = (
            rank_status(job=JOB, run=seat.run, generation=seat.generation, rank=rank, **facts),
        )

    def inventory(self):
        self.sequence += 1
        return Inventory(
            node=Peer(
                node=self.name, rpc_address=f"{self.name}:1", endpoints=tcp(f"{self.name}:2")
            ),
            incarnation=self.incarnation,
            sequence=self.sequence,
            budget_bytes=1 << 30,
            used_bytes=100 * len(self.shards),
            room_bytes=1 << 30,
            shards=tuple(self.shards),
            ranks=self.ranks,
            leaving=self.leaving,
            seen=self.seen,
        )

    def hear(self, view):
        """Take over what a view says is committed, as an agent does before it reports again."""
        keys = [c.checkpoint for run in view.runs for c in run.committed]
        self.seen = (max(keys, key=lambda key: (key.generation, key.step)),) if keys else ()


def wish(rank, node, nonce=b"first", *, launcher="L", world=2, job=JOB, replicas=1):
    return registration(
        job=job,
        nonce=nonce,
        launcher=launcher,
        holder=f"holder of {launcher}",
        takeover=False,
        rank=rank,
        world_size=world,
        node=node,
        replicas=replicas,
    )


@asynccontextmanager
async def running(url, limits=LIMITS, *, clock=False):
    """A service over the database; without ``clock`` nothing happens by itself."""
    engine = make_engine(url, connections_max=4)
    await asyncio.to_thread(upgrade, engine)
    service = Service(engine, limits)
    if clock:
        service.ticker.start()
    try:
        yield service
    finally:
        await service.stop()
        engine.dispose()


async def launch(service, agents, nonce=b"first", **options):
    """Register one rank per agent, let all report, and return the seat."""
    for rank, agent in enumerate(agents):
        seat = await service.register(wish(rank, agent.name, nonce, world=len(agents), **options))
        agent.serve(seat, rank)
    for agent in agents:
        await service.report(agent.inventory())
    return seat


@pytest.fixture
def agents():
    return [Agent("a"), Agent("b")]


@pytest.fixture(scope="session")
def kit():
    """The helpers of this file, for tests that cannot import it."""

    class Kit:
        pass

    kit = Kit()
    kit.Agent, kit.wish, kit.running, kit.launch = Agent, wish, running, launch
    kit.JOB, kit.LIMITS = JOB, LIMITS
    return kit
