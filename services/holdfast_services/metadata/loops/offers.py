"""Offers to the queue whatever is due, after each change and every few seconds.

What is due follows from the catalogue alone, so a queue that lost everything is full again after
``RECONCILE_S``, and one that is down harms nothing but the draining itself. Offers are
idempotent: any number of metadata processes may make them. Waits are counted by the monotonic
clock, which no administrator sets back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from holdfast.core import queue_items
from holdfast.core.user_events import Event
from holdfast.errors import CheckpointError, UnavailableError
from holdfast_services.kit.queue import Queue
from holdfast_services.metadata.transactor import Transactor
from holdfast_services.metadata.usecases import workers
from holdfast_services.metadata.usecases.workers import Ages

RECONCILE_S = 5.0
GAP_S = 0.2
OFFER_S_MAX = 5.0
STOP_S_MAX = 2.0
ITEMS_PER_OFFER_MAX = 500
ORPHANS_S_MAX = 3600.0
ORPHANS = queue_items.text(queue_items.ORPHANS)

log = logging.getLogger(__name__)


class _CatalogueError(CheckpointError):
    """The catalogue does not answer: that says nothing about the queue."""


class Reconciler:
    """Keeps the queue in step with the catalogue; owns a thread and, from ``start``, the queue."""

    def __init__(self, transactor: Transactor, queue: Queue, ages: Ages) -> None:
        self._transactor = transactor
        self._queue = queue
        self._ages = ages
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-offers")
        self._offering: asyncio.Future[int] | None = None
        self._offered: set[str] = set()
        self._all_at_s = 0.0
        self._orphans_at_s = 0.0
        self._down = False
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to offer."""
        self._running = asyncio.create_task(self._for_ever())

    async def stop(self) -> None:
        """Stop offering and close the queue, unless it is stuck in an offer."""
        if self._running:
            self._running.cancel()
            await asyncio.wait({self._running})
        if self._offering:
            await asyncio.wait({self._offering}, timeout=STOP_S_MAX)
        if self._offering is None or self._offering.done():
            await asyncio.to_thread(self._queue.close)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _for_ever(self) -> None:
        while True:
            # Asked for before the catalogue is read: what changes meanwhile is not missed.
            news = asyncio.create_task(self._transactor.changed(RECONCILE_S))
            try:
                await self._round()
                await asyncio.sleep(GAP_S)
                await news
            finally:
                news.cancel()

    async def _round(self) -> None:
        try:
            items = await self._due()
            if items:
                await self._offer(items)
                await self._say_up()
        except _CatalogueError as error:
            log.info("cannot tell what is due: %s", error)
        except CheckpointError as error:
            await self._say_down(error)
        except Exception:
            log.exception("reconciling failed")

    async def _due(self) -> Sequence[str]:
        """Return what was not offered since everything was; at times, everything."""
        everything = time.monotonic() >= self._all_at_s
        try:
            items = await self._transactor.read(workers.drain_items)
            if everything:
                items += await self._transactor.read(lambda c: workers.bucket_items(c, self._ages))
        except CheckpointError as cause:
            raise _CatalogueError(cause.message) from cause
        if not everything:
            return [item for item in items if item not in self._offered]
        self._offered.clear()
        self._all_at_s = time.monotonic() + RECONCILE_S
        return [*items, ORPHANS] if time.monotonic() >= self._orphans_at_s else items

    async def _offer(self, items: Sequence[str]) -> None:
        """Offer items in one thread, a bounded number at a time.

        Raises:
            UnavailableError: the queue does not answer, or has not in time.
        """
        for begin in range(0, len(items), ITEMS_PER_OFFER_MAX):
            chunk = items[begin : begin + ITEMS_PER_OFFER_MAX]
            if self._offering and not self._offering.done():
                raise UnavailableError("the queue has not answered the last offer yet")
            loop = asyncio.get_running_loop()
            self._offering = loop.run_in_executor(self._thread, self._queue.offer, chunk)
            done, _ = await asyncio.wait({self._offering}, timeout=OFFER_S_MAX)
            if not done:
                raise UnavailableError(f"the queue did not answer within {OFFER_S_MAX:.0f} s")
            self._offering.result()
            self._offered.update(chunk)
        if ORPHANS in items:
            wait_s = min(ORPHANS_S_MAX, self._ages.orphan_s / 4)
            self._orphans_at_s = time.monotonic() + wait_s

    async def _say_down(self, error: CheckpointError) -> None:
        if self._down:
            return
        self._down = True
        log.warning("%s; the service tries again every %.0f s", error, RECONCILE_S)
        text = f"no new checkpoint becomes durable until the queue answers: {error.message}"
        await self._record(Event(kind="queue_down", severity="warning", message=text))

    async def _say_up(self) -> None:
        if self._down:
            self._down = False
            text = "the queue answers again"
            await self._record(Event(kind="queue_up", severity="info", message=text))

    async def _record(self, event: Event) -> None:
        try:
            await self._transactor.change(lambda c: workers.note(c, event))
        except CheckpointError as error:
            log.info("%s was not recorded: %s", event.kind, error)
