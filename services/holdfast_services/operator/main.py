"""Serves Kubernetes for the scheduler."""

from __future__ import annotations

import asyncio
import logging
import os

from holdfast_services.kit.ready import say_ready
from holdfast_services.kit.runner import run
from holdfast_services.operator.jobs import Jobs
from holdfast_services.operator.kubernetes import Kubernetes, log_in
from holdfast_services.operator.nodes import Nodes
from holdfast_services.operator.scheduler import Scheduler
from holdfast_services.operator.settings import Settings
from holdfast_services.operator.turns import Turns
from holdfast_services.operator.watching import watch

NODES_S = 5.0
"""So often nodes and pods are looked at if nothing is heard of them: news may be lost."""
JOBS_S = 2.0
"""So often the scheduler is asked what has become of jobs, which it tells nobody."""

log = logging.getLogger("holdfast_services.operator")


async def serve(settings: Settings, stop: asyncio.Event) -> None:
    """Serve until ``stop``."""
    kubernetes = Kubernetes(lambda: log_in(settings.kubernetes))
    scheduler = Scheduler(settings.scheduler)
    of_nodes, of_jobs = Turns("nodes", NODES_S), Turns("jobs", JOBS_S)

    def on_orders() -> None:
        of_nodes.wake()
        of_jobs.wake()

    nodes = Nodes(kubernetes, scheduler, on_orders)
    jobs = Jobs(kubernetes, scheduler)
    watching = watch(lambda: log_in(settings.kubernetes), of_nodes.wake, of_jobs.wake)
    running = (stop.wait(), watching, of_nodes.run(nodes.turn), of_jobs.run(jobs.turn))
    tasks = [asyncio.ensure_future(one) for one in running]
    ready = asyncio.ensure_future(_say_ready(settings, of_nodes, of_jobs))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (*tasks, ready):
            task.cancel()
        ended = await asyncio.gather(*tasks, ready, return_exceptions=True)
        await nodes.leave()
        await scheduler.close()
        await kubernetes.close()
    for one in ended:
        if isinstance(one, Exception):
            raise one


async def _say_ready(settings: Settings, *turns: Turns) -> None:
    for one in turns:
        await one.well.wait()
    log.info("serving Kubernetes for the scheduler at %s", settings.scheduler)
    say_ready(settings.ready_file, {"scheduler": settings.scheduler})


def main() -> int:
    """Run the operator; returns the exit code."""
    return run("operator", lambda stop: serve(Settings.from_env(os.environ), stop))
