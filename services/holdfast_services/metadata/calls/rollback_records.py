"""The records of rollbacks in the object store: written once each, read by who knows no better.

A rollback counts from the transaction that made it. Its record is for a catalogue that is lost
before anything which was saved since lies in the store.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Sequence

from holdfast.bucket.listing import rollbacks
from holdfast.errors import (
    AlreadyExistsError,
    ConflictError,
    CorruptionError,
    ManifestError,
    NotFoundError,
    OutcomeUnknownError,
    PreconditionError,
    UnavailableError,
    UnsupportedFormatError,
)
from holdfast.format import rollback as records
from holdfast.format.keys import parse_rollback, rollback_key
from holdfast.format.rollback import ROLLBACK_BYTES_MAX
from holdfast.objectstore import ObjectStore
from holdfast_services.metadata.domain.model import Run
from holdfast_services.metadata.domain.rollback import Rollback
from holdfast_services.metadata.transactor import Transactor

WRITE_S_MAX = 30.0

log = logging.getLogger(__name__)


def read(
    store: ObjectStore, job: str, runs: Sequence[str], known: Collection[int]
) -> tuple[tuple[records.Rollback, ...], tuple[tuple[str, str], ...]]:
    """Return the records of ``runs`` whose generation is not known, and what is none, and why.

    Blocking; one listing per run.

    Raises:
        UnavailableError, AccessError: the store itself.
    """
    found, unread = [], []
    for run in runs:
        for key in rollbacks(store, job, run):
            if parse_rollback(key) in known:
                continue
            try:
                found.append(_read_one(store, job, run, key))
            except NotFoundError:
                continue
            except (CorruptionError, UnsupportedFormatError) as error:
                unread.append((key, error.message))
    return tuple(found), tuple(unread)


def _read_one(store: ObjectStore, job: str, run: str, key: str) -> records.Rollback:
    record = records.decode(store.get(key, length_bytes_max=ROLLBACK_BYTES_MAX))
    if (record.job, record.to.run, record.generation) != (job, run, parse_rollback(key)):
        raise ManifestError(f"the record is of job {record.job}, generation {record.generation}")
    return record


def expect_readable(run: Run, unread: Iterable[str], generation: int) -> None:
    """Do nothing unless one of the objects ``unread`` is the last word about ``run``.

    Args:
        run: Whose object store is looked into.
        unread: Keys of objects there that cannot be read.
        generation: The newest that is known of the run: what was rolled back before it follows
            from what was begun since.

    Raises:
        PreconditionError: the run was rolled back, and nobody knows where to.
    """
    for key in unread:
        of = parse_rollback(key)
        if of is not None and of > generation and key == rollback_key(run.job, run.id, of):
            raise PreconditionError(
                f"{run.job} was rolled back, and {key} cannot be read, which says where to: move "
                f"it away, and roll back again",
                job=run.job,
            )


def row_of(record: records.Rollback) -> Rollback:
    """Return the row of a rollback that was read from its record."""
    return Rollback(
        to=record.to,
        generation=record.generation,
        at_s=record.created_at_s,
        holder=record.holder,
        reason=record.reason,
        recorded=True,
    )


async def write_owed(transactor: Transactor, store: ObjectStore, job: str) -> None:
    """Write the records of a job's rollbacks that the store has none of; idempotent.

    Raises:
        ConflictError: the store has another rollback of that generation.
        UnavailableError: not all could be written; what was stays.
        AccessError: the store.
    """
    run = await transactor.read(lambda c: c.run_of(job))
    owed = await transactor.read(lambda c: c.unrecorded_rollbacks(run)) if run else ()
    for rollback in owed:
        async with asyncio.timeout(WRITE_S_MAX):
            await asyncio.to_thread(write, store, job, rollback)
        of = (rollback.to.run, rollback.generation)
        await transactor.change(lambda c, of=of: c.note_recorded(*of))  # type: ignore[misc]


def write(store: ObjectStore, job: str, rollback: Rollback) -> None:
    """Write the record of one rollback, or find that it is there; blocking.

    Raises:
        ConflictError: another rollback of that generation is there.
        UnavailableError: nobody knows whether it was written; try again.
        AccessError: the store.
    """
    mine = records.Rollback(
        job=job,
        to=rollback.to,
        generation=rollback.generation,
        created_at_s=rollback.at_s,
        holder=rollback.holder,
        reason=rollback.reason,
    )
    key, data = rollback_key(job, rollback.to.run, rollback.generation), records.encode(mine)
    try:
        store.put(key, data, if_absent=True)
    except (AlreadyExistsError, OutcomeUnknownError) as cause:
        try:
            there = records.decode(store.get(key, length_bytes_max=ROLLBACK_BYTES_MAX))
        except NotFoundError:
            text = f"the store did not tell whether {key} was written: try again"
            raise UnavailableError(text) from cause
        except CorruptionError:
            log.warning("%s cannot be read by anybody and is written again", key)
            store.put(key, data)
            return
        if there.to != mine.to:
            raise ConflictError(
                f"{key} says that {job} was rolled back to step {there.to.step}: another "
                f"cluster uses this store; `holdfast doctor --rebuild --job {job}` takes that in",
                job=job,
            ) from cause
