"""Executors report and hear of orders: one read for all who wait."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import replace

from holdfast.core.executions import LEASE_S, ExecutorRequest, Orders
from holdfast.core.records import to_record
from holdfast.core.retry import bounded
from holdfast_services.kit.transactions import Transactions
from holdfast_services.scheduler.storage import Statements
from holdfast_services.scheduler.usecases import executors

WATCH_POLL_S = 1.0
"""Another scheduler process may have changed orders: nobody tells this one."""


class Executors:
    """Takes reports and answers with orders. Owns no thread.

    ``wake`` it when orders may have changed.
    """

    def __init__(self, transactions: Transactions[Statements]) -> None:
        self._transactions = transactions
        self._changed = asyncio.Event()
        self._ending = False
        self._reading: tuple[asyncio.Event, float, asyncio.Task[Mapping[str, Orders]]] | None = None

    def wake(self) -> None:
        """Have all that wait look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    def end(self) -> None:
        """Answer all that wait, and whoever comes after, at once: this process ends."""
        self._ending = True
        self.wake()

    async def ask(self, node: str, request: ExecutorRequest) -> Orders:
        """Take a report; return the node's orders once they differ, or after ``wait_s``.

        Raises:
            InvalidRequestError: names or numbers that make no sense.
            AlreadyExistsError: the node has another executor.
            UnavailableError: try again.
        """
        ends_s = time.monotonic() + bounded(request.wait_s, _POLL_S)
        heard = self._changed
        news = await self._transactions.write(lambda s: executors.hear(s, node, request.report))
        if news:
            self._transactions.wake()
        while True:
            orders = await self._orders(node, heard)
            left_s = ends_s - time.monotonic()
            if orders.version != request.version or left_s <= 0 or self._ending:
                return orders
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, WATCH_POLL_S)):
                    await heard.wait()
            heard = self._changed

    async def leave(self, node: str, executor: str) -> None:
        """Have an executor that ends count as gone from now on."""
        await self._transactions.write(lambda s: executors.leave(s, node, executor))
        self._transactions.wake()

    async def _orders(self, node: str, heard: asyncio.Event) -> Orders:
        """Return a node's orders as read after the last change: once for all that it woke."""
        now_s = time.monotonic()
        reading = self._reading
        if reading is None or reading[0] is not heard or now_s - reading[1] >= WATCH_POLL_S:
            task = asyncio.create_task(self._transactions.read(executors.all_orders))
            task.add_done_callback(self._forget_failed)
            reading = self._reading = (heard, now_s, task)
        found = await asyncio.shield(reading[2])
        return versioned(replace(found.get(node, Orders()), poll_s=_POLL_S))

    def _forget_failed(self, task: asyncio.Task[Mapping[str, Orders]]) -> None:
        failed = task.cancelled() or task.exception() is not None
        if failed and self._reading is not None and self._reading[2] is task:
            self._reading = None


_POLL_S = LEASE_S / executors.POLLS_PER_LEASE


def versioned(orders: Orders) -> Orders:
    """Return orders with the version that their content has."""
    body = json.dumps(to_record(replace(orders, version="")), sort_keys=True).encode()
    return replace(orders, version=hashlib.blake2b(body, digest_size=8).hexdigest())
