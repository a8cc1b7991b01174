"""Whether the object store answers, and how long the queue is: asked for people, within bounds."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from holdfast.errors import CheckpointError
from holdfast.objectstore import ObjectStore
from holdfast_services.kit.queue import Queue

CHECK_S_MAX = 2.0
CHECK_AGAIN_S = 10.0
QUEUE_S_MAX = 2.0


@dataclass(frozen=True, slots=True)
class StoreState:
    """Whether the object store answers; without a ``url`` there is no store."""

    url: str | None
    ok: bool
    error: str


class StoreHealth:
    """Remembers the last answer of the store, which it does not own; ``stop`` after."""

    def __init__(self, store: ObjectStore | None) -> None:
        self._store = store
        self._state = StoreState(store.url if store else None, ok=False, error="not asked yet")
        self._checked_s = 0.0
        self._checking: asyncio.Task[None] | None = None

    async def stop(self) -> None:
        """Stop waiting for an answer of the store."""
        if self._checking:
            self._checking.cancel()
            await asyncio.wait({self._checking})

    async def state(self) -> StoreState:
        """Return whether the store answers, as of at most ``CHECK_AGAIN_S`` ago."""
        if self._store is None:
            return self._state
        old = time.monotonic() - self._checked_s > CHECK_AGAIN_S or not self._checked_s
        if old and self._checking is None:
            self._checking = asyncio.create_task(self._check(self._store))
        if self._checking is not None:
            done, _ = await asyncio.wait({self._checking}, timeout=CHECK_S_MAX)
            if not done:
                error = f"no answer within {CHECK_S_MAX:g} s"
                self._state = StoreState(self._store.url, ok=False, error=error)
        return self._state

    async def _check(self, store: ObjectStore) -> None:
        error = ""
        try:
            await asyncio.to_thread(store.check)
        except CheckpointError as cause:
            error = cause.message
        finally:
            self._checked_s, self._checking = time.monotonic(), None
        self._state = StoreState(store.url, not error, error)


async def waiting_count(queue: Queue | None) -> int | None:
    """Return how many items wait for a worker; None: there is no queue, or no answer."""
    if queue is None:
        return None
    try:
        async with asyncio.timeout(QUEUE_S_MAX):
            return await asyncio.to_thread(queue.waiting_count)
    except (CheckpointError, TimeoutError):
        return None
