"""Keeps metadata informed: the inventory on change and as heartbeat, the watch beside it.

Without metadata everything local goes on; the next inventory says all there is to say.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import replace
from typing import Protocol

from holdfast.core.inventory import Inventory
from holdfast.core.node_view import NodeView
from holdfast.core.retry import Waits
from holdfast.core.text import tellable
from holdfast.core.user_events import EVENTS_PER_CALL_MAX, Event
from holdfast.errors import CheckpointError
from holdfast_services.agent.clients import MetadataClient

HEARTBEAT_S = 1.0
COALESCE_S = 0.005
PROGRESS_S = 0.2
"""How long the progress of training is held back: else each step of each rank is a report."""
WATCH_S = 20.0
REPORT_WAITS = Waits(first_s=0.2, wait_s_max=2.0)
EVENTS_COUNT_MAX = 256
LEAVE_S_MAX = 2.0

log = logging.getLogger(__name__)


class Reported(Protocol):
    """What the reporter needs of the agent."""

    def inventory(self, *, incarnation: int, sequence: int, leaving: bool) -> Inventory:
        """Return all that this agent holds."""
        ...

    @property
    def view_version(self) -> str:
        """The version of the last view, empty before the first."""
        ...

    def view_arrived(self, view: NodeView) -> None:
        """Take the view that metadata answered."""
        ...

    def metadata_lost(self, reason: str) -> None:
        """Record that metadata does not answer."""
        ...


class Reporter:
    """Runs three loops; ``poke`` says that the inventory has changed, ``tell`` queues an event.

    ``reports_count`` are reports that were begun, ``failures_count`` those that got no answer.
    """

    def __init__(self, node: str, client: MetadataClient, agent: Reported) -> None:
        self._node = node
        self._client = client
        self._agent = agent
        self._incarnation = time.time_ns()
        self._sequence = 0
        self.reports_count = 0
        self.failures_count = 0
        self._dirty = asyncio.Event()
        self._progress: asyncio.TimerHandle | None = None
        self._reached = asyncio.Event()
        self._events: deque[Event] = deque(maxlen=EVENTS_COUNT_MAX)
        self._eventful = asyncio.Event()

    @property
    def events_count(self) -> int:
        """How many events nobody was told of yet."""
        return len(self._events)

    def poke(self, pressing: bool) -> None:
        """Report a changed inventory, at once or together with what else changes soon."""
        if pressing:
            self._dirty.set()
        elif self._progress is None:
            self._progress = asyncio.get_running_loop().call_later(PROGRESS_S, self._dirty.set)

    def tell(self, event: Event) -> None:
        """Queue news for people; the oldest is dropped when there are too many."""
        log.log(_LEVELS.get(event.severity, logging.INFO), "%s: %s", event.kind, event.message)
        self._events.append(replace(event, message=tellable(event.message)))
        self._eventful.set()

    async def run(self) -> None:
        """Report, watch and record until cancelled."""
        await asyncio.gather(self._report_loop(), self._watch_loop(), self._record_loop())

    async def leave(self) -> None:
        """Send the last inventory: this node's lease ends now."""
        try:
            await self._client.report(self._next(leaving=True), timeout_s=LEAVE_S_MAX)
        except CheckpointError as error:
            log.info("could not say goodbye: %s", error)

    def _next(self, *, leaving: bool = False) -> Inventory:
        self._sequence += 1
        return self._agent.inventory(
            incarnation=self._incarnation, sequence=self._sequence, leaving=leaving
        )

    async def _report_loop(self) -> None:
        wait_s = HEARTBEAT_S
        failures = 0
        while True:
            await _wait(self._dirty, wait_s)
            await asyncio.sleep(COALESCE_S)
            self._dirty.clear()
            if self._progress:
                self._progress.cancel()
                self._progress = None
            self.reports_count += 1
            try:
                view = await self._client.report(self._next())
            except CheckpointError as error:
                failures += 1
                self.failures_count += 1
                self._reached.clear()
                self._agent.metadata_lost(
                    f"metadata service {self._client.address} does not answer ({error.message}); "
                    f"protection stands at the last commit"
                )
                await asyncio.sleep(REPORT_WAITS.wait_s(failures))
                wait_s = 0.0  # it has rested: a new catalogue listens for as long as that, no more
                continue
            failures, wait_s = 0, HEARTBEAT_S
            self._accept(view)

    def _accept(self, view: NodeView) -> None:
        if view.incarnation_min > self._incarnation:
            self._incarnation = max(view.incarnation_min, time.time_ns())
            self._dirty.set()
            return
        self._reached.set()
        self._agent.view_arrived(view)

    async def _watch_loop(self) -> None:
        while True:
            await self._reached.wait()
            version = self._agent.view_version
            try:
                view = await self._client.watch(self._node, version, wait_s=WATCH_S)
            except CheckpointError as error:
                log.debug("watch: %s", error)
                await asyncio.sleep(HEARTBEAT_S)
                continue
            if view.version == version:
                continue
            if not view.incarnation_min:
                self._agent.view_arrived(view)
            if self._agent.view_version == version:
                await asyncio.sleep(HEARTBEAT_S)  # refused as old: the next report comes first

    async def _record_loop(self) -> None:
        while True:
            await self._eventful.wait()
            await self._reached.wait()
            self._eventful.clear()
            count = min(len(self._events), EVENTS_PER_CALL_MAX)
            events = [self._events.popleft() for _ in range(count)]
            try:
                await self._client.record(self._node, tuple(events))
            except CheckpointError as error:
                log.debug("%d events not recorded: %s", len(events), error)
                later = tuple(self._events)
                self._events.clear()
                self._events.extend((*events, *later))  # of too many, the oldest go
                await asyncio.sleep(HEARTBEAT_S)
            if self._events:
                self._eventful.set()


_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


async def _wait(event: asyncio.Event, wait_s: float) -> None:
    try:
        async with asyncio.timeout(wait_s):
            await event.wait()
    except TimeoutError:
        return
