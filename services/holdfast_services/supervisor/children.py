"""What each child is: its command, its environment, and how to see that it serves."""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import UnavailableError
from holdfast.rpc.channel import async_channel, call_async, unix_target
from holdfast.v1 import agent_pb2, common_pb2
from holdfast.v1.agent_pb2_grpc import AgentStub
from holdfast.v1.metadata_pb2_grpc import MetadataStub
from holdfast_services.kit.free_memory import free_bytes
from holdfast_services.supervisor.domain.restarts import METADATA, PERSISTENCE
from holdfast_services.supervisor.layout import Layout, NodePlaces
from holdfast_services.supervisor.ports import HOST

PROBE_S = 2.0
# Everything is on one machine: a worker that was killed is followed by another in a second.
QUEUE_LEASE_S = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One child. ``probe(first)`` raises a CheckpointError until the child serves.

    ``first``: the stack has never been ready, so the child must have found the others too.
    ``ready_file``: written by a child that has no port to ask; removed between its lives.
    """

    name: str
    command: tuple[str, ...]
    environ: Mapping[str, str]
    probe: Callable[[bool], Awaitable[None]]
    ready_file: Path | None = None


def specs(layout: Layout, environ: Mapping[str, str]) -> tuple[Spec, ...]:
    """Return all children of ``layout``, metadata first; ``environ`` is what they inherit."""
    budget = environ.get("HOLDFAST_BUDGET") or str(_budget_bytes(layout))
    return (
        _metadata(layout, environ),
        *(_agent(layout, node, budget, environ) for node in layout.nodes),
        _persistence(layout, environ),
    )


def _metadata(layout: Layout, environ: Mapping[str, str]) -> Spec:
    async def probe(first: bool) -> None:
        del first
        async with async_channel(layout.address) as channel:
            request = common_pb2.HandshakeRequest()
            await call_async(MetadataStub(channel).Handshake, request, timeout_s=PROBE_S)

    own = {
        "HOLDFAST_DATABASE_URL": f"sqlite:///{layout.home / 'metadata.db'}",
        "HOLDFAST_LISTEN": layout.address,
        "HOLDFAST_REST_LISTEN": f"{HOST}:{layout.rest_port}",
        "HOLDFAST_STORE": layout.store,
        "HOLDFAST_QUEUE": layout.queue,
    }
    return Spec(
        name=METADATA,
        command=(sys.executable, "-m", "holdfast_services.metadata"),
        environ={**environ, **own},
        probe=probe,
    )


def _agent(layout: Layout, node: NodePlaces, budget: str, environ: Mapping[str, str]) -> Spec:
    async def probe(first: bool) -> None:
        async with async_channel(unix_target(node.socket)) as channel:
            request = agent_pb2.DescribeRequest()
            answer = await call_async(AgentStub(channel).Describe, request, timeout_s=PROBE_S)
        if first and not answer.metadata_reachable:
            raise UnavailableError("agent has not reached metadata yet", node=node.name)

    own = {
        "HOLDFAST_NODE": node.name,
        "HOLDFAST_ADDRESS": layout.address,
        "HOLDFAST_AGENT": str(node.socket),
        "HOLDFAST_ARENA": str(node.arena),
        "HOLDFAST_BUDGET": budget,
        "HOLDFAST_LISTEN_HOST": HOST,
        "HOLDFAST_RPC_PORT": str(node.rpc_port),
        "HOLDFAST_DATA_PORT": str(node.data_port),
        "HOLDFAST_STORE": layout.store,
    }
    return Spec(
        name=node.name,
        command=(sys.executable, "-m", "holdfast_services.agent"),
        environ={**environ, **own},
        probe=probe,
    )


def _persistence(layout: Layout, environ: Mapping[str, str]) -> Spec:
    async def probe(first: bool) -> None:
        del first
        if not layout.worker_ready_file.exists():
            raise UnavailableError("the worker does not claim yet")

    own = {
        "HOLDFAST_ADDRESS": layout.address,
        "HOLDFAST_STORE": layout.store,
        "HOLDFAST_QUEUE": layout.queue,
        "HOLDFAST_QUEUE_LEASE_S": environ.get("HOLDFAST_QUEUE_LEASE_S") or str(QUEUE_LEASE_S),
        "HOLDFAST_READY_FILE": str(layout.worker_ready_file),
    }
    return Spec(
        name=PERSISTENCE,
        command=(sys.executable, "-m", "holdfast_services.persistence"),
        environ={**environ, **own},
        probe=probe,
        ready_file=layout.worker_ready_file,
    )


def _budget_bytes(layout: Layout) -> int:
    """Half of what the arenas' file system has for us, shared out over the nodes."""
    ours = sum(_allocated_bytes(file) for file in layout.arenas.rglob("*"))
    return (free_bytes(layout.arenas) + ours) // 2 // len(layout.nodes)


def _allocated_bytes(file: Path) -> int:
    return os.lstat(file).st_blocks * 512
