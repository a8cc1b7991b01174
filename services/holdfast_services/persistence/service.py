"""Does an item of the queue: asks what it stands for now, does it, tells metadata and people.

Whatever fails raises; the worker gives the item back. Every kind may be done twice.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from holdfast.core.byte_sizes import format_bytes
from holdfast.core.persistence_work import CheckpointWork, ShardWork, SweepWork, Work
from holdfast.core.queue_items import Item, Kind, text
from holdfast.core.retry import Waits
from holdfast.core.user_events import Event
from holdfast.errors import (
    CheckpointError,
    InvalidRequestError,
    NotFoundError,
    PreconditionError,
    StaleGenerationError,
)
from holdfast.objectstore import ObjectStore
from holdfast.rpc.channel import retrying
from holdfast_services.kit.pace import Pace
from holdfast_services.persistence.clients import MetadataClient
from holdfast_services.persistence.collect import collect
from holdfast_services.persistence.manifest import MissingShardsError, take_back, write_manifest
from holdfast_services.persistence.orphans import sweep
from holdfast_services.persistence.pool import PartPool
from holdfast_services.persistence.scrub import scrub
from holdfast_services.persistence.source import OpenSources
from holdfast_services.persistence.upload import Moved, ShardUpload

EVENT_RANKS_MAX = 8
"""Shards of so many ranks become events: those of 10^4 would push all other news out."""

TELL_WAITS = Waits(first_s=0.2, wait_s_max=2.0, tries_max=4)

log = logging.getLogger(__name__)

T = TypeVar("T")


class PersistService:
    """Does items, several at once from threads of the worker; ``moved`` adds up all shards.

    Args:
        store: The object store.
        metadata: Says what is to be done, hears what was done.
        pool: Moves parts, of all items together.
        persist: Byte rate of what is sent.
        scrub_pace: Byte rate of what is read back for its own sake.
        sources: Gives the copies of a shard.
        sleep: Waits that many seconds.
    """

    def __init__(
        self,
        store: ObjectStore,
        metadata: MetadataClient,
        pool: PartPool,
        persist: Pace,
        scrub_pace: Pace,
        *,
        sources: OpenSources,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store = store
        self._metadata = metadata
        self._pool = pool
        self._persist = persist
        self._scrub = scrub_pace
        self._sources = sources
        self._sleep = sleep
        self.moved = Moved()
        self._whole: Mapping[Kind, Callable[[CheckpointWork, threading.Event], None]] = {
            Kind.MANIFEST: self._manifest,
            Kind.COLLECT: self._collect,
            Kind.SCRUB: self._scrub_checkpoint,
        }

    def plan(self, item: Item) -> Work:
        """Return what ``item`` stands for now.

        Raises:
            NotFoundError: nothing any more.
            UnavailableError: metadata does not answer.
        """
        return self._metadata.plan(text(item))

    def do(self, item: Item, work: Work, stop: threading.Event) -> None:
        """Do what ``work`` asks; ``stop`` ends it early.

        Raises:
            InvalidRequestError: it is not what the item is about.
            CheckpointError: it is not done; nothing half-done can be mistaken for done.
        """
        if item.kind is Kind.SHARD and isinstance(work, ShardWork):
            self._shard(work, stop)
        elif item.kind in self._whole and isinstance(work, CheckpointWork):
            self._whole[item.kind](work, stop)
        elif item.kind is Kind.ORPHANS and isinstance(work, SweepWork):
            self._orphans(work, stop)
        else:
            raise InvalidRequestError(f"{text(item)} was answered with {type(work).__name__}")

    def tell(self, kind: str, message: str, job: str = "", **context: object) -> None:
        """Record an event for people, best effort."""
        event = Event(
            kind=kind,
            severity="warning" if kind.endswith("_failed") else "info",
            message=message,
            job=job,
            context={key: str(value) for key, value in context.items()},
        )
        try:
            self._metadata.record(event)
        except CheckpointError as error:
            log.info("metadata did not take the event %s: %s", kind, error)

    def _shard(self, plan: ShardWork, stop: threading.Event) -> None:
        shard = plan.shard
        key, length = shard.id.key, shard.length_bytes
        told = shard.id.rank < EVENT_RANKS_MAX
        if told:
            self.tell("persist_started", f"{key}: {format_bytes(length)}", plan.job, bytes=length)
        began_s = time.monotonic()
        copies = self._sources(shard, plan.sources, self._pool)
        upload = ShardUpload(self._store, self._pool, self._persist, plan, stop, copies, self.moved)
        upload.run()
        took_s = time.monotonic() - began_s
        missing = self._retrying(lambda: self._metadata.shard_stored(shard))
        summary = _summary(length, took_s, upload.moved)
        log.info("shard %s: %s, %d to come", key, summary, missing)
        if not told:
            return
        self.tell(
            "persisted", f"{key}: {summary}", plan.job,
            bytes=length, seconds=f"{took_s:.3f}", sent_bytes=upload.moved.sent_bytes,
            copied_bytes=upload.moved.copied_bytes, kept_bytes=upload.moved.kept_bytes,
        )  # fmt: skip

    def _manifest(self, plan: CheckpointWork, stop: threading.Event) -> None:
        try:
            digest = write_manifest(self._store, self._pool, plan, stop)
        except MissingShardsError as error:
            # Believed to be there, and not: until somebody says so, they would never go again.
            bad = error.shards
            self._retrying(lambda: self._metadata.scrubbed(plan.checkpoint, bad))
            raise
        try:
            self._retrying(lambda: self._metadata.durable(plan.checkpoint, digest))
        except (NotFoundError, PreconditionError, StaleGenerationError):
            take_back(self._store, self._pool, plan, digest, stop)
            raise
        log.info("%s is durable: %d shards", _name(plan), len(plan.shards))

    def _collect(self, plan: CheckpointWork, stop: threading.Event) -> None:
        freed = collect(self._store, plan.job, plan.checkpoint, stop)
        self._retrying(lambda: self._metadata.collected(plan.checkpoint, freed))
        log.info("%s is collected: %s freed", _name(plan), format_bytes(freed))

    def _scrub_checkpoint(self, plan: CheckpointWork, stop: threading.Event) -> None:
        bad = scrub(
            self._store, plan, self._scrub, stop, check_kept=lambda: self._expect_durable(plan)
        )
        self._retrying(lambda: self._metadata.scrubbed(plan.checkpoint, bad))
        log.info("%s is read back: %d of %d bad", _name(plan), len(bad), len(plan.shards))

    def _orphans(self, plan: SweepWork, stop: threading.Event) -> None:
        is_durable = self._metadata.is_durable
        draining = frozenset(plan.draining)
        swept = sweep(self._store, plan.before_s, draining, stop, durable=is_durable)
        if swept.folders or swept.uploads:
            message = (
                f"{swept.folders} folders, {swept.uploads} uploads, "
                f"{format_bytes(swept.freed_bytes)}"
            )
            self.tell("orphans_deleted", message, bytes=swept.freed_bytes)

    def _expect_durable(self, plan: CheckpointWork) -> None:
        if not self._metadata.is_durable(plan.checkpoint):
            raise NotFoundError(f"{_name(plan)} has expired meanwhile", job=plan.job)

    def _retrying(self, call: Callable[[], T]) -> T:
        """Report what was done: short outages are sat out, the work is not done again for them."""
        return retrying(call, TELL_WAITS, self._sleep)


def _name(plan: CheckpointWork) -> str:
    return f"run {plan.checkpoint.run} step {plan.checkpoint.step}"


def _summary(length_bytes: int, took_s: float, moved: Moved) -> str:
    rate = length_bytes / max(took_s, 1e-9) / 1e6
    parts = (
        ("sent", moved.sent_bytes),
        ("copied", moved.copied_bytes),
        ("kept", moved.kept_bytes),
    )
    how = ", ".join(f"{word} {format_bytes(count)}" for word, count in parts if count)
    return f"{format_bytes(length_bytes)} in {took_s:.2f} s, {rate:.0f} MB/s ({how or 'was there'})"
