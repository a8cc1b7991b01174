"""The use cases as the edges call them: asynchronous, bounded, redone when a race was lost.

Blocking work runs in a few threads. What this process remembers (decoded inventories, the last
snapshot, who waits) is a hint: any number of processes may serve one catalogue.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

from holdfast.core.attempts import Seat
from holdfast.core.facts import Event, Inventory, NodeView
from holdfast.core.ids import CheckpointId, node_name
from holdfast.core.retry import Backoff, bounded
from holdfast.errors import (
    CheckpointError,
    ConflictError,
    InvalidRequestError,
    UnavailableError,
)
from holdfast.rpc.codec import to_message
from holdfast.v1 import metadata_pb2 as pb
from holdfast_services.kit.db import Engine, read_transaction, write_transaction
from holdfast_services.metadata.batch import Batch
from holdfast_services.metadata.domain.attempts import Registration, check
from holdfast_services.metadata.domain.model import Limits
from holdfast_services.metadata.domain.received import received
from holdfast_services.metadata.domain.start import first_run
from holdfast_services.metadata.domain.view import World, node_view
from holdfast_services.metadata.storage import Catalogue, DecodeCache
from holdfast_services.metadata.usecases import agents as transactions
from holdfast_services.metadata.usecases.agents import Wish
from holdfast_services.metadata.usecases.archive import Archive

THREADS = 4
CONFLICTS = Backoff(first_s=0.01, wait_s_max=0.5, tries_max=8)
TICK_S = 0.5
WATCH_POLL_S = 1.0
WATCH_S_MAX = 60.0
ARCHIVE_S_MAX = 30.0
ARCHIVE_KNOWN_S_MAX = 5.0
"""For a job that the catalogue knows: within the time that an agent waits for a registration."""
EVENTS_PER_CALL_MAX = 100
EVENT_TEXT_LENGTH_MAX = 2000

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Taken:
    """Answer to a report: what its incarnation must exceed, and when its transaction was over."""

    incarnation_min: int
    since_s: float


class Service:
    """The catalogue's use cases; ``start`` before, ``stop`` after. Owns threads, not the engine."""

    def __init__(self, engine: Engine, limits: Limits) -> None:
        self._engine = engine
        self.limits = limits
        self.archive: Archive | None = None
        self._asking: dict[str, asyncio.Task[CheckpointId | None]] = {}
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="holdfast-catalogue")
        self._cache = DecodeCache()
        self._reports: Batch[Inventory, Taken] = Batch(self._report_all)
        self._seats: Batch[Wish, Seat] = Batch(self._register_all)
        self._changed = asyncio.Event()
        self._told_s = 0.0
        self._world: asyncio.Task[World] | None = None
        self._world_s = 0.0
        self._next_world: asyncio.Task[World] | None = None
        self._loading = asyncio.Lock()
        self._ticker: asyncio.Task[None] | None = None
        self.reports_count = 0
        self.report_s_sum = 0.0

    def start(self) -> None:
        """Begin to do what only time brings."""
        self._ticker = asyncio.create_task(self._tick_for_ever())

    async def stop(self) -> None:
        """End the clock and the threads; waits for transactions that run."""
        if self._ticker:
            self._ticker.cancel()
            await asyncio.wait({self._ticker})
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    # -- what agents call ----------------------------------------------------------------------

    async def register(self, wish: Registration) -> Seat:
        """Return run and generation of the attempt that the wish names; idempotent.

        Raises:
            AlreadyExistsError: another launcher's attempt lives; names the holder.
            StaleGenerationError: the attempt was replaced.
            InvalidRequestError: names or numbers that make no sense.
            UnavailableError: the catalogue has no checkpoint of the job, and the object store
                does not say whether it has, or the catalogue was lost meanwhile: that the job
                is new is never guessed.
        """
        check(wish)
        item = Wish(wish, first_run(wish.spec.job))
        if self.archive:
            item = await self._look_up(self.archive, item)
        seat = await self._seats.ask(item)
        self.tell()
        return seat

    async def report(self, inventory: Inventory) -> NodeView:
        """Take a node's inventory and return what the node should know; idempotent."""
        inventory = received(inventory)
        began_s = time.monotonic()
        taken = await self._reports.ask(inventory)
        view = await self._view(inventory.node.node, taken.since_s)
        self.reports_count += 1
        self.report_s_sum += time.monotonic() - began_s
        return replace(view, incarnation_min=taken.incarnation_min)

    async def watch(self, node: str, version: str, wait_s: float) -> NodeView:
        """Return the node's view once its version is not ``version``, or after ``wait_s``."""
        node_name(node)
        ends_s = time.monotonic() + bounded(wait_s, WATCH_S_MAX)
        since_s = None
        while True:
            changed = self._changed
            view = await self._view(node, since_s)
            left_s = ends_s - time.monotonic()
            if view.version != version or left_s <= 0:
                return view
            await _wait(changed, min(left_s, WATCH_POLL_S))
            since_s = self._told_s if changed.is_set() else None

    async def record(self, node: str, events: Sequence[Event]) -> None:
        """Append a node's news, at most ``EVENTS_PER_CALL_MAX``."""
        node_name(node)
        if len(events) > EVENTS_PER_CALL_MAX:
            raise InvalidRequestError(f"{len(events)} events, at most {EVENTS_PER_CALL_MAX}")
        short = [replace(e, message=e.message[:EVENT_TEXT_LENGTH_MAX]) for e in events]
        await self.change(lambda catalogue: transactions.record(catalogue, node, short))

    async def _look_up(self, archive: Archive, item: Wish) -> Wish:
        """Ask the archive once for each attempt: the catalogue may be new, or from a backup.

        Ranks that come at the same time share the question; those that come later have a nonce
        that is known.
        """
        wish = item.registration.spec
        if await self.read(lambda c: transactions.begun(c, wish.job, wish.nonce)):
            return replace(item, begun=True)
        asking = self._asking.get(wish.job)
        if asking is None:
            asking = asyncio.create_task(self._ask(archive, wish.job, trains=wish.generation > 0))
            self._asking[wish.job] = asking
            asking.add_done_callback(lambda _: self._asking.pop(wish.job, None))
        return replace(item, newest=await asyncio.shield(asking))

    async def _ask(self, archive: Archive, job: str, *, trains: bool) -> CheckpointId | None:
        """Return the newest that is known by now.

        A job that trains, or has a checkpoint here, goes on without an answer too (P5).
        """
        newest = await self.read(lambda c: transactions.known(c, job))
        known = trains or newest is not None
        limit_s = ARCHIVE_KNOWN_S_MAX if known else ARCHIVE_S_MAX
        try:
            async with asyncio.timeout(limit_s):
                return await archive.adopt(job)
        except (TimeoutError, CheckpointError) as cause:
            late = f"the object store did not say within {limit_s:.0f} s what it has of {job}"
            reason = cause.message if isinstance(cause, CheckpointError) else late
            if known:
                await self.change(lambda c: transactions.note_unasked(c, job, reason))
                return newest
            if isinstance(cause, CheckpointError):
                raise
            raise UnavailableError(late, job=job) from cause

    # -- transactions --------------------------------------------------------------------------

    async def write(self, use_case: Callable[[Catalogue], T]) -> T:
        """Run a use case in a write transaction, again if it lost a race.

        Raises:
            ConflictError: it lost every time; the caller may try later.
            UnavailableError: the database does not answer.
        """

        def attempt() -> T:
            with write_transaction(self._engine) as connection:
                return use_case(Catalogue(connection, self._cache))

        for wait_s in CONFLICTS.waits():
            try:
                return await self._in_thread(attempt)
            except ConflictError as lost:
                log.debug("again: %s", lost)
                await asyncio.sleep(wait_s)
        return await self._in_thread(attempt)

    async def change(self, use_case: Callable[[Catalogue], T]) -> T:
        """Run a use case as ``write`` does, then tell all who wait for a change."""
        answer = await self.write(use_case)
        self.tell()
        return answer

    async def read(self, use_case: Callable[[Catalogue], T]) -> T:
        """Run a use case on one snapshot; errors as in ``write``."""

        def attempt() -> T:
            with read_transaction(self._engine) as connection:
                return use_case(Catalogue(connection, self._cache))

        return await self._in_thread(attempt)

    async def world(self, since_s: float | None = None) -> World:
        """Return a snapshot begun after ``since_s`` of the loop's clock, or after this call.

        Callers share one: all whom one report wakes, and who reported, wait for the same.
        """
        if since_s is not None and self._world is not None and self._world_s >= since_s:
            return await asyncio.shield(self._world)
        if self._next_world is None:
            self._next_world = asyncio.create_task(self._load_world())
        return await asyncio.shield(self._next_world)

    async def changed(self, wait_s: float) -> None:
        """Wait until something may have changed, at most ``wait_s``."""
        await _wait(self._changed, wait_s)

    async def _load_world(self) -> World:
        async with self._loading:
            # Who asks from here on needs a later snapshot, unless this one is late enough.
            self._world, self._next_world = self._next_world, None
            self._world_s = asyncio.get_running_loop().time()
            return await self.read(lambda c: transactions.snapshot(c, self.limits))

    async def _view(self, node: str, since_s: float | None = None) -> NodeView:
        world = await self.world(since_s)
        return await self._in_thread(lambda: _versioned(node_view(world, node)))

    async def _report_all(self, inventories: Sequence[Inventory]) -> Sequence[Taken]:
        answers, changed = await self.write(
            lambda c: transactions.report(c, inventories, self.limits)
        )
        since_s = asyncio.get_running_loop().time()
        if changed:
            self.tell()
        return [Taken(incarnation_min, since_s) for incarnation_min in answers]

    async def _register_all(self, wishes: Sequence[Wish]) -> Sequence[Seat | CheckpointError]:
        return await self.write(lambda c: transactions.register(c, wishes, self.limits))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def tell(self) -> None:
        """Wake all who wait for a change."""
        self._told_s = asyncio.get_running_loop().time()
        self._changed.set()
        self._changed = asyncio.Event()

    async def _tick_for_ever(self) -> None:
        silent = False
        while True:
            try:
                if await self.write(lambda c: transactions.tick(c, self.limits)):
                    self.tell()
                silent = False
            except CheckpointError as error:
                if not silent:
                    log.warning("catalogue does not answer: %s", error)
                silent = True
            except Exception:
                log.exception("tick failed")
            await asyncio.sleep(TICK_S)


def _versioned(view: NodeView) -> NodeView:
    # Which inventory it knows changes with each heartbeat, and is nothing to act on.
    what = replace(view, taken_incarnation=0, taken_sequence=0)
    body = to_message(what, pb.NodeView).SerializeToString(deterministic=True)
    return replace(view, version=hashlib.blake2b(body, digest_size=8).hexdigest())


async def _wait(event: asyncio.Event, wait_s: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), wait_s)
    except TimeoutError:
        return
