"""What each child is: its command, its environment, and how to see that it serves."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import UnavailableError
from holdfast.rpc import rest
from holdfast.rpc.channel import async_channel, call_async, unix_target
from holdfast.v1 import agent_pb2, common_pb2
from holdfast.v1.agent_pb2_grpc import AgentStub
from holdfast.v1.metadata_pb2_grpc import MetadataStub
from holdfast_services.kit.free_memory import free_bytes
from holdfast_services.supervisor.domain.restarts import (
    EXECUTOR,
    METADATA,
    PERSISTENCE,
    SCHEDULER,
)
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
    ``stop_signal`` asks it to end.
    """

    name: str
    command: tuple[str, ...]
    environ: Mapping[str, str]
    probe: Callable[[bool], Awaitable[None]]
    ready_file: Path | None = None
    stop_signal: int = signal.SIGTERM


def specs(layout: Layout, environ: Mapping[str, str], gpus: str = "") -> tuple[Spec, ...]:
    """Return all children of ``layout``, metadata first.

    Args:
        layout: Where they are.
        environ: What they inherit.
        gpus: What each executor offers, a number or ``auto``; empty: all GPUs, else one place.
    """
    budget = environ.get("HOLDFAST_BUDGET") or str(_budget_bytes(layout))
    return (
        _metadata(layout, environ),
        *(_agent(layout, node, budget, environ) for node in layout.nodes),
        _persistence(layout, environ),
        *(_scheduling(layout, gpus, environ) if layout.scheduler_port else ()),
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
        "HOLDFAST_METRICS_LISTEN": "off",  # one address, and there are several of us
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
        "HOLDFAST_METRICS_LISTEN": "off",
    }
    return Spec(
        name=PERSISTENCE,
        command=(sys.executable, "-m", "holdfast_services.persistence"),
        environ={**environ, **own},
        probe=probe,
        ready_file=layout.worker_ready_file,
    )


def _scheduling(layout: Layout, gpus: str, environ: Mapping[str, str]) -> tuple[Spec, ...]:
    """Return the scheduler, and an executor on each node."""
    return (
        _scheduler(layout, environ),
        *(_executor(layout, node, gpus, environ) for node in layout.nodes),
    )


def _scheduler(layout: Layout, environ: Mapping[str, str]) -> Spec:
    async def probe(first: bool) -> None:
        del first
        url = f"{layout.scheduler_url}/readyz"
        await asyncio.to_thread(rest.ask, "GET", url, timeout_s=PROBE_S)

    own = {
        "HOLDFAST_DATABASE_URL": f"sqlite:///{layout.home / 'scheduler.db'}",
        "HOLDFAST_ADDRESS": layout.address,
        "HOLDFAST_REST_LISTEN": f"{HOST}:{layout.scheduler_port}",
    }
    return Spec(
        name=SCHEDULER,
        command=(sys.executable, "-m", "holdfast_services.scheduler"),
        environ={**environ, **own},
        probe=probe,
    )


def _executor(layout: Layout, node: NodePlaces, gpus: str, environ: Mapping[str, str]) -> Spec:
    ready_file = layout.executor_ready_file(node.name)

    async def probe(first: bool) -> None:
        del first
        if not ready_file.exists():
            raise UnavailableError("the executor has not heard the scheduler yet", node=node.name)

    own = {
        "HOLDFAST_AGENT": str(node.socket),
        "HOLDFAST_HOME": str(layout.home),
        "HOLDFAST_READY_FILE": str(ready_file),
        "HOLDFAST_SCHEDULER": layout.scheduler_url,
    }
    return Spec(
        name=f"{node.name}{EXECUTOR}",
        command=(
            *(sys.executable, "-m", "holdfast.cli.main", "execute"),
            *("--gpus", gpus or ("auto" if _has_gpus(environ) else "1")),
        ),
        environ={**environ, **own},
        probe=probe,
        ready_file=ready_file,
        stop_signal=signal.SIGINT,  # with the jobs: there will be no agent for them
    )


def _has_gpus(environ: Mapping[str, str]) -> bool:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    return Path("/dev/nvidia0").exists() if visible is None else bool(visible.strip("-1, "))


def _budget_bytes(layout: Layout) -> int:
    """Half of what the arenas' file system has for us, shared out over the nodes."""
    ours = sum(_allocated_bytes(file) for file in layout.arenas.rglob("*"))
    return (free_bytes(layout.arenas) + ours) // 2 // len(layout.nodes)


def _allocated_bytes(file: Path) -> int:
    return os.lstat(file).st_blocks * 512
