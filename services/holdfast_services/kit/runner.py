"""Runs a service until it is told to stop: signals, logging, a bounded shutdown."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping

from holdfast.errors import CheckpointError, InvalidRequestError, OutcomeUnknownError
from holdfast_services.kit.json_lines import JsonLines

SHUTDOWN_S_MAX = 10.0

log = logging.getLogger(__name__)


def log_level(environ: Mapping[str, str]) -> str:
    """Return the level that ``HOLDFAST_LOG`` names, INFO if it is not set.

    Raises:
        InvalidRequestError: there is no such level.
    """
    level = environ.get("HOLDFAST_LOG", "INFO").upper()
    if level not in logging.getLevelNamesMapping():
        raise InvalidRequestError(f"HOLDFAST_LOG={level} is no level; use DEBUG, INFO or WARNING")
    return level


def log_format(environ: Mapping[str, str], service: str) -> logging.Formatter:
    """Return how ``HOLDFAST_LOG_FORMAT`` wants lines: ``text``, which is the default, or ``json``.

    Raises:
        InvalidRequestError: it is neither.
    """
    match environ.get("HOLDFAST_LOG_FORMAT") or "text":
        case "text":
            line = f"%(asctime)s.%(msecs)03d %(levelname)-7s {service} %(name)s: %(message)s"
            return logging.Formatter(line, "%Y-%m-%dT%H:%M:%S")
        case "json":
            return JsonLines(service)
        case other:
            raise InvalidRequestError(f"HOLDFAST_LOG_FORMAT={other} is neither text nor json")


def configure_logging(service: str) -> None:
    """Log to standard error, one line each; ``HOLDFAST_LOG`` sets the level (default INFO).

    Raises:
        InvalidRequestError: there is no such level, or format.
    """
    level = log_level(os.environ)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(log_format(os.environ, service))
    logging.basicConfig(level=level, handlers=[handler])


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
