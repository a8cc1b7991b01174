"""What people ask of jobs: to be taken on, to be ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from holdfast.core.job_spec import JobSpec, check
from holdfast.errors import AlreadyExistsError, ExhaustedError, NotFoundError, PreconditionError
from holdfast_services.scheduler.domain.cluster import Node
from holdfast_services.scheduler.domain.job import Job, Transition
from holdfast_services.scheduler.domain.planned import refusal
from holdfast_services.scheduler.storage import ExecutorRow, Kept, Statements

OPEN_JOBS_MAX = 100_000
LISTED_MAX = 1_000


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job as it was taken on; ``new`` is false if the same had been submitted already."""

    job: Job
    new: bool


def submit(
    statements: Statements,
    spec: JobSpec,
    job_id: str,
    quotas: Mapping[str, int],
    *,
    dry_run: bool,
) -> Submitted:
    """Take a job on, or only say whether it would be.

    The same spec again while its job lives is the same submission: an answer may be lost.

    Raises:
        InvalidRequestError: the spec makes no sense; names the field.
        AlreadyExistsError: another job of this name lives.
        ExhaustedError: it fits no nodes, with the sum; or there are too many jobs.
    """
    check(spec)
    why = refusal(spec, map(_node, statements.executors()), quotas)
    if why:
        raise ExhaustedError(f"{spec.name} {why}", job=spec.name)
    known = statements.job(spec.name)
    if known is not None and not known.job.over:
        if known.job.spec == spec:
            return Submitted(known.job, new=False)
        raise AlreadyExistsError(
            f"job {spec.name} is {known.job.state.value}, with another spec: cancel it, or take "
            f"another name",
            job=spec.name,
        )
    if statements.open_jobs_count() >= OPEN_JOBS_MAX:
        raise ExhaustedError(f"{OPEN_JOBS_MAX} jobs are waiting or running: submit it later")
    now_s = statements.now_s()
    job = Job(spec=spec, id=job_id, submitted_at_s=now_s, since_s=now_s)
    job = replace(job, history=(Transition(at_s=now_s, state=job.state, message="submitted"),))
    if dry_run:
        return Submitted(job, new=True)
    if known is None:
        statements.add_job(job)
    else:
        # What the one before gave up may not be free yet, and its numbers go on.
        before = known.job
        job = replace(job, held=before.held, number=before.number, told=before.told)
        statements.save_job(known, job)
    return Submitted(job, new=True)


def _node(row: ExecutorRow) -> Node:
    report = row.report
    return Node(name=row.node, gpus=report.gpus, gpu_type=report.gpu_type, spot=report.spot)


def cancel(statements: Statements, name: str, why: str) -> Job:
    """Have a job end; who plans does the rest. May be repeated.

    Raises:
        NotFoundError: there is no such job.
        PreconditionError: it is over.
    """
    kept = find(statements, name)
    if kept.job.over:
        raise PreconditionError(f"job {name} is {kept.job.state.value}", job=name)
    job = replace(kept.job, cancel=kept.job.cancel or why)
    if job != kept.job:
        statements.save_job(kept, job)
    return job


def find(statements: Statements, name: str) -> Kept:
    """Return a job.

    Raises:
        NotFoundError: there is none of this name.
    """
    kept = statements.job(name)
    if kept is None:
        raise NotFoundError(f"no job {name} was submitted", job=name)
    return kept
