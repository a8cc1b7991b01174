"""What users and retention do to checkpoints in the object store, each one transaction.

Like ``agents``: synchronous, redone by ``transactor`` when a race was lost. All that holds or
expires a checkpoint takes the job's row first, so a pin, a read and an expiry come one after the
other, and the expiry statement asks for the first two again. Nothing is deleted here: an expired
checkpoint is collected by a worker, by and by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from holdfast.core.announcements import Announcement
from holdfast.core.ids import CheckpointId
from holdfast.core.persistence_rules import Retention
from holdfast.core.shard import Shard
from holdfast.core.user_events import Event
from holdfast.errors import ExhaustedError, NotFoundError, PreconditionError
from holdfast_services.metadata.domain import drains, holds, retention
from holdfast_services.metadata.domain.ancestry import Ancestor, ancestors
from holdfast_services.metadata.domain.believed_copies import gather, shards_of, whole
from holdfast_services.metadata.domain.holds import Listed
from holdfast_services.metadata.domain.model import Limits, Run, Stored
from holdfast_services.metadata.domain.retention import Verdict
from holdfast_services.metadata.domain.save_announcement import announce_asked
from holdfast_services.metadata.storage import Catalogue
from holdfast_services.metadata.storage.holds import Read

READS_PER_RUN_MAX = 256
STEPS_IN_EVENT_MAX = 8


@dataclass(frozen=True, slots=True)
class At:
    """Which checkpoint a user means; without a generation, the one of its step that counts."""

    job: str
    step: int
    generation: int | None = None


def verdicts(catalogue: Catalogue, job: str) -> tuple[Verdict, ...]:
    """Return what the job's policy says of its durable checkpoints now; changes nothing."""
    run, now_s = _run(catalogue, job), catalogue.now_s()
    return holds.verdicts(run, catalogue.listed(run.id, now_s, durable=True), now_s)


def expire(catalogue: Catalogue, job: str) -> tuple[Verdict, ...]:
    """Expire what the job's policy does not keep; return the verdicts that were carried out."""
    run = locked(catalogue, job)
    now_s = catalogue.now_s()
    found = holds.verdicts(run, catalogue.listed(run.id, now_s, durable=True), now_s)
    done = [
        verdict
        if verdict.keep or verdict.expired or catalogue.expire(verdict.id, now_s)
        else replace(verdict, keep=True, why="held meanwhile")
        for verdict in found
    ]
    fresh = [verdict.id for verdict in done if not verdict.keep and not verdict.expired]
    if fresh:
        text = f"{len(fresh)} checkpoints of {job} expired by policy: {_steps(fresh)}"
        catalogue.add_events([_event(run, "checkpoint_expired", text)], "", now_s)
    return tuple(done)


def policy(catalogue: Catalogue, job: str) -> Retention:
    """Return the job's policy; the empty one keeps everything."""
    return _run(catalogue, job).retention or Retention()


def set_policy(catalogue: Catalogue, job: str, wish: Retention) -> Retention:
    """Give the job another policy; checkpoints that it does not keep expire soon after.

    Raises:
        InvalidRequestError: its numbers make no sense.
    """
    retention.check(wish)
    run = locked(catalogue, job)
    changed = replace(run, retention=wish if retention.on(wish) else None)
    if changed != run:
        catalogue.save_run(run, changed)
        text = f"{job} has another retention policy"
        catalogue.add_events([_event(run, "retention_changed", text)], "", catalogue.now_s())
    return wish


def pin(catalogue: Catalogue, at: At, note: str, limits: Limits) -> Listed:
    """Keep a checkpoint until it is unpinned; one in memory alone goes to the object store now.

    Raises:
        NotFoundError: no such job or checkpoint.
        PreconditionError: it has expired, or is in memory and cannot go now; says why.
    """
    run = locked(catalogue, at.job)
    now_s = catalogue.now_s()
    item = find(catalogue, run, at, now_s)
    if item.row.expired:
        raise PreconditionError(f"{_name(item.id)} has expired and is being deleted", job=at.job)
    if item.row.durable_at_s is None and not item.row.draining:
        catalogue.save_run(run, _drained(catalogue, run, item, now_s, limits))
    catalogue.put_pin(item.id, note, now_s)
    text = f"{_name(item.id)} of {at.job} was pinned" + (f": {note}" if note else "")
    catalogue.add_events([_event(run, "checkpoint_pinned", text, item.id)], "", now_s)
    return find(catalogue, run, at, now_s)


def _drained(catalogue: Catalogue, run: Run, item: Listed, now_s: float, limits: Limits) -> Run:
    """Return the run with the checkpoint on its way to the object store."""
    name = _name(item.id)
    if not limits.object_tier:
        raise PreconditionError(
            f"{name} is only in memory, and there is no object store to pin it in: set "
            f"HOLDFAST_STORE",
            job=run.job,
        )
    if not run.usable(item.id):
        raise PreconditionError(
            f"{name} is only in memory and was left behind by a restore: it cannot be pinned",
            job=run.job,
        )
    if run.drains:
        # A second one on its way would keep one more slot from the trainer (F88).
        under_way = _name(run.drains[0].checkpoint)
        raise PreconditionError(
            f"{name} is only in memory, and {under_way} is being uploaded: try again later",
            job=run.job,
        )
    copies = gather(run.id, tuple(catalogue.nodes().values()), now_s).live.get(item.id, {})
    if not whole(copies):
        raise PreconditionError(
            f"{name} is gone: no whole copy of it is left in memory, and it never reached the "
            f"object store; `holdfast ls {run.job}` shows the steps that are left",
            job=run.job,
        )
    return drains.begin(run, item.row, shards_of(copies), now_s)


def unpin(catalogue: Catalogue, at: At) -> Listed:
    """Take a user's pin away; the policy decides from here on.

    Raises:
        NotFoundError: no such checkpoint, or it is not pinned.
    """
    run = locked(catalogue, at.job)
    now_s = catalogue.now_s()
    item = find(catalogue, run, at, now_s)
    if not catalogue.drop_pin(item.id):
        raise NotFoundError(f"{_name(item.id)} is not pinned", job=at.job, step=at.step)
    text = f"{_name(item.id)} of {at.job} was unpinned"
    catalogue.add_events([_event(run, "checkpoint_unpinned", text, item.id)], "", now_s)
    return replace(item, pin=None)


def remove(catalogue: Catalogue, at: At, *, force: bool) -> Listed:
    """Expire one checkpoint by hand; one that has expired already is left to its worker.

    One that is on its way goes no further, by force: a way out of a drain that cannot end.

    Raises:
        NotFoundError: no such job or checkpoint.
        PreconditionError: see ``domain.holds.check_removal``.
    """
    run = locked(catalogue, at.job)
    now_s = catalogue.now_s()
    item = find(catalogue, run, at, now_s)
    if item.row.expired:
        return item
    if item.row.draining and force:
        return _stopped(catalogue, run, at, item, now_s)
    everything = catalogue.listed(run.id, now_s, durable=True)
    holds.check_removal(run, item, holds.newest_restorable(run, everything), force=force)
    if force:
        catalogue.drop_pin(item.id)
    if not catalogue.expire(item.id, now_s):
        raise PreconditionError(
            f"{_name(item.id)} is pinned or being read; try again later, or unpin it",
            job=at.job,
            step=at.step,
        )
    text = f"a user removed {_name(item.id)} of {at.job}"
    catalogue.add_events([_event(run, "checkpoint_expired", text, item.id)], "", now_s)
    return find(catalogue, run, at, now_s)


def _stopped(catalogue: Catalogue, run: Run, at: At, item: Listed, now_s: float) -> Listed:
    """Give a drain up: its objects become orphans, and the next step goes instead."""
    outcome = drains.stop(run, item.id)
    catalogue.drop_pin(item.id)
    catalogue.save_run(run, outcome.run)
    catalogue.add_events(outcome.events, "", now_s)
    return find(catalogue, outcome.run, at, now_s)


def remove_job(catalogue: Catalogue, job: str) -> int:
    """Remove a job from every tier; return how many durable checkpoints workers now delete.

    Agents free their slots by the next view, workers delete the objects; both need nothing more.

    Raises:
        NotFoundError: no such job.
        PreconditionError: see ``domain.holds.check_job_removal``.
    """
    run = locked(catalogue, job)
    now_s = catalogue.now_s()
    listed = catalogue.listed(run.id, now_s)
    holds.check_job_removal(run, listed, now_s)
    for item in listed:
        catalogue.drop_pin(item.id)
    stopped = run
    for drain in run.drains:
        stopped = drains.stop(stopped, drain.checkpoint).run
    catalogue.save_run(run, stopped)
    catalogue.save_run(stopped, holds.removed(stopped))
    durable = [item.id for item in listed if item.row.durable_at_s and not item.row.expired]
    count = sum(catalogue.expire(key, now_s) for key in durable)
    text = f"{job} was removed: {len(listed)} checkpoints, {count} of them in the object store"
    catalogue.add_events([_event(run, "job_removed", text)], "", now_s)
    return count


def begin_read(catalogue: Catalogue, at: At, *, number: str, holder: str, ttl_s: float) -> Read:
    """Hold a checkpoint in the object store for ``ttl_s`` from now; ``number`` names the lease.

    Raises:
        NotFoundError: no such job or checkpoint.
        PreconditionError: it is not in the object store, or has expired.
        ExhaustedError: ``READS_PER_RUN_MAX`` leases hold.
    """
    run = locked(catalogue, at.job)
    now_s = catalogue.now_s()
    item = find(catalogue, run, at, now_s)
    _check_stored(item, at)
    if catalogue.reads_count(run.id, now_s) >= READS_PER_RUN_MAX:
        raise ExhaustedError(
            f"{READS_PER_RUN_MAX} readers read checkpoints of {at.job} already: try again later"
        )
    lease = Read(number, item.id, holder, now_s + ttl_s)
    catalogue.put_read(lease)
    return lease


def renew_read(catalogue: Catalogue, number: str, ttl_s: float) -> Read:
    """Let a lease hold for ``ttl_s`` from now.

    Raises:
        NotFoundError: there is none; it was ended, or ran out long ago.
        PreconditionError: it ran out: what it held may be gone.
    """
    lease = catalogue.read_lease(number)
    job = catalogue.job_of(lease.checkpoint.run) if lease else None
    if lease is None or job is None:
        raise NotFoundError(f"no read lease has the number {number}")
    catalogue.lock_job(job)
    now_s = catalogue.now_s()
    if not catalogue.renew_read(number, now_s, now_s + ttl_s):
        raise PreconditionError(
            f"the read lease of {lease.holder} ran out: start reading again", job=job
        )
    return replace(lease, until_s=now_s + ttl_s)


def end_read(catalogue: Catalogue, number: str) -> None:
    """End a lease; one that is not there has ended already."""
    catalogue.drop_read(number)


def ask_save(catalogue: Catalogue, job: str) -> Announcement:
    """Have all ranks of a job save a step soon; return it: the same while it is still to be done.

    Raises:
        NotFoundError: no such job.
        PreconditionError: not all ranks of it train.
    """
    run = locked(catalogue, job)
    now_s = catalogue.now_s()
    outcome = announce_asked(run, catalogue.nodes(), now_s)
    catalogue.save_run(run, outcome.run)
    catalogue.add_events(outcome.events, "", now_s)
    assert outcome.run.announcement is not None
    return outcome.run.announcement


def scrub(catalogue: Catalogue, job: str) -> int:
    """Ask for a scrub of all checkpoints that a job has in the object store; return how many."""
    return catalogue.ask_scrubs(locked(catalogue, job).id)


def one(catalogue: Catalogue, run: Run, at: At) -> tuple[Listed, Stored | None]:
    """Return a checkpoint of the run, and what of it lies in the object store.

    Raises:
        NotFoundError: there is none of that step, or of that generation.
    """
    item = find(catalogue, run, at, catalogue.now_s())
    return item, catalogue.stored(item.id)


def line(catalogue: Catalogue, key: CheckpointId) -> tuple[Ancestor, ...]:
    """Return the attempts that led to a checkpoint, the one that saved it first."""
    return ancestors(
        key.generation,
        lambda generation: catalogue.beginning(key.run, generation),
        catalogue.rollbacks(key.run),
    )


def shards(catalogue: Catalogue, at: At) -> tuple[Shard, ...]:
    """Return the shards of a checkpoint that lies in the object store.

    Raises:
        NotFoundError: no such job or checkpoint.
        PreconditionError: it is not in the object store, or has expired.
    """
    run = _run(catalogue, at.job)
    item = find(catalogue, run, at, catalogue.now_s())
    _check_stored(item, at)
    stored = catalogue.stored(item.id)
    return stored.shards if stored else ()


def _check_stored(item: Listed, at: At) -> None:
    if item.row.durable_at_s is None or item.row.expired:
        state = "has expired" if item.row.expired else "is not in the object store"
        raise PreconditionError(f"{_name(item.id)} {state}", job=at.job, step=at.step)


def find(catalogue: Catalogue, run: Run, at: At, now_s: float) -> Listed:
    """Return a checkpoint of the run.

    Raises:
        NotFoundError: there is none of that step, or of that generation.
    """
    found = [
        item
        for item in catalogue.listed(run.id, now_s, step=at.step)
        if at.generation in (None, item.id.generation)
    ]
    if not found:
        which = "" if at.generation is None else f" by attempt {at.generation}"
        text = f"job {run.job} has no checkpoint of step {at.step}{which}"
        raise NotFoundError(text, job=run.job, step=at.step)
    return max(found, key=lambda item: (run.usable(item.id), item.id.generation))


def _run(catalogue: Catalogue, job: str) -> Run:
    run = catalogue.load_run(catalogue.run_of(job) or "")
    if run is None:
        raise NotFoundError(f"no job {job}", job=job)
    return run


def locked(catalogue: Catalogue, job: str) -> Run:
    """Return the job's run, its row held to the end of the transaction."""
    catalogue.lock_job(job)
    return _run(catalogue, job)


def _name(key: CheckpointId) -> str:
    return f"step {key.step} of attempt {key.generation}"


def _steps(keys: Sequence[CheckpointId]) -> str:
    named = ", ".join(str(key.step) for key in sorted(keys)[:STEPS_IN_EVENT_MAX])
    more = len(keys) - STEPS_IN_EVENT_MAX
    return f"steps {named}" + (f" and {more} more" if more > 0 else "")


def _event(run: Run, kind: str, text: str, key: CheckpointId | None = None) -> Event:
    context = {"run": run.id}
    if key is not None:
        context |= {"step": str(key.step), "attempt": str(key.generation)}
    return Event(kind=kind, severity="info", message=text, job=run.job, context=context)
