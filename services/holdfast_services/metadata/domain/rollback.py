"""A user takes a run back to one of its checkpoints, on its line or on one that was left.

It is a restore without an attempt: the next generation is given to nobody, and all that was made
before it and is not on the line of that checkpoint is left behind, in the transaction that says
so. The next attempt restores the newest that stands, which is this one. Nothing is deleted: who
wants what was left rolls back to it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.core import lines
from holdfast.core.decision import DecisionState
from holdfast.core.ids import GENERATION_MAX, CheckpointId
from holdfast.core.user_events import Event
from holdfast.errors import NotFoundError, PreconditionError
from holdfast_services.metadata.domain.drains import rewind, without_left
from holdfast_services.metadata.domain.holds import Listed
from holdfast_services.metadata.domain.model import Attempt, Checkpoint, Outcome, Run
from holdfast_services.metadata.domain.restore_decision import named, newly_left


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """That a run was rolled back to ``to``, under ``generation``; what people are told of it.

    ``recorded``: its record lies in the object store.
    """

    to: CheckpointId
    generation: int
    at_s: float
    holder: str = ""
    reason: str = ""
    recorded: bool = False


def check(run: Run, item: Listed, now_s: float, *, in_memory: bool, force: bool) -> None:
    """Do nothing if a user may roll ``run`` back to the checkpoint.

    Args:
        run: As read under the job's lock.
        item: Where to.
        now_s: The database's clock.
        in_memory: All of it lies with live nodes.
        force: Though an attempt trains.

    Raises:
        NotFoundError: the job was removed.
        PreconditionError: it trains, or the checkpoint cannot be restored; says what to do.
    """
    name = f"step {item.id.step} of attempt {item.id.generation}"
    ids = {"job": run.job, "run": run.id, "step": item.id.step, "attempt": item.id.generation}
    if run.removed:
        raise NotFoundError(f"no job {run.job}", job=run.job)
    if item.row.expired:
        raise PreconditionError(f"{name} has expired and is being deleted", **ids)
    if run.dropped(item.id):
        raise PreconditionError(f"{name} was given up: it never was whole", **ids)
    if not item.row.stored and run.superseded(item.id):
        raise PreconditionError(
            f"{name} was left behind and is not in the object store: what memory still has of it "
            f"is being freed",
            **ids,
        )
    if not item.row.stored and not in_memory:
        damaged = ", where its bytes are damaged" if item.row.bad else ""
        raise PreconditionError(
            f"{name} cannot be restored: it is not whole in memory, nor in the object "
            f"store{damaged}; `holdfast ls {run.job}` shows what is there",
            **ids,
        )
    attempt = run.current
    if attempt is not None and attempt.lease_until_s > now_s and not force:
        raise PreconditionError(
            f"{run.job} is training: attempt {attempt.generation}, started by "
            f"{attempt.spec.holder or 'another launcher'}; stop its launcher first (Ctrl-C, or "
            f"SIGTERM), or use --force, after which it saves nothing any more",
            **ids,
        )
    if run.generation + 2 > GENERATION_MAX:
        raise PreconditionError(f"{run.job} has had all attempts that a job can have", **ids)


def rolled_back(run: Run, row: Checkpoint) -> Outcome:
    """Return the run with ``row`` as the newest that can be restored, and no attempt."""
    generation = run.generation + 1
    decision = run.decision
    if decision is not None and run.deciding:
        reason = f"a user rolled the job back to step {row.id.step}"
        decision = replace(
            decision,
            state=DecisionState.LOST,
            checkpoint=None,
            shards=(),
            reason=reason,
            refused=True,
        )
    bare = replace(
        run,
        generation=generation,
        attempt=_ended(run.attempt),
        decision=decision,
        rejected=(),
        pins=(),
        announcement=None,
    )
    began = row.parent if isinstance(row.parent, CheckpointId) else None
    # Of a line that was left nobody else may know where it began.
    since = [lines.to(began, row.id.generation)] if began else []
    there = rewind(bare.after(*since, lines.to(row.id, generation)), row.id.step)
    return without_left(there)


def _ended(attempt: Attempt | None) -> Attempt | None:
    """Return the attempt without a lease: the next one need not wait for it."""
    return attempt and replace(attempt, lease_until_s=0.0)


def news(before: Run, after: Run, to: CheckpointId, who: str, reason: str) -> tuple[Event, ...]:
    """Return what people are told of a rollback."""
    left = newly_left(before, after)
    context = {"run": after.id, "step": str(to.step), "attempt": str(to.generation)}
    by = f", as {who} asked" if who else ""
    why = f" ({reason})" if reason else ""
    text = (
        f"{after.job} was rolled back to step {to.step} of attempt {to.generation}{by}{why}: the "
        f"next start restores it"
    )
    behind = f"; {len(left)} checkpoints are left behind: {named(left)}" if left else ""
    event = Event(
        kind="job_rolled_back",
        severity="warning",
        message=text + behind,
        job=after.job,
        context=context,
    )
    return (event,)
