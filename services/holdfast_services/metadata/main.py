"""Serves the catalogue: gRPC and REST in one loop."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from functools import partial
from typing import TYPE_CHECKING

from holdfast.objectstore import open_store
from holdfast.v1.metadata_pb2_grpc import add_MetadataServicer_to_server
from holdfast.v1.persistence_pb2_grpc import add_PersistenceServicer_to_server
from holdfast_services.kit.cycles import look_for_cycles_seldom
from holdfast_services.kit.db import Engine, make_engine, write_transaction
from holdfast_services.kit.queue import open_queue
from holdfast_services.kit.ready import say_ready
from holdfast_services.kit.rest import GRACE_S, RestServer, host_port, reachable
from holdfast_services.kit.runner import run
from holdfast_services.kit.server import bind, make_server
from holdfast_services.kit.traces import open_traces
from holdfast_services.metadata.calls.catalogue_from_bucket import BucketArchive
from holdfast_services.metadata.calls.health import StoreHealth
from holdfast_services.metadata.calls.launches import Launches
from holdfast_services.metadata.calls.registrations import Registrations
from holdfast_services.metadata.calls.reports import Reports
from holdfast_services.metadata.domain.model import Limits
from holdfast_services.metadata.edges.object_tier import ObjectTier
from holdfast_services.metadata.edges.rest import make_app
from holdfast_services.metadata.edges.rpc_agents import MetadataRpc
from holdfast_services.metadata.edges.rpc_workers import PersistenceRpc
from holdfast_services.metadata.loops.offers import Reconciler
from holdfast_services.metadata.loops.retention import RetentionLoop
from holdfast_services.metadata.loops.tick import Ticker
from holdfast_services.metadata.migrations import upgrade
from holdfast_services.metadata.settings import Settings
from holdfast_services.metadata.storage import Catalogue, DecodeCache
from holdfast_services.metadata.transactor import THREADS, Transactor
from holdfast_services.metadata.usecases import workers
from holdfast_services.metadata.usecases.agents import LISTEN_S
from holdfast_services.metadata.usecases.workers import Ages

if TYPE_CHECKING:
    from holdfast_services.kit.otlp import Traces

OFFERS_LEASE_S = 30.0
"""Only who claims has a lease; who offers must name one all the same."""

log = logging.getLogger("holdfast_services.metadata")


async def serve(settings: Settings, stop: asyncio.Event) -> None:
    """Serve until ``stop``; then end streams and calls within ``GRACE_S`` each."""
    engine = make_engine(settings.database_url, connections_max=THREADS)
    await asyncio.to_thread(upgrade, engine)
    limits = Limits(
        node_lease_s=settings.node_lease_s,
        decide_wait_s=settings.decide_wait_s,
        listen_s=LISTEN_S,
        object_tier=bool(settings.store),
    )
    transactor = Transactor(engine, limits)
    traces = _trace(settings, transactor)
    ages = Ages(orphan_s=settings.orphan_age_s, scrub_s=settings.scrub_age_s)
    store = open_store(settings.store) if settings.store else None
    queue = open_queue(settings.queue, lease_s=OFFERS_LEASE_S) if settings.store else None
    archive = BucketArchive(transactor, store) if store else None
    registrations, reports = Registrations(transactor, archive), Reports(transactor)
    launches = Launches(transactor)
    health = StoreHealth(store)
    loops: list[Ticker | RetentionLoop | Reconciler] = [Ticker(transactor)]
    loops.append(RetentionLoop(transactor))
    if queue:
        loops.append(Reconciler(transactor, queue, ages))
    rest = RestServer(settings.rest_listen)
    rest_url = rest.url
    server = make_server()
    add_MetadataServicer_to_server(
        MetadataRpc(transactor, registrations, reports, launches, rest_url), server
    )
    add_PersistenceServicer_to_server(PersistenceRpc(transactor, rest_url, ages), server)
    host, port = host_port(settings.listen)
    bound = bind(server, f"{host}:{port}")
    objects = ObjectTier(health=health, archive=archive, queue=queue)
    app = make_app(transactor, reports, launches, objects, stop, settings.rest_names)
    for loop in loops:
        loop.start()
    await server.start()
    try:
        await rest.begin(app)
        address = f"{reachable(host)}:{bound}"
        say_ready(settings.ready_file, {"address": address, "rest_url": rest_url})
        log.info("serving gRPC on %s, REST and status page on %s", address, rest_url)
        await stop.wait()
    finally:
        rest.close()
        await server.stop(GRACE_S)
        await rest.ended()
        for loop in reversed(loops):
            await loop.stop()
        await health.stop()
        await transactor.stop()
        engine.dispose()
        if store:
            store.close()
        if traces:
            await asyncio.to_thread(traces.close)


def _trace(settings: Settings, transactor: Transactor) -> Traces | None:
    """Send traces of all that the catalogue learns, if they are asked for."""
    traces = open_traces(settings, "metadata", socket.gethostname())
    if traces:
        from holdfast_services.metadata.traces import tell  # noqa: PLC0415 - as in open_traces

        transactor.on_change = partial(tell, traces)
    return traces


async def forget_memory(settings: Settings) -> None:
    """Forget all that was in memory only; durable checkpoints stay."""
    engine = make_engine(settings.database_url, connections_max=1)
    try:
        await asyncio.to_thread(_forget_memory, engine)
    finally:
        engine.dispose()


def _forget_memory(engine: Engine) -> None:
    upgrade(engine)
    with write_transaction(engine) as connection:
        workers.forget_memory(Catalogue(connection, DecodeCache()))


def main() -> int:
    """Run the service, or the one command there is; returns the exit code."""
    arguments = sys.argv[1:]
    if arguments == ["forget-memory"]:
        return run("metadata", lambda _: forget_memory(Settings.from_env(os.environ)))
    if arguments:
        log.error("the only argument is forget-memory, not %s", " ".join(arguments)[:200])
        return 2
    look_for_cycles_seldom()
    return run("metadata", lambda stop: serve(Settings.from_env(os.environ), stop))
