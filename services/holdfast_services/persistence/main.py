"""Runs one persistence worker."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from typing import TYPE_CHECKING

from holdfast.core.queue_items import Item
from holdfast.errors import InternalError
from holdfast.objectstore import open_store
from holdfast_services.kit import runner
from holdfast_services.kit.pace import Pace
from holdfast_services.kit.queue import open_queue
from holdfast_services.kit.ready import say_ready
from holdfast_services.kit.traces import open_traces
from holdfast_services.persistence.clients import MetadataClient
from holdfast_services.persistence.pool import PartPool
from holdfast_services.persistence.service import PersistService
from holdfast_services.persistence.settings import Settings
from holdfast_services.persistence.source import sources_over
from holdfast_services.persistence.worker import Worker
from holdfast_services.transport.tcp import TcpTransport

if TYPE_CHECKING:
    from holdfast_services.kit.metrics_server import MetricsServer
    from holdfast_services.kit.otlp import Traces

NICE = 10
"""Training goes first: a worker takes what processor time is left over."""

log = logging.getLogger("holdfast_services.persistence")


async def serve(settings: Settings, stop: asyncio.Event) -> None:
    """Work until ``stop``; store, queue and metadata may come and go meanwhile.

    Raises:
        InvalidRequestError: a URL that is none.
    """
    os.nice(NICE)
    store = open_store(settings.store_url)
    queue = open_queue(settings.queue_url, lease_s=settings.queue_lease_s)
    metadata = MetadataClient(settings.metadata_address, settings.worker)
    pool = PartPool(settings.parts_in_flight)
    service = PersistService(
        store,
        metadata,
        pool,
        Pace(settings.persist_bytes_per_s),
        Pace(settings.scrub_bytes_per_s),
        sources=sources_over(TcpTransport()),
    )
    worker = Worker(settings.worker, queue, service, pool, settings.queue_lease_s)
    traces = _trace(settings, worker)
    metrics = await _serve_metrics(settings, worker, service, pool)
    ended = _in_thread(worker)
    try:
        told = {"metrics_url": metrics.url} if metrics else {}
        say_ready(settings.ready_file, {"worker": settings.worker, "pid": os.getpid(), **told})
        log.info("worker %s drains to %s", settings.worker, store.url)
        waiting = [asyncio.create_task(event.wait()) for event in (stop, ended)]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        worker.stop()
        await ended.wait()
        for task in waiting:
            task.cancel()
        if not stop.is_set():
            raise InternalError("the worker's loop ended; its traceback is in the log")
    finally:
        if metrics:
            await metrics.end()
        if traces:
            await asyncio.to_thread(traces.close)
        pool.close()
        metadata.close()
        queue.close()
        store.close()


def _trace(settings: Settings, worker: Worker) -> Traces | None:
    """Send a span for each item of a checkpoint, if traces are asked for."""
    traces = open_traces(settings, "persistence", settings.worker)
    if traces:

        def ended(item: Item, error: str, seconds: float) -> None:
            if item.checkpoint is not None:
                rank = {"rank": item.shard.rank} if item.shard else {}
                traces.ended(f"{item.kind} item", item.checkpoint, seconds, error=error, **rank)

        worker.on_ended.append(ended)
    return traces


async def _serve_metrics(
    settings: Settings, worker: Worker, service: PersistService, pool: PartPool
) -> MetricsServer | None:
    """Serve ``/metrics`` if it is asked for."""
    if not settings.metrics_listen:
        return None
    # Here: who serves none needs neither the memory nor the time of these libraries.
    from holdfast_services.kit.metrics_server import MetricsServer  # noqa: PLC0415
    from holdfast_services.persistence.metrics import WorkerFigures  # noqa: PLC0415

    title = "Holdfast persistence worker"
    server = MetricsServer(settings.metrics_listen, title, settings.rest_names)
    figures = WorkerFigures(worker=worker, service=service, pool=pool)
    worker.on_ended.append(figures.ends.ended)
    await server.begin(figures.families)
    log.info("metrics on %s/metrics", server.url)
    return server


def _in_thread(worker: Worker) -> asyncio.Event:
    """Run ``worker`` in a daemon thread, which does not keep the process; return its end."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def run() -> None:
        try:
            worker.run()
        finally:
            loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=run, name="worker", daemon=True).start()
    return ended


def main() -> int:
    """Run the worker; returns the exit code."""
    return runner.run("persistence", lambda stop: serve(Settings.from_env(os.environ), stop))
