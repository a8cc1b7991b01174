"""Turns: one after the other, when there is news and every so often."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from holdfast.errors import CheckpointError

BETWEEN_S = 0.05
"""Between two turns: news come in flocks."""
RETRY_S = 1.0

log = logging.getLogger(__name__)


class Turns:
    """Runs turns again and again, one every ``every_s`` at least; ``wake`` when there is news."""

    def __init__(self, name: str, every_s: float) -> None:
        self._name = name
        self._every_s = every_s
        self._news = asyncio.Event()
        self._said = ""
        self.well = asyncio.Event()
        """Set once a turn has ended well."""

    def wake(self) -> None:
        """Have a turn come now."""
        self._news.set()

    async def run(self, turn: Callable[[], Awaitable[None]]) -> None:
        """Run until cancelled; what a turn raises is logged, and the next one comes sooner."""
        while True:
            self._news.clear()
            wait_s = self._every_s if await self._once(turn) else RETRY_S
            await asyncio.sleep(BETWEEN_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._news.wait()

    async def _once(self, turn: Callable[[], Awaitable[None]]) -> bool:
        try:
            await turn()
        except CheckpointError as error:
            if str(error) != self._said:
                log.warning("%s: %s", self._name, error)
            self._said = str(error)
            return False
        except Exception:
            log.exception("%s: a turn has failed", self._name)
            return False
        self._said = ""
        self.well.set()
        return True
