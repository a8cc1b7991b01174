"""Durable checkpoints for tests: manifests, taken in the way a bucket's are."""

from __future__ import annotations

from holdfast.core.ids import CheckpointId, ShardId
from holdfast.core.shard import Shard
from holdfast.format import manifest as manifests
from holdfast.format.digest import part_digest
from holdfast.format.keys import manifest_key
from holdfast.format.manifest import Manifest
from holdfast_services.metadata.calls.catalogue_from_bucket import Found, Reading, write
from holdfast_services.metadata.domain.attempt_start import first_run

JOB = "gpt/small"


def manifest(step, generation=1, *, parent=None, job=JOB, run=None, notes=None, created_s=1000.0):
    """A whole checkpoint of two ranks; ``parent`` is (step, generation)."""
    run = run or first_run(job)
    key = CheckpointId(run, step, generation)
    return Manifest(
        checkpoint=key,
        job=job,
        world_size=2,
        shards=tuple(
            Shard(
                id=ShardId(run, step, generation, rank),
                job=job,
                world_size=2,
                plan_hash="plan",
                length_bytes=100,
                root_digest=bytes([rank]) * 16,
            )
            for rank in (0, 1)
        ),
        write_id="0" * 32,
        created_at_s=created_s + step,
        parent=CheckpointId(run, *parent) if parent else None,
        notes=notes or {},
    )


def put(store, *made):
    """Write manifests alone: a catalogue reads nothing else."""
    for one in made:
        store.put(manifest_key(one.job, one.checkpoint), manifests.encode(one))


async def shelve(service, *made):
    """Make the manifests durable rows of the catalogue."""
    found = tuple(Found(one, part_digest(manifests.encode(one))) for one in made)
    await service.change(lambda c: write(c, made[0].job, Reading(found, ())))


async def rows(service, job=JOB):
    """All rows of a job as people see them, newest first."""

    def listed(catalogue):
        return catalogue.listed(catalogue.run_of(job), catalogue.now_s())

    return await service.read(listed)


async def expired(service, job=JOB):
    """The steps that are being deleted, newest first."""
    return [item.id.step for item in await rows(service, job) if item.row.expired]


async def kinds(service):
    """The kinds of all events, oldest first."""
    return [row["kind"] for row in reversed(await service.read(lambda c: c.last_events(100)))]
