"""Runs use cases in transactions, redone when a race was lost; wakes who waits for a change.

Blocking work runs in a few threads. Any number of processes may serve one database: what one of
them tells is a hint to its own callers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from holdfast.core.retry import Waits
from holdfast.errors import ConflictError
from holdfast_services.kit.db import Connection, Engine, read_transaction, write_transaction

CONFLICT_WAITS = Waits(first_s=0.01, wait_s_max=0.5, tries_max=8)

log = logging.getLogger(__name__)

T = TypeVar("T")
StatementsT = TypeVar("StatementsT")


class Transactions(Generic[StatementsT]):
    """The way to a database; ``stop`` after. Owns ``threads`` threads, not the engine.

    ``statements`` makes of a transaction's connection what use cases call.
    """

    def __init__(
        self,
        engine: Engine,
        statements: Callable[[Connection], StatementsT],
        *,
        threads: int,
        name: str,
    ) -> None:
        self._engine = engine
        self._statements = statements
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._changed = asyncio.Event()

    async def stop(self) -> None:
        """End the threads; waits for transactions that run."""
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    async def write(self, use_case: Callable[[StatementsT], T]) -> T:
        """Run a use case in a write transaction, again if it lost a race.

        Raises:
            ConflictError: it lost every time; the caller may try later.
            UnavailableError: the database does not answer.
        """

        def attempt() -> T:
            with write_transaction(self._engine) as connection:
                return use_case(self._statements(connection))

        for wait_s in CONFLICT_WAITS:
            try:
                return await self.in_thread(attempt)
            except ConflictError as lost:
                log.debug("again: %s", lost)
                await asyncio.sleep(wait_s)
        return await self.in_thread(attempt)

    async def read(self, use_case: Callable[[StatementsT], T]) -> T:
        """Run a use case on one snapshot; errors as in ``write``."""

        def attempt() -> T:
            with read_transaction(self._engine) as connection:
                return use_case(self._statements(connection))

        return await self.in_thread(attempt)

    def wake(self) -> None:
        """Wake all calls that wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    def listen(self) -> asyncio.Event:
        """Return what the next change sets; whatever is read after this call misses no change."""
        return self._changed

    async def woken(self, wait_s: float, heard: asyncio.Event | None = None) -> bool:
        """Wait at most ``wait_s`` until something may have changed since ``heard`` was given."""
        try:
            # wait_for of Python 3.11 loses a cancellation that comes together with the news
            async with asyncio.timeout(wait_s):
                await (heard or self._changed).wait()
        except TimeoutError:
            return False
        return True

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run blocking work in one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
