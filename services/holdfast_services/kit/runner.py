"""Runs a service until it is told to stop: signals, logging, a bounded shutdown."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable

from holdfast.errors import CheckpointError, OutcomeUnknownError
from holdfast.rpc import tls
from holdfast_services.kit.json_lines import JsonLines
from holdfast_services.kit.settings import load_log, load_network

SHUTDOWN_S_MAX = 10.0

log = logging.getLogger(__name__)


def log_formatter(form: str, service: str) -> logging.Formatter:
    """Return what makes lines of a ``HOLDFAST_LOG_FORMAT``."""
    if form == "json":
        return JsonLines(service)
    line = f"%(asctime)s.%(msecs)03d %(levelname)-7s {service} %(name)s: %(message)s"
    return logging.Formatter(line, "%Y-%m-%dT%H:%M:%S")


def configure_logging(service: str) -> None:
    """Log to standard error, one line each, as ``LogSettings`` say.

    Raises:
        InvalidRequestError: there is no such level, or format.
    """
    told = load_log(os.environ, service)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(log_formatter(told.form, service))
    logging.basicConfig(level=told.level, handlers=[handler])


def run(
    service: str,
    main: Callable[[asyncio.Event], Awaitable[None]],
    *,
    shutdown_s_max: float = SHUTDOWN_S_MAX,
) -> int:
    """Run ``main(stop)`` on a fresh loop; SIGTERM and SIGINT set ``stop``.

    Args:
        service: Its name in the log.
        main: Has ``shutdown_s_max`` to end once ``stop`` is set.
        shutdown_s_max: After that it is given up.

    Returns:
        The exit code: 0 after a clean stop, 1 after an error, which is logged in one line.
    """
    try:
        configure_logging(service)
        tls.use(load_network(os.environ, service).tls)
        tls.identity()  # refused now, if peers would refuse it
        asyncio.run(_supervise(main, shutdown_s_max))
    except CheckpointError as error:
        log.error("%s", error)  # noqa: TRY400 - an operating error: its traceback says nothing
        return 1
    except Exception:
        log.exception("ended by a bug")
        return 1
    return 0


async def _supervise(
    main: Callable[[asyncio.Event], Awaitable[None]], shutdown_s_max: float
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    running = asyncio.ensure_future(main(stop))
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    try:
        async with asyncio.timeout(shutdown_s_max if stop.is_set() else None) as bound:
            await running
    except TimeoutError as cause:
        if not bound.expired():
            raise
        raise OutcomeUnknownError(f"not stopped within {shutdown_s_max} s; given up") from cause
