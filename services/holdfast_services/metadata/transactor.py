"""Runs use cases in transactions, redone when a race was lost; tells who waits; shares snapshots.

Blocking work runs in a few threads. What this process remembers (decoded rows, the last snapshot,
who waits) is a hint: any number of processes may serve one catalogue. Knows no use case but the
snapshot that all of them share.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import TypeVar

from holdfast_services.kit.db import Engine
from holdfast_services.kit.transactions import Transactions
from holdfast_services.metadata.domain.model import Limits, Run
from holdfast_services.metadata.domain.node_view import World
from holdfast_services.metadata.histograms import Histograms
from holdfast_services.metadata.storage import Catalogue, DecodeCache
from holdfast_services.metadata.usecases.agents import snapshot

THREADS = 4
ENDED_S_MAX = 10.0
"""How long what was read of jobs that have ended is taken to be so, if no change is told: another
metadata process may have changed it."""

T = TypeVar("T")

Changed = Callable[[Run, Run], None]


class Transactor(Transactions[Catalogue]):
    """The way to the catalogue for loops and edges; ``stop`` after. Owns threads, not the engine.

    ``limits`` are those of every rule that this process runs. ``on_change`` is told of each run
    that a use case has changed, before and after.
    """

    def __init__(self, engine: Engine, limits: Limits) -> None:
        cache = DecodeCache()
        super().__init__(
            engine, lambda c: Catalogue(c, cache), threads=THREADS, name="holdfast-catalogue"
        )
        self.limits = limits
        self.histograms = Histograms()
        self.on_change: Changed = lambda *_: None
        self._told_s = 0.0
        self._world: asyncio.Task[World] | None = None
        self._world_s = 0.0
        self._next_world: asyncio.Task[World] | None = None
        self._loading = asyncio.Lock()
        self._ended: dict[str, Run] = {}
        self._ended_s = 0.0

    async def write(self, use_case: Callable[[Catalogue], T]) -> T:
        """Run a use case as ``Transactions.write`` does; what it has changed is counted after."""
        answer, changes = await super().write(lambda c: (use_case(c), c.changes))
        for before, after in changes:
            self.histograms.saved(before, after)
            self.on_change(before, after)
        return answer

    async def change(self, use_case: Callable[[Catalogue], T]) -> T:
        """Run a use case as ``write`` does, then wake all calls that wait for a change."""
        answer = await self.write(use_case)
        self.tell()
        return answer

    async def world(self, since_s: float | None = None) -> World:
        """Return a snapshot begun after ``since_s`` of the loop's clock, or after this call.

        Callers share one: all whom one report wakes, and who reported, wait for the same.
        """
        if since_s is not None and self._world is not None and self._world_s >= since_s:
            return await asyncio.shield(self._world)
        if self._next_world is None:
            self._next_world = asyncio.create_task(self._load_world())
        return await asyncio.shield(self._next_world)

    def tell(self, runs: Collection[str] | None = None) -> None:
        """Wake all calls that wait for a change: of ``runs``, or None of any."""
        self._told_s = asyncio.get_running_loop().time()
        # Another one: what is read now goes into that from before the change.
        known = self._ended if runs is not None else {}
        self._ended = {name: run for name, run in known.items() if name not in (runs or ())}
        self.wake()

    async def changed(self, wait_s: float, heard: asyncio.Event | None = None) -> float | None:
        """Wait at most ``wait_s`` until something may have changed since ``heard`` was given.

        Returns:
            When that was, by the loop's clock; None: nothing was told in time.
        """
        return self._told_s if await self.woken(wait_s, heard) else None

    async def _load_world(self) -> World:
        async with self._loading:
            # Who asks from here on needs a later snapshot, unless this one is late enough.
            self._world, self._next_world = self._next_world, None
            self._world_s = asyncio.get_running_loop().time()
            if self._world_s - self._ended_s > ENDED_S_MAX:
                self._ended, self._ended_s = {}, self._world_s
            ended = self._ended
            return await self.read(lambda c: snapshot(c, self.limits, ended))
