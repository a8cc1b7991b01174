"""Adds the checkpoints of the object store to the catalogue: of a new job, or after a loss.

The bucket is read in threads, within a deadline; what is malformed there is passed over and said.
Nothing is known of a store that does not answer, so then nothing is decided either.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from holdfast.bucket.listing import folders, places, runs_of
from holdfast.core.ids import CheckpointId, job_name
from holdfast.core.user_events import Event
from holdfast.errors import (
    AccessError,
    CheckpointError,
    ConflictError,
    CorruptionError,
    ExhaustedError,
    ManifestError,
    NotFoundError,
    PreconditionError,
    UnavailableError,
    UnsupportedFormatError,
)
from holdfast.format.digest import part_digest
from holdfast.format.keys import Place, manifest_key
from holdfast.format.manifest import MANIFEST_BYTES_MAX, Manifest, decode
from holdfast.format.rollback import Rollback
from holdfast.objectstore import ObjectStore
from holdfast_services.metadata.calls import rollback_records
from holdfast_services.metadata.domain.attempt_start import first_run
from holdfast_services.metadata.domain.model import Stored
from holdfast_services.metadata.domain.rows_from_manifests import adopt, choose_run
from holdfast_services.metadata.storage import Catalogue
from holdfast_services.metadata.transactor import Transactor

REBUILD_S_MAX = 600.0
MANIFESTS_PER_JOB_MAX = 100_000
READERS_COUNT = 16
REASONS_IN_EVENTS_MAX = 20

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Known:
    """A job's run in the catalogue, and what of it the bucket can say nothing new of.

    ``stored`` are checkpoints, ``rollbacks`` the generations of rollbacks.
    """

    run: str
    stored: frozenset[CheckpointId]
    rollbacks: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Found:
    """A manifest read from the bucket and the digest of its bytes."""

    manifest: Manifest
    digest: bytes


@dataclass(frozen=True, slots=True)
class Skipped:
    """An object that should be a manifest and was not taken, and why."""

    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class Reading:
    """What the bucket has of a job; ``generations`` has the newest of each run's names."""

    found: tuple[Found, ...]
    skipped: tuple[Skipped, ...]
    generations: Mapping[str, int] = field(default_factory=dict)
    rollbacks: tuple[Rollback, ...] = ()


@dataclass(frozen=True, slots=True)
class Written:
    """What was new in a reading; ``known``: the job was not new, so workers may be collecting."""

    found: tuple[Found, ...] = ()
    known: bool = False


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """The result of a rebuild: jobs and checkpoints that are new, and what was passed over.

    ``unreadable``: there was something, and all of it was passed over. ``newest``: of a single
    job, what it has by now, new here or not.
    """

    jobs: int = 0
    checkpoints: int = 0
    newest: CheckpointId | None = None
    skipped: tuple[Skipped, ...] = ()
    unreadable: bool = False


class BucketArchive:
    """The ``Archive`` that is an object store. Owns neither the transactor nor the store."""

    def __init__(self, transactor: Transactor, store: ObjectStore) -> None:
        self._transactor = transactor
        self.store = store

    async def adopt(self, job: str) -> CheckpointId | None:
        """Add every checkpoint of ``job`` in the bucket to the catalogue; idempotent.

        Of a run that the catalogue has checkpoints of, only what it does not know is read.

        Returns:
            The newest that the catalogue knows of the bucket by now.

        Raises:
            UnavailableError: the store cannot be asked, so nobody knows whether the job is new.
            PreconditionError: what lies there is another job's run here, or none of it can be
                read: that is no fresh start either.
        """
        here = await self._transactor.read(lambda c: known(c, job_name(job)))
        try:
            taken = await self._take(job, here)
        except (AccessError, NotFoundError) as cause:
            raise UnavailableError(
                f"the object store cannot tell whether {job} has checkpoints: {cause.message}",
                job=job,
            ) from cause
        if taken.unreadable and not here:
            first = taken.skipped[0]
            raise PreconditionError(
                f"no checkpoint of {job} in the object store can be read, {first.key}: "
                f"{first.reason}; upgrade if a newer version wrote it, else move it away",
                job=job,
            )
        try:
            await rollback_records.write_owed(self._transactor, self.store, job)
        except (TimeoutError, CheckpointError) as error:
            log.warning("a rollback of %s is not recorded in the object store yet: %s", job, error)
        return taken.newest

    async def rebuild(self, job: str | None) -> Rebuilt:
        """Add the checkpoints of one job, or of all jobs in the bucket; idempotent.

        Raises:
            UnavailableError: the store does not answer, or there is too much for one call; what
                was taken in stays.
            AccessError, NotFoundError: the store itself.
        """
        total = Rebuilt()
        try:
            async with asyncio.timeout(REBUILD_S_MAX) as bound:
                for name in [job_name(job)] if job else await _in_thread(self._jobs):
                    total = _sum(total, await self._take_or_skip(name))
        except TimeoutError as cause:
            if not bound.expired():
                raise
            text = (
                f"{total.jobs} jobs were added within {REBUILD_S_MAX:.0f} s: repeat for the others"
            )
            raise UnavailableError(text) from cause
        return total

    async def _take_or_skip(self, job: str) -> Rebuilt:
        """One job that cannot be taken in costs no other."""
        try:
            return await self._take(job)
        except PreconditionError as error:
            return Rebuilt(skipped=(Skipped(f"{job}/", error.message),))

    def _jobs(self, stop: threading.Event) -> Sequence[str]:
        return sorted({place.job for place in _until(stop, places(self.store))})

    async def _take(self, job: str, here: Known | None = None) -> Rebuilt:
        reading = await _in_thread(lambda stop: read(self.store, job, stop, here))
        written = await self._transactor.change(lambda c: write(c, job, reading))
        gone = await self._take_back(job, written.found) if written.known else ()
        keys = {item.manifest.checkpoint for item in written.found}.difference(gone)
        return Rebuilt(
            jobs=int(len(keys) > 0),
            checkpoints=len(keys),
            newest=max({*keys, *(here.stored if here else ())}, default=None),
            skipped=reading.skipped,
            unreadable=bool(reading.skipped) and not reading.found,
        )

    async def _take_back(self, job: str, written: Sequence[Found]) -> Sequence[CheckpointId]:
        """Forget what was collected between the reading and the writing; return which."""
        if not written:
            return ()

        def listed(stop: threading.Event) -> set[Place]:
            return set(_until(stop, places(self.store, job)))

        there = await _in_thread(listed)
        keys = [item.manifest.checkpoint for item in written]
        gone = [key for key in keys if Place(job, key) not in there]
        if gone:
            await self._transactor.change(lambda c: forget(c, job, gone))
        return gone


def _sum(one: Rebuilt, other: Rebuilt) -> Rebuilt:
    return Rebuilt(
        jobs=one.jobs + other.jobs,
        checkpoints=one.checkpoints + other.checkpoints,
        skipped=(*one.skipped, *other.skipped),
    )


def known(catalogue: Catalogue, job: str) -> Known | None:
    """Return what the catalogue has of a job; None: no checkpoint."""
    run = catalogue.run_of(job)
    if run is None or not catalogue.newest_key(run):
        return None
    rolled_back = frozenset(rollback.generation for rollback in catalogue.rollbacks(run))
    return Known(run, frozenset(catalogue.stored_keys(run)), rolled_back)


def read(store: ObjectStore, job: str, stop: threading.Event, here: Known | None = None) -> Reading:
    """Return every manifest of ``job``; blocking, with ``READERS_COUNT`` reads side by side.

    With ``here``, those of that run alone, and none that is known.

    Raises:
        UnavailableError: the store, or ``stop`` was set.
        ExhaustedError: more than ``MANIFESTS_PER_JOB_MAX``.
        AccessError, NotFoundError: the store itself.
    """
    # Whether a folder has a manifest is seen when it is read: asked beforehand, one by one, a
    # long run would take longer to list than a registration waits.
    listed = list(islice(_until(stop, folders(store, job)), MANIFESTS_PER_JOB_MAX + 1))
    if len(listed) > MANIFESTS_PER_JOB_MAX:
        raise ExhaustedError(f"more than {MANIFESTS_PER_JOB_MAX} checkpoints in the store", job=job)
    if here:
        listed = [place for place in listed if place.checkpoint.run == here.run]
    wanted = [place for place in listed if not here or place.checkpoint not in here.stored]
    with ThreadPoolExecutor(READERS_COUNT, "holdfast-adoption") as pool:
        try:
            results = list(pool.map(lambda place: _read_one(store, place, stop), wanted))
        finally:
            pool.shutdown(cancel_futures=True)
    found = tuple(item for item in results if isinstance(item, Found))
    asked = [here.run] if here else sorted(runs_of(store, job))
    rollbacks, unread = rollback_records.read(
        store, job, asked, here.rollbacks if here else frozenset()
    )
    generations: dict[str, int] = {}
    named = [(str(place.checkpoint.run), place.checkpoint.generation) for place in listed]
    for run, generation in (*named, *((str(one.to.run), one.generation) for one in rollbacks)):
        generations[run] = max(generations.get(run, 0), generation)
    skipped = [item for item in results if isinstance(item, Skipped)]
    skipped += [Skipped(key, reason) for key, reason in unread]
    return Reading(found, tuple(skipped), generations, rollbacks)


def _read_one(store: ObjectStore, place: Place, stop: threading.Event) -> Found | Skipped | None:
    """Return the manifest, or why it is none; None: it has none, or not any more."""
    if stop.is_set():
        raise UnavailableError("reading manifests was stopped", job=place.job)
    key = manifest_key(place.job, place.checkpoint)
    try:
        data = store.get(key, length_bytes_max=MANIFEST_BYTES_MAX)
        manifest = decode(data)
        if (manifest.job, manifest.checkpoint) != (place.job, place.checkpoint):
            raise ManifestError(f"the manifest is of job {manifest.job}, {manifest.checkpoint}")
    except NotFoundError:
        return None
    except (CorruptionError, UnsupportedFormatError) as error:
        return Skipped(key, error.message)
    return Found(manifest, part_digest(data))


def write(catalogue: Catalogue, job: str, reading: Reading) -> Written:
    """Write what was read and is not known; return that. Nothing is written for an empty bucket.

    A job that is not known begins with the run that the bucket has. Its generations go above
    those of all its folders: what is half-written, or was passed over, is not written into (P2).

    Raises:
        PreconditionError: the run is another job's here, or nobody can read where it was rolled
            back to.
    """
    now_s = catalogue.now_s()
    known = catalogue.lock_job(job)
    found = {item.manifest.checkpoint: item for item in reading.found}
    manifests = [item.manifest for item in reading.found]
    chosen = choose_run(manifests, [known] if known else [first_run(job)])
    events = [_skipped(job, item) for item in reading.skipped[:REASONS_IN_EVENTS_MAX]]
    catalogue.add_events(events, "", now_s)
    if known and chosen not in (None, known):
        catalogue.add_events([_other_run(job, known, manifests)], "", now_s)
        return Written()
    chosen = chosen or known or first_run(job)
    newest = reading.generations.get(chosen, 0)
    if not manifests and not newest:
        return Written()
    if known is None:
        catalogue.add_job(job, chosen, now_s)
        catalogue.lock_job(job)
    run = catalogue.load_run(chosen)
    if run is None:
        raise ConflictError(f"{job} has another run by now than {chosen}", job=job)
    if run.job != job:
        raise PreconditionError(
            f"run {chosen} is that of {job} in the object store, but of {run.job} here: copy it "
            f"with `holdfast import --job NAME`",
            job=job,
        )
    rollback_records.expect_readable(
        run, [item.key for item in reading.skipped], max(run.generation, newest)
    )
    mine = [m for m in manifests if m.checkpoint.run == chosen]
    rollbacks = [one for one in reading.rollbacks if one.to.run == chosen]
    rows = catalogue.checkpoints(chosen)
    drained = {row.id: catalogue.drained_shards(row.id) for row in rows if row.draining}
    adopted = adopt(
        run, rows, mine, now_s, drained=drained, generation_min=newest, rollbacks=rollbacks
    )
    catalogue.save_run(run, adopted.run)
    catalogue.put_checkpoints(adopted.rows)
    _put_history(catalogue, mine, rollbacks)
    written = tuple(found[row.id] for row in adopted.rows)
    for item in written:
        stored = Stored(checkpoint=item.manifest.checkpoint, shards=item.manifest.shards)
        catalogue.put_object(stored, manifest_digest=item.digest, verified_at_s=None)
    if written:
        runs = len({manifest.checkpoint.run for manifest in manifests})
        catalogue.add_events([_adopted(job, chosen, written, runs)], "", now_s)
    return Written(written, known is not None)


def _put_history(
    catalogue: Catalogue, manifests: Sequence[Manifest], rollbacks: Sequence[Rollback]
) -> None:
    """Write what people are told of how the run came here."""
    said = {made.checkpoint.generation: made for made in manifests if made.origin}
    for made in said.values():
        assert made.origin is not None
        catalogue.put_found(made.checkpoint, made.origin, made.parent)
    for rollback in rollbacks:
        catalogue.put_rollback(rollback_records.row_of(rollback))


def forget(catalogue: Catalogue, job: str, gone: Sequence[CheckpointId]) -> None:
    """Delete what was adopted and is not in the object store after all."""
    catalogue.lock_job(job)
    now_s = catalogue.now_s()
    for key in gone:
        catalogue.expire(key, now_s)
        catalogue.forget_object(key, keep_row=False)


def _adopted(job: str, run: str, written: Sequence[Found], runs: int) -> Event:
    steps = [item.manifest.checkpoint.step for item in written]
    choice = f"run {run}" if runs == 1 else f"run {run}, one of {runs} in the bucket"
    return Event(
        kind="checkpoints_adopted",
        severity="info",
        message=f"{len(steps)} checkpoints of {job} found in the object store, "
        f"steps {min(steps)} to {max(steps)} of {choice}",
        job=job,
        context={"run": run, "checkpoints": str(len(steps))},
    )


def _other_run(job: str, known: str | None, manifests: Sequence[Manifest]) -> Event:
    runs = sorted({manifest.checkpoint.run for manifest in manifests})
    return Event(
        kind="import_skipped",
        severity="warning",
        message=f"the object store has runs {', '.join(runs[:8])} of {job}, but the job's run is "
        f"{known} here: checkpoints of the other runs were not added",
        job=job,
        context={"run": known or ""},
    )


def _skipped(job: str, item: Skipped) -> Event:
    return Event(
        kind="import_skipped",
        severity="warning",
        message=f"{item.key} is not a usable manifest and was ignored: {item.reason}",
        job=job,
        context={"key": item.key, "reason": item.reason},
    )


def _until(stop: threading.Event, found: Iterator[T]) -> Iterator[T]:
    for item in found:
        if stop.is_set():
            raise UnavailableError("listing the object store was stopped")
        yield item


async def _in_thread(work: Callable[[threading.Event], T]) -> T:
    """Return what ``work`` gives; when this is cancelled, its thread is told to stop."""
    stop = threading.Event()
    try:
        return await asyncio.to_thread(work, stop)
    finally:
        stop.set()
