"""Who holds a durable checkpoint, what may be removed by hand, what retention says of each.

Pure. The policy itself is in ``domain.retention``; here its facts are gathered from rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from holdfast.core.decision import DecisionState
from holdfast.core.ids import CheckpointId, ShardId
from holdfast.core.lines import NOTHING, Move
from holdfast.core.node_view import SupersedeRule
from holdfast.errors import NotFoundError, PreconditionError
from holdfast_services.metadata.domain.ledger import Ledger
from holdfast_services.metadata.domain.model import Checkpoint, Run
from holdfast_services.metadata.domain.retention import Candidate, Verdict, metric_of, plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A checkpoint's row, the state of its objects, its pin and its readers.

    ``pin`` is the note of the user's pin, None without one; ``readers`` have a lease that holds.
    ``stored_shards`` counts what of a drain lies there already, None when nothing drains.
    """

    row: Checkpoint
    expired_at_s: float | None = None
    scrubbed_at_s: float | None = None
    scrub_asked: bool = False
    bad: tuple[ShardId, ...] = ()
    pin: str | None = None
    readers: tuple[str, ...] = ()
    stored_shards: int | None = None

    @property
    def id(self) -> CheckpointId:
        """The checkpoint's id."""
        return self.row.id


def restored(run: Run) -> frozenset[CheckpointId]:
    """Return what a restore holds: the chosen checkpoint, until all ranks have loaded it."""
    named = run.decision.checkpoint if run.decision and (run.deciding or run.loading) else None
    return frozenset((*run.pins, *((named,) if named else ())))


def holds(run: Run, item: Listed) -> tuple[str, ...]:
    """Return the present uses of the checkpoint; none may be removed, not even by force."""
    found = [f"read by {reader}" for reader in item.readers]
    if item.id in restored(run):
        found.append("being restored")
    if item.row.draining:
        found.append("being uploaded to the object store")
    return tuple(found)


def newest_restorable(run: Run, listed: Iterable[Listed]) -> CheckpointId | None:
    """Return the newest checkpoint that a restore could take from the object store, if any."""
    return max((i.id for i in listed if i.row.stored and run.usable(i.id)), default=None)


def verdicts(run: Run, listed: Iterable[Listed], now_s: float) -> tuple[Verdict, ...]:
    """Return what the run's policy says of its durable checkpoints, newest first.

    Those that have expired already are among them: their objects are about to go.
    """
    rows = [item for item in listed if item.row.durable_at_s is not None]
    candidates = [_candidate(run, item) for item in rows if not item.row.expired]
    gone = (
        Verdict(id=item.id, keep=False, why="expired already", expired=True)
        for item in rows
        if item.row.expired
    )
    judged = (*plan(candidates, run.retention, now_s), *gone)
    return tuple(sorted(judged, key=lambda verdict: verdict.id, reverse=True))


def _candidate(run: Run, item: Listed) -> Candidate:
    pin = () if item.pin is None else (f"pinned: {item.pin}" if item.pin else "pinned",)
    row, policy = item.row, run.retention
    return Candidate(
        id=row.id,
        committed_at_s=row.local_at_s,
        durable_at_s=row.durable_at_s or 0.0,
        superseded=not run.usable(row.id),
        bad=row.bad,
        metric=metric_of(row.notes, policy.metric) if policy and policy.best else None,
        holds=(*pin, *holds(run, item)),
    )


def check_job_removal(run: Run, listed: Iterable[Listed], now_s: float) -> None:
    """Do nothing if a user may remove the whole job.

    Raises:
        NotFoundError: it was removed already.
        PreconditionError: it trains, or somebody reads of it; says who.
    """
    if run.removed:
        raise NotFoundError(f"no job {run.job}", job=run.job)
    attempt = run.current
    if attempt is not None and attempt.lease_until_s > now_s:
        raise PreconditionError(
            f"{run.job} is training, started by {attempt.spec.holder or 'another launcher'}: stop "
            f"it first",
            job=run.job,
        )
    if readers := sorted({reader for item in listed for reader in item.readers}):
        raise PreconditionError(
            f"{run.job} is being read by {', '.join(readers)}: try again later", job=run.job
        )


def removed(run: Run) -> Run:
    """Return the run of a removed job: none of its checkpoints counts any more.

    A rule of negative step covers every checkpoint there was, also one that only an agent knows
    which is away. Nothing of it may be freed later than its holder reports, and nothing restored.
    The generation goes on, so a trainer that wakes up is fenced and a new job starts fresh.
    """
    generation = run.generation + 1
    decision = run.decision
    if decision is not None and run.deciding:
        decision = replace(
            decision, state=DecisionState.LOST, checkpoint=None, shards=(), reason="job removed"
        )
    return replace(
        run,
        generation=generation,
        rules=(SupersedeRule(after_step=NOTHING, below_generation=generation),),
        moves=(Move(generation, NOTHING),),
        decision=decision,
        pins=(),
        checkpoints=tuple(row for row in run.checkpoints if row.durable_at_s is not None),
        abandoned=(),
        announcement=None,
        retention=None,
        persisted_step=0,
        persist_owed=False,
        started=(),
        ledger=Ledger(),
    )


def check_removal(run: Run, item: Listed, newest: CheckpointId | None, *, force: bool) -> None:
    """Do nothing if a user may remove the checkpoint's objects.

    Args:
        run: As read under the job's lock.
        item: What is to go.
        newest: See ``newest_restorable``.
        force: Though it is pinned, or the newest that can be restored.

    Raises:
        PreconditionError: it lies in memory only, or somebody needs it; says who.
    """
    name = f"step {item.id.step} of attempt {item.id.generation}"
    ids = {"job": run.job, "run": run.id, "step": item.id.step, "attempt": item.id.generation}
    if held := holds(run, item):
        raise PreconditionError(f"{name} is {', '.join(held)}", **ids)
    if item.row.durable_at_s is None:
        raise PreconditionError(
            f"{name} is only in memory, where newer steps replace it by themselves", **ids
        )
    if force:
        return
    if item.pin is not None:
        raise PreconditionError(f"{name} is pinned: unpin it, or use --force", **ids)
    if item.id == newest:
        raise PreconditionError(
            f"{name} is the newest that can be restored: use --force to remove it", **ids
        )
