"""Serves the scheduler: REST, and the lease if it can be had."""

from __future__ import annotations

import asyncio
import logging
import os

from holdfast_services.kit.db import make_engine
from holdfast_services.kit.ready import say_ready
from holdfast_services.kit.rest import RestServer
from holdfast_services.kit.runner import run
from holdfast_services.kit.transactions import Transactions
from holdfast_services.scheduler.calls.executors import Executors
from holdfast_services.scheduler.calls.metadata import Metadata
from holdfast_services.scheduler.edges.rest import make_app
from holdfast_services.scheduler.loops.leader import Leader
from holdfast_services.scheduler.migrations import upgrade
from holdfast_services.scheduler.planning import Planner
from holdfast_services.scheduler.settings import Settings
from holdfast_services.scheduler.storage import JobCache, Statements

THREADS = 4

log = logging.getLogger("holdfast_services.scheduler")


async def serve(settings: Settings, stop: asyncio.Event) -> None:
    """Serve until ``stop``."""
    engine = make_engine(settings.database_url, connections_max=THREADS)
    await asyncio.to_thread(upgrade, engine)
    cache = JobCache()
    transactions: Transactions[Statements] = Transactions(
        engine, lambda c: Statements(c, cache), threads=THREADS, name="holdfast-scheduler"
    )
    executors = Executors(transactions)
    leader = Leader(
        transactions,
        Metadata(settings.metadata_address),
        Planner(settings.policy, settings.quotas),
        me=settings.me,
        told=executors.wake,
        round_s=settings.round_s,
    )
    rest = RestServer(settings.rest_listen)
    leader.start()
    try:
        await rest.begin(make_app(transactions, executors, settings.quotas, settings.rest_names))
        say_ready(settings.ready_file, {"rest_url": rest.url})
        log.info("serving REST and the page on %s, policy %s", rest.url, settings.policy)
        await stop.wait()
    finally:
        executors.end()
        rest.close()
        await leader.stop()
        await rest.ended()
        await transactions.stop()
        engine.dispose()


def main() -> int:
    """Run the service; returns the exit code."""
    return run("scheduler", lambda stop: serve(Settings.from_env(os.environ), stop))
