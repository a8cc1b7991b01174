"""Runs, or cleans up, the embedded stack of one HOME."""

from __future__ import annotations

import asyncio
import json
import os
import sys

from holdfast import locks
from holdfast.errors import AlreadyExistsError, CheckpointError
from holdfast_services.kit import runner
from holdfast_services.kit.queue import open_queue
from holdfast_services.kit.settings import log_level
from holdfast_services.supervisor import cleanup, detach, logs, store
from holdfast_services.supervisor import layout as places
from holdfast_services.supervisor.children import QUEUE_LEASE_S, specs
from holdfast_services.supervisor.domain.restarts import STACK_STOP_S_MAX
from holdfast_services.supervisor.service import Supervisor
from holdfast_services.supervisor.settings import Settings

EXIT_FAILED, EXIT_USAGE, EXIT_RUNNING = 1, 2, 3


def main() -> int:
    """Return the exit code."""
    try:
        settings = Settings.from_args(sys.argv[1:], os.environ)
    except CheckpointError as error:
        return _refuse(error, EXIT_USAGE)
    try:
        places.private_folder(settings.home)
        if settings.drain:
            print(json.dumps(cleanup.drain_report(settings.home)))  # noqa: T201 - for the caller
            return 0
        if settings.erase:
            return _erase(settings)
        return _detach(settings) if settings.detach else _run(settings, _tell_nobody)
    except AlreadyExistsError as error:
        return _refuse(error, EXIT_RUNNING)
    except (CheckpointError, OSError) as error:
        return _refuse(error, EXIT_FAILED)


def _tell_nobody(_news: str) -> None:
    """In the foreground the log is on the terminal."""


def _refuse(error: object, code: int) -> int:
    print(f"holdfast: {error}", file=sys.stderr)  # noqa: T201 - this is a command line
    return code


def _erase(settings: Settings) -> int:
    lock = places.take_lock(settings.home)
    report = cleanup.clean(settings.home, everything=settings.erase_all, environ=settings.environ)
    print(json.dumps(report))  # noqa: T201 - for the caller
    os.close(lock)
    return 0


def _detach(settings: Settings) -> int:
    # Asked before the fork too; the lock itself is taken by the process that runs the stack.
    holder = locks.holder_of(settings.home / "supervisor.lock")
    if holder is not None:
        raise AlreadyExistsError("a stack already runs here", home=settings.home, pid=holder)

    def run(tell: detach.Tell) -> int:
        try:
            return _run(settings, tell)
        except (CheckpointError, OSError) as error:
            tell(str(error))
            return EXIT_FAILED

    news = detach.detached(run, output=settings.home / "log")
    return 0 if news == detach.READY else _refuse(news, EXIT_FAILED)


def _run(settings: Settings, tell: detach.Tell) -> int:
    """Run the stack in this process until it is told to stop or is not needed."""
    home = settings.home
    lock = places.take_lock(home)
    level = log_level(settings.environ, "HOLDFAST_LOG")
    logs.configure(home / "log", level=level, to_terminal=not settings.detach)
    layout = places.make_layout(
        home,
        settings.nodes,
        store=store.choose(home, settings.store),
        port=settings.port,
        rest_port=settings.rest_port,
        scheduler=settings.scheduler,
    )
    layout.unpublish()  # a killed supervisor may have left its own

    def publish() -> None:
        layout.publish()
        tell(detach.READY)

    queue = open_queue(layout.queue, lease_s=QUEUE_LEASE_S)
    supervisor = Supervisor(
        specs(layout, settings.environ, settings.gpus),
        idle_exit_s=settings.idle_exit_s,
        needs=lambda: layout.live_sessions() or cleanup.undrained_count(queue),
        publish=publish,
    )

    async def run(stop: asyncio.Event) -> None:
        try:
            await supervisor.run(stop)
        except CheckpointError as error:
            tell(str(error))
            raise

    try:
        return runner.run("supervisor", run, shutdown_s_max=STACK_STOP_S_MAX)
    finally:
        queue.close()
        layout.unpublish()
        os.close(lock)
