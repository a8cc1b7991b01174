"""The use cases of persistence workers, each one transaction; see ``agents`` for how they run.

What workers say is a claim: it counts while the checkpoint is on its way and may still be chosen
(P2), and every one may be said again.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from holdfast.core import queue_items
from holdfast.core.ids import CheckpointId, ShardId
from holdfast.core.inventory import HeldState
from holdfast.core.persistence_work import ShardWork, Work
from holdfast.core.queue_items import Item, Kind
from holdfast.core.shard import Shard
from holdfast.core.user_events import Event
from holdfast.errors import (
    CheckpointError,
    InvalidRequestError,
    NotFoundError,
    NotReadyError,
    PreconditionError,
    StaleGenerationError,
    UnavailableError,
)
from holdfast.format.digest import DIGEST_BYTES
from holdfast_services.metadata.domain import drains, worker_plans
from holdfast_services.metadata.domain.advance_run import advance
from holdfast_services.metadata.domain.model import Checkpoint, Limits, Run, Stored
from holdfast_services.metadata.storage import Catalogue
from holdfast_services.metadata.usecases.agents import informed, pulse

NAMED_IN_ERROR_MAX = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Ages:
    """After how many seconds stored objects are looked at again; scrub 0: never."""

    orphan_s: float = 86_400.0
    scrub_s: float = 0.0


# -- what is due -----------------------------------------------------------------------------


def drain_items(catalogue: Catalogue) -> list[str]:
    """Return the items of all drains, whatever a queue knows of them."""
    runs = (catalogue.load_run(name) for name in catalogue.draining_runs())
    return [item for run in runs if run for item in worker_plans.items(run)]


def bucket_items(catalogue: Catalogue, ages: Ages) -> list[str]:
    """Return the items of what lies in the object store: to collect, to scrub, to repair."""
    now_s = catalogue.now_s()
    before_s = now_s - ages.scrub_s if ages.scrub_s > 0 else None
    found = [queue_items.text(Item(Kind.COLLECT, key)) for key in catalogue.expired()]
    found += [queue_items.text(Item(Kind.SCRUB, key)) for key in catalogue.to_scrub(before_s)]
    bad = [shard for _, shards in catalogue.bad() for shard in shards]
    return [*found, *(worker_plans.repairs(bad, catalogue.nodes(), now_s) if bad else ())]


def note(catalogue: Catalogue, event: Event) -> None:
    """Append an event about the queue."""
    catalogue.add_events([event], "", catalogue.now_s())


def plan(catalogue: Catalogue, name: str, ages: Ages) -> Work:
    """Return what is to be done for an item of the queue now.

    Raises:
        NotFoundError: nothing any more: drop it.
        UnavailableError: no live node holds the shard now: try again later.
        InvalidRequestError: no item.
    """
    now_s = catalogue.now_s()
    item = queue_items.parse(name)
    if item.checkpoint is None:
        return worker_plans.sweep(catalogue.draining(), now_s - ages.orphan_s)
    facts = _facts(catalogue, item, item.checkpoint)
    found = worker_plans.plan(item, facts, catalogue.nodes(), now_s) if facts else None
    if found is None:
        raise NotFoundError(f"no work is left for {name}", item=name)
    if isinstance(found, ShardWork) and not found.sources:
        raise UnavailableError(f"no live node holds shard {found.shard.id.key}", item=name)
    return found


def is_durable(catalogue: Catalogue, key: CheckpointId) -> bool:
    """Tell whether the catalogue relies on the checkpoint in the object store."""
    row = catalogue.checkpoint(key)
    return row is not None and worker_plans.relied_on(row)


def _facts(catalogue: Catalogue, item: Item, key: CheckpointId) -> worker_plans.ItemFacts | None:
    row, job = catalogue.checkpoint(key), catalogue.job_of(key.run)
    if row is None or job is None:
        return None
    shards, repair = _shards(catalogue, row, item)
    begun = catalogue.beginning(row.id.run, row.id.generation)
    return worker_plans.ItemFacts(
        job=job,
        row=row,
        shards=shards,
        missing_count=catalogue.drain_counts(row.id)[1],
        repair=repair,
        earlier=tuple(catalogue.durable(row.id.run, limit=worker_plans.EARLIER_IN_PLAN_MAX + 1)),
        origin=begun.origin if begun else None,
    )


def _shards(catalogue: Catalogue, row: Checkpoint, item: Item) -> tuple[tuple[Shard, ...], bool]:
    """Return the shards of the item, and whether their stored bytes are damaged."""
    if row.draining:
        awaited = catalogue.drain_shard(item.shard) if item.shard else None
        if item.shard:
            return ((awaited[0],) if awaited and not awaited[1] else ()), False
        return catalogue.drained_shards(row.id), False
    stored = catalogue.stored(row.id)
    if stored is None:
        return (), False
    if item.shard is None:
        return stored.shards, False
    return tuple(s for s in stored.shards if s.id == item.shard and s.id in stored.bad), True


# -- what workers tell -----------------------------------------------------------------------


def shard_stored(catalogue: Catalogue, shard: Shard) -> int:
    """Mark ``shard`` as uploaded and verified; return how many shards are still missing.

    Raises:
        StaleGenerationError: a newer attempt has left the checkpoint behind.
        PreconditionError: it is not on its way, or has another digest.
        NotFoundError: no such checkpoint.
    """
    key = shard.id.checkpoint
    job = _lock(catalogue, key)
    catalogue.drain_done(shard, catalogue.now_s())
    done, missing = catalogue.drain_counts(key)
    if done or missing:
        _expect_same(catalogue.drain_shard(shard.id), shard)
        return missing
    stored = catalogue.stored(key)
    if stored is None:
        raise _not_draining(catalogue, job, key)
    _expect_same(next(((s, True) for s in stored.shards if s.id == shard.id), None), shard)
    if shard.id in stored.bad:
        catalogue.set_bad(key, set(stored.bad) - {shard.id})
        text = f"shard {shard.id.key} of {job} was written to the object store again"
        catalogue.add_events([_event("shard_repaired", job, key, text)], "", catalogue.now_s())
    return 0


def _expect_same(known: tuple[Shard, bool] | None, shard: Shard) -> None:
    if known is None or known[0].root_digest != shard.root_digest:
        raise PreconditionError(
            f"shard {shard.id.key} does not belong to the checkpoint", shard=shard.id.key
        )


def durable(catalogue: Catalogue, key: CheckpointId, digest: bytes, limits: Limits) -> None:
    """Give the row the level ``durable``: the store has the manifest ``digest`` (P1, P2).

    Raises:
        NotReadyError: shards are still to come; names them.
        StaleGenerationError: a newer attempt has left the checkpoint behind.
        PreconditionError: it is not on its way, or another manifest made it durable.
        NotFoundError: no such checkpoint.
    """
    if len(digest) != DIGEST_BYTES:
        raise InvalidRequestError(f"manifest digest has {len(digest)} bytes, not {DIGEST_BYTES}")
    listens_until_s = pulse(catalogue, catalogue.now_s(), limits)
    job = _lock(catalogue, key)
    now_s = catalogue.now_s()
    known = catalogue.object_row(key)
    if known is not None:
        if known["manifest_digest"] != digest:
            raise PreconditionError(f"step {key.step} is durable by another manifest", job=job)
        return
    before, nodes = catalogue.load_run(key.run), catalogue.nodes()
    drain = next((d for d in before.drains if d.checkpoint == key), None) if before else None
    if before is None or drain is None:
        raise _not_draining(catalogue, job, key)
    if drain.missing:
        names = ", ".join(shard.id.key for shard in drain.missing[:NAMED_IN_ERROR_MAX])
        raise NotReadyError(f"{len(drain.missing)} shards are not uploaded yet: {names}", job=job)
    stored = Stored(checkpoint=key, shards=catalogue.drained_shards(key))
    catalogue.put_object(stored, manifest_digest=digest, verified_at_s=now_s)
    # What waited for this one may go now: nobody else would look before the next report.
    before = informed(catalogue, before, nodes)
    finished = drains.finish(before, key, now_s)
    # Else a restore that is decided now is lost though all of it is in the object store.
    finished = replace(finished, stored=(*before.stored, stored))
    outcome = advance(finished, nodes, now_s, limits, listens_until_s)
    catalogue.save_run(before, outcome.run)
    text = f"step {key.step} of {job} is durable"
    news = [_event("checkpoint_durable", job, key, text), *outcome.events]
    catalogue.add_events(news, "", now_s)


def collected(catalogue: Catalogue, key: CheckpointId, freed_bytes: int) -> None:
    """Forget an expired checkpoint whose objects are gone; a repeat is harmless.

    Raises:
        PreconditionError: it is not expired.
    """
    job = _lock(catalogue, key)
    if catalogue.object_row(key) is None:
        return
    held = any(
        item.shard.id.checkpoint == key and item.state is HeldState.SEALED
        for node in catalogue.nodes().values()
        for item in node.inventory.shards
    )
    if not catalogue.forget_object(key, keep_row=held):
        raise PreconditionError(f"step {key.step} of {job} has not expired", job=job)
    text = f"step {key.step} of {job} was deleted from the object store: {freed_bytes} bytes freed"
    catalogue.add_events([_event("checkpoint_collected", job, key, text)], "", catalogue.now_s())


def scrubbed(catalogue: Catalogue, key: CheckpointId, bad: Collection[ShardId]) -> None:
    """Record what a scrub of a checkpoint in the store has found.

    Bad shards of a durable one are repaired if they can be; those of one on its way go again.

    Raises:
        NotFoundError: nothing of it lies there, or comes to lie there.
        InvalidRequestError: a bad shard that is none of it.
    """
    job = _lock(catalogue, key)
    stored = catalogue.stored(key)
    shards = stored.shards if stored else catalogue.drained_shards(key)
    if not shards:
        raise NotFoundError(f"the object store has no shard of step {key.step}", job=job)
    if not set(bad) <= {shard.id for shard in shards}:
        raise InvalidRequestError(
            f"a shard that was reported as bad does not belong to step {key.step}", job=job
        )
    row = catalogue.checkpoint(key)
    if row is not None and row.expired:
        return  # it is being deleted: what is gone by now is no news
    now_s = catalogue.now_s()
    if stored is None:
        new = sorted(one for one in bad if catalogue.drain_again(one))
    else:
        catalogue.scrubbed(key, now_s)
        catalogue.set_bad(key, bad)
        new = sorted(set(bad) - set(stored.bad))
    if new:
        names = ", ".join(one.key for one in new[:NAMED_IN_ERROR_MAX])
        text = (
            f"step {key.step} of {job} has {len(new)} damaged shards in the object store: {names}"
        )
        catalogue.add_events([_event("checkpoint_bad", job, key, text, "error")], "", now_s)


def forget_memory(catalogue: Catalogue) -> None:
    """Forget nodes and all that was in memory only: the arenas were erased; durable rows stay.

    Without it a job would look for what cannot come back, and call itself lost.
    """
    for row in catalogue.job_rows():
        catalogue.lock_job(row["name"])
    catalogue.forget_all_nodes()
    catalogue.forget_memory()
    catalogue.forget_leases()


def _lock(catalogue: Catalogue, key: CheckpointId) -> str:
    job = catalogue.job_of(key.run)
    if job is None or catalogue.lock_job(job) is None:
        raise NotFoundError(f"no run {key.run}", run=key.run)
    return job


def _not_draining(catalogue: Catalogue, job: str, key: CheckpointId) -> CheckpointError:
    run: Run | None = catalogue.load_run(key.run)
    ids = {"job": job, "run": key.run, "step": key.step, "attempt": key.generation}
    if run and run.superseded(key):
        return StaleGenerationError(f"step {key.step} of {job} was left behind", **ids)
    if catalogue.checkpoint(key) is None:
        return NotFoundError(f"no checkpoint of step {key.step} of {job}", **ids)
    return PreconditionError(f"step {key.step} of {job} is not on its way", **ids)


def _event(kind: str, job: str, key: CheckpointId, text: str, severity: str = "info") -> Event:
    context = {"run": key.run, "step": str(key.step), "attempt": str(key.generation)}
    return Event(kind=kind, severity=severity, message=text, job=job, context=context)
