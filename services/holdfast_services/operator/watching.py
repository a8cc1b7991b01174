"""Hears by kopf that something has changed in Kubernetes. What it is, who looks finds out."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import kopf

from holdfast_services.operator.domain.names import GROUP, MANAGED_BY, MANAGER, PLURAL, VERSION


async def watch(
    log_in: Callable[[], kopf.ConnectionInfo],
    on_nodes: Callable[[], None],
    on_jobs: Callable[[], None],
) -> None:
    """Watch nodes, pods of ours and HoldfastJobs until cancelled.

    kopf lists, watches and begins anew; it writes nothing into any object. It has a loop of its own
    on a thread, since it ends with its loop all tasks that it finds there.

    Args:
        log_in: Says how to reach Kubernetes; runs on that thread.
        on_nodes: Runs when nodes or pods have changed.
        on_jobs: Runs when HoldfastJobs or pods have.
    """
    logging.getLogger("kopf").setLevel(logging.WARNING)  # it tells of each event of each node
    loop = asyncio.get_running_loop()
    stop = threading.Event()
    registry = _registry(
        log_in,
        lambda: loop.call_soon_threadsafe(on_nodes),
        lambda: loop.call_soon_threadsafe(on_jobs),
    )
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True

    def run() -> None:
        kopf.run(registry=registry, settings=settings, clusterwide=True, stop_flag=stop)

    running = asyncio.ensure_future(asyncio.to_thread(run))
    try:
        await asyncio.shield(running)
    finally:
        stop.set()
        await asyncio.wait({running})


def _registry(
    log_in: Callable[[], kopf.ConnectionInfo],
    on_nodes: Callable[[], object],
    on_jobs: Callable[[], object],
) -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def logged_in(**_: Any) -> kopf.ConnectionInfo:
        return log_in()

    @kopf.on.event("v1", "nodes", registry=registry)
    async def of_node(**_: Any) -> None:
        on_nodes()

    @kopf.on.event("v1", "pods", registry=registry, labels={MANAGED_BY: MANAGER})
    async def of_pod(**_: Any) -> None:
        on_nodes()
        on_jobs()

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def of_job(**_: Any) -> None:
        on_jobs()

    return registry
