"""The object tier as users and the clock meet it: policies, pins, reads, the bucket itself.

Asynchronous, beside ``service``, whose transactions it uses. Owns none of what it is given.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from dataclasses import dataclass

from holdfast.core.facts import Retention, Shard
from holdfast.errors import CheckpointError, ExhaustedError, PreconditionError
from holdfast.format.keys import manifest_key, segment_key, sidecar_key
from holdfast.objectstore import ObjectStore
from holdfast_services.kit.queue import Queue
from holdfast_services.metadata.bucket import BucketArchive, Rebuilt
from holdfast_services.metadata.domain.holds import Listed
from holdfast_services.metadata.domain.retention import Verdict
from holdfast_services.metadata.storage.holds import Read, TierCounts
from holdfast_services.metadata.transactor import Service
from holdfast_services.metadata.usecases import users
from holdfast_services.metadata.usecases.users import At

KEEP_S = 2.0
LOOK_AGAIN_S = 60.0
CHECK_S_MAX = 2.0
CHECK_AGAIN_S = 10.0
QUEUE_S_MAX = 2.0
LINKS_COUNT_MAX = 20_000

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoreState:
    """Whether the object store answers; no ``url``: there is none."""

    url: str | None
    ok: bool
    error: str


class Keeper:
    """The use cases of the object tier; ``start`` before, ``stop`` after.

    ``archive`` is for ``service``; None without a store. The queue is asked for figures only.
    """

    def __init__(
        self, service: Service, store: ObjectStore | None = None, queue: Queue | None = None
    ) -> None:
        self._service = service
        self._store = store
        self._queue = queue
        self.archive = BucketArchive(service, store) if store else None
        self._seen: dict[str, tuple[tuple[object, ...], float]] = {}
        self._state = StoreState(store.url if store else None, ok=False, error="not asked yet")
        self._checked_s = 0.0
        self._checking: asyncio.Task[None] | None = None
        self._sweeping: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to expire what policies no longer keep."""
        self._sweeping = asyncio.create_task(self._sweep_for_ever())

    async def stop(self) -> None:
        """End the clock."""
        tasks = [task for task in (self._sweeping, self._checking) if task]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # -- policy --------------------------------------------------------------------------------

    async def verdicts(self, job: str) -> tuple[Verdict, ...]:
        """Return what the job's policy says of each durable checkpoint; changes nothing."""
        return await self._service.read(lambda c: users.verdicts(c, job))

    async def collect(self, job: str) -> tuple[Verdict, ...]:
        """Expire what the policy does not keep; workers delete it."""
        return await self._service.change(lambda c: users.collect(c, job))

    async def policy(self, job: str) -> Retention:
        """Return the job's policy."""
        return await self._service.read(lambda c: users.policy(c, job))

    async def set_policy(self, job: str, wish: Retention) -> Retention:
        """Give the job another policy."""
        return await self._service.change(lambda c: users.set_policy(c, job, wish))

    async def sweep(self) -> int:
        """Expire what policies no longer keep, where something has changed; return how many.

        Ages pass without any change, so each run is looked at every ``LOOK_AGAIN_S`` too.
        """
        policed = await self._service.read(lambda c: c.policed())
        expired, now_s = 0, time.monotonic()
        self._seen = {p.run: self._seen[p.run] for p in policed if p.run in self._seen}
        for one in policed:
            state, at_s = self._seen.get(one.run, ((), 0.0))
            if state == one.state and now_s - at_s < LOOK_AGAIN_S:
                continue
            found = await self.collect(one.job)
            expired += sum(not verdict.keep and not verdict.expired for verdict in found)
            self._seen[one.run] = (one.state, now_s)
        return expired

    async def _sweep_for_ever(self) -> None:
        silent = False
        while True:
            try:
                await self.sweep()
                silent = False
            except CheckpointError as error:
                if not silent:
                    log.warning("retention waits: %s", error)
                silent = True
            except Exception:
                log.exception("retention failed")
            await asyncio.sleep(KEEP_S)

    # -- single checkpoints --------------------------------------------------------------------

    async def pin(self, at: At, note: str) -> Listed:
        """Keep a checkpoint until it is unpinned; see ``users.pin``."""
        return await self._service.change(lambda c: users.pin(c, at, note, self._service.limits))

    async def unpin(self, at: At) -> Listed:
        """Take a user's pin away."""
        return await self._service.change(lambda c: users.unpin(c, at))

    async def remove(self, at: At, *, force: bool) -> Listed:
        """Expire one checkpoint by hand; see ``users.remove``."""
        return await self._service.change(lambda c: users.remove(c, at, force=force))

    async def remove_job(self, job: str) -> int:
        """Remove a whole job; see ``users.remove_job``."""
        return await self._service.change(lambda c: users.remove_job(c, job))

    async def begin_read(self, at: At, holder: str, ttl_s: float) -> Read:
        """Hold a checkpoint for a reader; see ``users.begin_read``."""
        number = secrets.token_hex(16)
        return await self._service.write(
            lambda c: users.begin_read(c, at, number=number, holder=holder, ttl_s=ttl_s)
        )

    async def renew_read(self, number: str, ttl_s: float) -> Read:
        """Let a reader's lease hold longer."""
        return await self._service.write(lambda c: users.renew_read(c, number, ttl_s))

    async def end_read(self, number: str) -> None:
        """End a reader's lease; repeats are harmless."""
        await self._service.write(lambda c: users.end_read(c, number))

    async def scrub(self, job: str) -> int:
        """Ask that all that a job has in the object store is read back; return how many."""
        return await self._service.change(lambda c: users.scrub(c, job))

    # -- the store -----------------------------------------------------------------------------

    async def rebuild(self, job: str | None) -> Rebuilt:
        """Take in what lies in the object store; see ``BucketArchive.rebuild``.

        Raises:
            PreconditionError: there is no object store.
        """
        if self.archive is None:
            raise PreconditionError("the metadata service has no HOLDFAST_STORE")
        return await self.archive.rebuild(job)

    async def store_state(self) -> StoreState:
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

    async def counts(self) -> TierCounts:
        """Return figures of the whole object tier."""
        return await self._service.read(lambda c: c.tier_counts())

    async def queue_waiting(self) -> int | None:
        """Return how many items wait for a worker; None: there is no queue, or no answer."""
        if self._queue is None:
            return None
        try:
            asking = asyncio.to_thread(self._queue.waiting_count)
            return await asyncio.wait_for(asking, QUEUE_S_MAX)
        except (CheckpointError, TimeoutError):
            return None

    async def links(self, at: At, valid_s: int) -> dict[str, str]:
        """Return name -> URL of every object of a checkpoint, readable by anybody so long.

        Raises:
            NotFoundError: no such job or checkpoint.
            PreconditionError: it is not in the object store, or the store has no such links.
            ExhaustedError: there are more than ``LINKS_COUNT_MAX``.
        """
        store = self._store
        if store is None:
            raise PreconditionError("the metadata service has no HOLDFAST_STORE")
        shards = await self._service.read(lambda c: users.shards(c, at))
        keys = [manifest_key(at.job, shards[0].id.checkpoint), *map(_segment, shards)]
        keys += map(_sidecar, shards)
        if len(keys) > LINKS_COUNT_MAX:
            raise ExhaustedError(f"{len(keys)} objects, at most {LINKS_COUNT_MAX} links")
        return await asyncio.to_thread(
            lambda: {key.rpartition("/")[2]: store.presign(key, valid_s) for key in keys}
        )


def _segment(shard: Shard) -> str:
    return segment_key(shard.job, shard.id, shard.world_size)


def _sidecar(shard: Shard) -> str:
    return sidecar_key(shard.job, shard.id, shard.world_size)
