"""Ranks register: the store is asked what it has of the job, then many are seated at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from holdfast.core.attempts import Seat
from holdfast.core.ids import CheckpointId
from holdfast.errors import CheckpointError, UnavailableError
from holdfast_services.metadata.calls.batch import Batch
from holdfast_services.metadata.domain.attempt_start import first_run
from holdfast_services.metadata.domain.attempts import Registration, check
from holdfast_services.metadata.transactor import Transactor
from holdfast_services.metadata.usecases import agents
from holdfast_services.metadata.usecases.agents import SeatWish

ARCHIVE_S_MAX = 30.0
ARCHIVE_KNOWN_S_MAX = 5.0
"""For a job that the catalogue knows: within the time that an agent waits for a registration."""


class Archive(Protocol):
    """The object store as a source of checkpoints that this catalogue does not know."""

    async def adopt(self, job: str) -> CheckpointId | None:
        """Add every checkpoint of ``job`` in the bucket to the catalogue; idempotent.

        Returns:
            The newest of them; None: there is none. Who begins an attempt on the strength of this
            asks for its row first, for the catalogue may have been lost since.

        Raises:
            UnavailableError: the store cannot be asked, so nobody knows whether the job is new.
        """
        ...


class Registrations:
    """Registers ranks. Owns neither transactor nor archive; None: there is no object store."""

    def __init__(self, transactor: Transactor, archive: Archive | None) -> None:
        self._transactor = transactor
        self._archive = archive
        self._asking: dict[str, asyncio.Task[CheckpointId | None]] = {}
        self._batch: Batch[SeatWish, Seat] = Batch(self._seat)

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
        item = SeatWish(wish, first_run(wish.spec.job))
        if self._archive:
            item = await self._look_up(self._archive, item)
        seat = await self._batch.ask(item)
        self._transactor.tell()
        return seat

    async def _look_up(self, archive: Archive, item: SeatWish) -> SeatWish:
        """Ask the archive once for each attempt: the catalogue may be new, or from a backup.

        Ranks that come at the same time share the question; those that come later have a nonce
        that is known.
        """
        wish = item.registration.spec
        if await self._transactor.read(lambda c: agents.begun(c, wish.job, wish.nonce)):
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
        newest = await self._transactor.read(lambda c: agents.known(c, job))
        known = trains or newest is not None
        limit_s = ARCHIVE_KNOWN_S_MAX if known else ARCHIVE_S_MAX
        try:
            async with asyncio.timeout(limit_s):
                return await archive.adopt(job)
        except (TimeoutError, CheckpointError) as cause:
            late = f"the object store did not list the checkpoints of {job} within {limit_s:.0f} s"
            reason = cause.message if isinstance(cause, CheckpointError) else late
            if known:
                await self._transactor.change(lambda c: agents.note_unasked(c, job, reason))
                return newest
            if isinstance(cause, CheckpointError):
                raise
            raise UnavailableError(late, job=job) from cause

    async def _seat(self, wishes: Sequence[SeatWish]) -> Sequence[Seat | CheckpointError]:
        limits = self._transactor.limits
        return await self._transactor.write(lambda c: agents.register(c, wishes, limits))
