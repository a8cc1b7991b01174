"""Which checkpoints an object store holds, by its names alone (P6).

A folder counts when it has a manifest; what is in the manifest is for the reader to check. What
is not named like ours is passed over.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.core.ids import job_name, run_id
from holdfast.errors import InvalidRequestError, NotFoundError
from holdfast.format.keys import (
    MANIFEST,
    ROLLBACK,
    Place,
    folder,
    folder_place,
    parse_rollback,
    rollback_key,
    run_folder,
)
from holdfast.objectstore import ObjectStore


def places(store: ObjectStore, job: str | None = None) -> Iterator[Place]:
    """Yield the checkpoints that have a manifest, by key; of ``job`` alone if it is given.

    Costs one listing per folder above the checkpoints and one ``head`` per checkpoint, whatever
    the number of shards.

    Raises:
        InvalidRequestError: ``job`` is no job name.
        UnavailableError, AccessError, NotFoundError: the store itself.
    """
    if job is None:
        yield from _below(store, "")
    else:
        yield from _of_job(store, job_name(job))


def folders(store: ObjectStore, job: str) -> Iterator[Place]:
    """Yield the folders of ``job`` that are named like a checkpoint, with a manifest or without.

    Costs one listing per run. Raises as ``places``.
    """
    for run in runs_of(store, job):
        for prefix in store.folders(run_folder(job, run)):
            place = folder_place(prefix)
            if place is not None and place.job == job:
                yield place


def runs_of(store: ObjectStore, job: str) -> Iterator[str]:
    """Yield the runs of ``job`` that have anything in the store; one listing. Raises as ``places``.

    A run that was rolled back before anything of it was stored has no checkpoint there.
    """
    for prefix in store.folders(f"{job_name(job)}/"):
        if _is_run(prefix):
            yield prefix.rstrip("/").rpartition("/")[2]


def rollbacks(store: ObjectStore, job: str, run: str) -> Iterator[str]:
    """Yield the keys that are named like the records of a run's rollbacks; one listing."""
    prefix = f"{run_folder(job, run)}{ROLLBACK}"
    for found in store.list(prefix):
        generation = parse_rollback(found.key)
        if generation is not None and found.key == rollback_key(job, run, generation):
            yield found.key


def _of_job(store: ObjectStore, job: str) -> Iterator[Place]:
    for place in folders(store, job):
        if _has_manifest(store, folder(place.job, place.checkpoint)):
            yield place


def _below(store: ObjectStore, above: str) -> Iterator[Place]:
    """Yield all checkpoints below ``above``; only what can be a job or run is entered."""
    for prefix in store.folders(above):
        place = folder_place(prefix)
        if place is not None and _has_manifest(store, prefix):
            yield place
        elif _is_job_or_run(prefix):
            # Also a folder named like a checkpoint: a job may have such a name.
            yield from _below(store, prefix)


def _has_manifest(store: ObjectStore, prefix: str) -> bool:
    try:
        store.head(prefix + MANIFEST)
    except NotFoundError:
        return False
    return True


def _is_run(prefix: str) -> bool:
    try:
        run_id(prefix.rstrip("/").rpartition("/")[2])
    except InvalidRequestError:
        return False
    return True


def _is_job_or_run(prefix: str) -> bool:
    """Tell whether ``prefix`` is a job, part of one's name, or a job and a run."""
    name = prefix.rstrip("/")
    try:
        # A run's name has the form of one more part of a job's name.
        job_name(name.rpartition("/")[0] if _is_run(prefix) and "/" in name else name)
    except InvalidRequestError:
        return False
    return True
