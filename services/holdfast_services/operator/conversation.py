"""An executor's conversation with the scheduler, for one node of Kubernetes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import replace

from holdfast.core.executions import LEASE_S, ExecutorReport, ExecutorRequest, Orders
from holdfast.core.retry import Waits
from holdfast.errors import AlreadyExistsError, CheckpointError
from holdfast_services.operator.scheduler import Scheduler

RETRY_WAITS = Waits(first_s=0.1, wait_s_max=2.0)

log = logging.getLogger(__name__)


class Conversation:
    """Keeps the scheduler informed, and knows its newest orders; ``start``, ``say``, ``stop``.

    Args:
        scheduler: Whom to ask.
        node: For which node.
        report: What is said first; ``say`` changes it.
        sequences: Numbers of reports, shared by all conversations of this executor.
        on_orders: Runs when there are other orders.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        node: str,
        report: ExecutorReport,
        sequences: itertools.count[int],
        on_orders: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._node = node
        self._sequences = sequences
        self._report = replace(report, sequence=next(sequences))
        self._on_orders = on_orders
        self._news = asyncio.Event()
        self._said = ""
        self._task: asyncio.Task[None] | None = None
        self._orders: Orders | None = None
        self._until_s = 0.0

    @property
    def report(self) -> ExecutorReport:
        """What is said."""
        return self._report

    @property
    def orders(self) -> Orders | None:
        """The newest; None: it has been told none, or somebody else may have been since."""
        return self._orders if time.monotonic() < self._until_s else None

    def start(self) -> None:
        """Begin to ask."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    def say(self, report: ExecutorReport) -> None:
        """Say something else from now on, at once."""
        if replace(report, sequence=self._report.sequence) != self._report:
            self._report = replace(report, sequence=next(self._sequences))
            self._news.set()

    async def stop(self) -> None:
        """Say nothing any more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        failures = 0
        while True:
            try:
                await self._next()
                failures, self._said = 0, ""
            except CheckpointError as error:
                failures += 1
                if isinstance(error, AlreadyExistsError):
                    self._orders = None  # they are another operator's now
                if str(error) != self._said:
                    self._said = str(error)
                    log.warning("node %s: %s", self._node, error)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_WAITS.wait_s(failures)):
                        await self._news.wait()

    async def _next(self) -> None:
        """Ask once; news of ours break it off, and nothing is lost by that."""
        self._news.clear()
        known = self.orders or Orders()
        asked_at_s = time.monotonic()
        request = ExecutorRequest(report=self._report, version=known.version, wait_s=known.poll_s)
        asking = asyncio.ensure_future(self._scheduler.orders(self._node, request))
        news = asyncio.ensure_future(self._news.wait())
        try:
            await asyncio.wait({asking, news}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                return
            orders = asking.result()
        finally:
            for task in (asking, news):
                task.cancel()
            await asyncio.wait({asking, news})
        news_of_orders = orders != self.orders
        self._orders, self._until_s = orders, asked_at_s + LEASE_S
        if news_of_orders:
            self._on_orders()
