"""Retention by the clock: expires what policies no longer keep; workers delete it."""

from __future__ import annotations

import asyncio
import logging
import time

from holdfast.errors import CheckpointError
from holdfast_services.metadata.domain.retention import Verdict
from holdfast_services.metadata.transactor import Transactor
from holdfast_services.metadata.usecases import users

SWEEP_S = 2.0
LOOK_AGAIN_S = 60.0

log = logging.getLogger(__name__)


class RetentionLoop:
    """Expires checkpoints from ``start`` to ``stop``; an outage of the database is logged once."""

    def __init__(self, transactor: Transactor) -> None:
        self._transactor = transactor
        self._seen: dict[str, tuple[tuple[object, ...], float]] = {}
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to expire what policies no longer keep."""
        self._running = asyncio.create_task(self._for_ever())

    async def stop(self) -> None:
        """End the loop."""
        if self._running:
            self._running.cancel()
            await asyncio.wait({self._running})

    async def sweep(self) -> int:
        """Expire what policies no longer keep, where something has changed; return how many.

        Ages pass without any change, so each run is looked at every ``LOOK_AGAIN_S`` too.
        """
        policed = await self._transactor.read(lambda c: c.policed())
        expired, now_s = 0, time.monotonic()
        self._seen = {p.run: self._seen[p.run] for p in policed if p.run in self._seen}
        for one in policed:
            state, at_s = self._seen.get(one.run, ((), 0.0))
            if state == one.state and now_s - at_s < LOOK_AGAIN_S:
                continue
            found = await self._expire(one.job)
            expired += sum(not verdict.keep and not verdict.expired for verdict in found)
            self._seen[one.run] = (one.state, now_s)
        return expired

    async def _expire(self, job: str) -> tuple[Verdict, ...]:
        return await self._transactor.change(lambda c: users.expire(c, job))

    async def _for_ever(self) -> None:
        silent = False
        while True:
            try:
                await self.sweep()
                silent = False
            except CheckpointError as error:
                if not silent:
                    log.warning("retention could not be applied and is tried again: %s", error)
                silent = True
            except Exception:
                log.exception("retention failed")
            await asyncio.sleep(SWEEP_S)
