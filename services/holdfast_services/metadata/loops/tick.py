"""The clock of the catalogue: every ``TICK_S`` it does what follows from time alone."""

from __future__ import annotations

import asyncio
import logging

from holdfast.errors import CheckpointError
from holdfast_services.metadata.transactor import Transactor
from holdfast_services.metadata.usecases import agents, launches

TICK_S = 0.5
HURRY_S_MIN = 0.05
"""Between two ticks while ranks may wait for their round to end: each change may be the commit."""

log = logging.getLogger(__name__)


class Ticker:
    """Ticks from ``start`` to ``stop``; an outage of the database is logged once."""

    def __init__(self, transactor: Transactor) -> None:
        self._transactor = transactor
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to tick."""
        self._running = asyncio.create_task(self._for_ever())

    async def stop(self) -> None:
        """Stop ticking."""
        if self._running:
            self._running.cancel()
            await asyncio.wait({self._running})

    async def _for_ever(self) -> None:
        transactor, silent = self._transactor, False
        while True:
            hurry, heard = False, transactor.listen()
            try:
                if await transactor.write(lambda c: agents.tick(c, transactor.limits)):
                    transactor.tell()
                    heard = transactor.listen()
                ticked = await transactor.write(lambda c: launches.tick(c, transactor.limits))
                hurry = ticked.hurry
                if ticked.told:
                    transactor.tell()
                    heard = transactor.listen()
                silent = False
            except CheckpointError as error:
                if not silent:
                    log.warning("the catalogue's database does not answer: %s", error)
                silent = True
            except Exception:
                log.exception("tick failed")
            await asyncio.sleep(HURRY_S_MIN if hurry else TICK_S)
            if hurry:
                await transactor.changed(TICK_S - HURRY_S_MIN, heard)
