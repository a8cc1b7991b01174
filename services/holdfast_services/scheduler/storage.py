"""SQL of the scheduler: one statement per method, all in the transaction of one connection."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any

from sqlalchemy import bindparam, delete, func, insert, select, update

from holdfast.core.executions import ExecutorReport
from holdfast.core.records import from_record, to_record
from holdfast.errors import ConflictError
from holdfast_services.kit.db import Connection, now_s, upsert
from holdfast_services.scheduler import tables as t
from holdfast_services.scheduler.domain.cluster import Aside
from holdfast_services.scheduler.domain.job import Job
from holdfast_services.scheduler.domain.knowledge import Knowledge
from holdfast_services.scheduler.domain.wishes import Wishes

PLANS_KEPT_COUNT = 100
HINTS_KEPT_COUNT = 1000
"""Of settled jobs: what families are made of."""
HINTS_FORGOTTEN_MAX = 10_000
JOBS_CACHED_MAX = 50_000
LEASE = "plan"

_L, _J, _E, _A, _P = (table.c for table in (t.lease, t.jobs, t.executors, t.asides, t.plans))
_H = t.hints.c
_PUT_EXECUTOR = upsert(
    t.executors,
    ["node"],
    lambda new: {
        "executor": new.executor,
        "sequence": new.sequence,
        "lease_until_s": new.lease_until_s,
        "body": new.body,
    },
)
_PUT_HINTS = upsert(t.hints, ["job"], lambda new: {"id": new.id, "body": new.body})
_PUT_ASIDE = upsert(t.asides, ["node"], lambda new: {"body": new.body})


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Who plans, until when, under which fence; ``number``: the last that was given.

    ``metadata_out_since_s``: since when the holder hears nothing from metadata; 0: it does.
    """

    holder: str = ""
    fence: int = 0
    until_s: float = 0.0
    number: int = 0
    metadata_out_since_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorRow:
    """An executor's last report, and how long it counts."""

    node: str
    report: ExecutorReport
    lease_until_s: float


@dataclass(frozen=True, slots=True)
class Kept:
    """A job as its row has it; a change of it names ``version``."""

    job: Job
    version: int


class JobCache:
    """Jobs that this process has decoded, by name and version: a hint that saves time only."""

    def __init__(self) -> None:
        self._jobs: dict[str, Kept] = {}

    def decoded(self, name: str, version: int, body: str) -> Kept:
        """Return a row's job."""
        known = self._jobs.get(name)
        if known is None or known.version != version:
            if len(self._jobs) >= JOBS_CACHED_MAX:
                self._jobs.clear()
            known = self._jobs[name] = Kept(from_record(Job, json.loads(body), name), version)
        return known


class Statements:
    """The statements of one transaction."""

    def __init__(self, connection: Connection, cache: JobCache) -> None:
        self._db = connection
        self._cache = cache

    def now_s(self) -> float:
        """Return the database's clock."""
        return now_s(self._db)

    # ------------------------------------------------------------------------------- the lease

    def lock_lease(self) -> Lease:
        """Return the lease and hold its row to the end; nobody's if there was none."""
        row = self._db.execute(_LOCK_LEASE).mappings().one_or_none()
        if row is None:
            self._db.execute(insert(t.lease).values(name=LEASE, **asdict(Lease())))
            return Lease()
        return Lease(**row)

    def lease(self) -> Lease:
        """Return the lease; a plain read."""
        row = self._db.execute(_LEASE).mappings().one_or_none()
        return Lease() if row is None else Lease(**row)

    def save_lease(self, lease: Lease) -> None:
        """Write the lease; the caller holds its row."""
        self._db.execute(update(t.lease).where(_L.name == LEASE).values(**asdict(lease)))

    # -------------------------------------------------------------------------------- the jobs

    def open_jobs(self) -> list[Kept]:
        """Return all jobs about which something is left to be done."""
        rows = self._db.execute(_OPEN_JOBS)
        return [self._cache.decoded(row.name, row.version, row.body) for row in rows]

    def jobs(self, limit: int) -> list[Kept]:
        """Return the jobs that were submitted last, newest first."""
        rows = self._db.execute(_JOBS, {"limit": limit})
        return [self._cache.decoded(row.name, row.version, row.body) for row in rows]

    def job(self, name: str) -> Kept | None:
        """Return one job."""
        row = self._db.execute(_JOB, {"of_name": name}).one_or_none()
        return None if row is None else self._cache.decoded(row.name, row.version, row.body)

    def open_jobs_count(self) -> int:
        """Return how many jobs are not settled."""
        return int(self._db.execute(_OPEN_COUNT).scalar_one())

    def add_job(self, job: Job) -> None:
        """Write a job of a new name.

        Raises:
            ConflictError: by the database, if the name is there.
        """
        values = {"name": job.name, "version": 1, "submitted_at_s": job.submitted_at_s}
        self._db.execute(insert(t.jobs).values(settled=job.settled, body=_body(job), **values))

    def save_job(self, kept: Kept, job: Job) -> None:
        """Write a job that has changed since it was read.

        Raises:
            ConflictError: somebody else has changed it.
        """
        values = {
            "settled": job.settled,
            "submitted_at_s": job.submitted_at_s,
            "body": _body(job),
            "next_version": kept.version + 1,
        }
        names = {"of_name": job.name, "of_version": kept.version}
        if self._db.execute(_SAVE_JOB, {**values, **names}).rowcount != 1:
            raise ConflictError(f"job {job.name} has changed meanwhile", job=job.name)

    # --------------------------------------------------------------------------- the executors

    def executors(self) -> list[ExecutorRow]:
        """Return what all executors last said."""
        return [_executor(row) for row in self._db.execute(_EXECUTORS)]

    def executor(self, node: str) -> ExecutorRow | None:
        """Return what the executor of a node last said, and hold its row to the end."""
        row = self._db.execute(_EXECUTOR, {"of_node": node}).one_or_none()
        return None if row is None else _executor(row)

    def save_executor(self, row: ExecutorRow) -> None:
        """Write an executor's report in place of its node's last one."""
        values = {
            "node": row.node,
            "executor": row.report.executor,
            "sequence": row.report.sequence,
            "lease_until_s": row.lease_until_s,
            "body": _body(row.report),
        }
        self._db.execute(_PUT_EXECUTOR[self._db.dialect.name], values)

    def renew_executor(self, node: str, until_s: float) -> None:
        """Give an executor its lease until ``until_s``."""
        self._db.execute(_RENEW, {"of_node": node, "until_s": until_s})

    def forget_executors(self, before_s: float) -> None:
        """Forget executors whose leases ran out before then."""
        self._db.execute(_FORGET, {"before_s": before_s})

    def asides(self) -> dict[str, Aside]:
        """Return the nodes on which starts have failed lately."""
        rows = self._db.execute(_ASIDES)
        return {row.node: from_record(Aside, json.loads(row.body), row.node) for row in rows}

    def save_aside(self, node: str, aside: Aside) -> None:
        """Write a node that is set aside, or close to it."""
        values = {"node": node, "body": _body(aside)}
        self._db.execute(_PUT_ASIDE[self._db.dialect.name], values)

    def forget_aside(self, node: str) -> None:
        """Forget that starts have failed on a node."""
        self._db.execute(_FORGET_ASIDE, {"of_node": node})

    # ------------------------------------------------------------------------------- the hints

    def hints(self) -> dict[str, tuple[str, Knowledge]]:
        """Return what is known of how jobs scale, by name: id of the submission, and what."""
        return {
            row.job: (row.id, _knowledge(row.job, row.body)) for row in self._db.execute(_HINTS)
        }

    def hint(self, job: str) -> tuple[str, Knowledge] | None:
        """Return what is known of how one job scales: id of the submission, and what."""
        row = self._db.execute(_HINT, {"of_job": job}).one_or_none()
        return None if row is None else (row.id, _knowledge(row.job, row.body))

    def save_hints(self, job: str, job_id: str, knowledge: Knowledge) -> None:
        """Write what is known of a job in place of what was."""
        values = {"job": job, "id": job_id, "body": _body(knowledge)}
        self._db.execute(_PUT_HINTS[self._db.dialect.name], values)

    def forget_hints(self, kept: int = HINTS_KEPT_COUNT) -> None:
        """Forget what is known of settled jobs, but for those that were submitted last."""
        self._db.execute(_FORGET_HINTS, {"kept": kept})

    # ------------------------------------------------------------------------------- the plans

    def add_plan(self, plan: Wishes, fence: int) -> None:
        """Write a plan under its number, which is a new one."""
        values = {"number": plan.number, "fence": fence, "made_at_s": plan.made_at_s}
        self._db.execute(insert(t.plans).values(body=_body(plan), **values))

    def forget_plans(self, newest: int) -> None:
        """Keep the last plans up to ``newest`` only."""
        older = select(_P.number).order_by(_P.number.desc()).offset(PLANS_KEPT_COUNT).limit(1)
        bound = self._db.execute(older).scalar_one_or_none()
        if bound is not None and bound < newest:
            self._db.execute(delete(t.plans).where(_P.number <= bound))

    def newest_plan(self) -> Wishes | None:
        """Return the newest plan."""
        body = self._db.execute(_NEWEST_PLAN).scalar_one_or_none()
        return None if body is None else from_record(Wishes, json.loads(body), "plan")


_LEASE = select(*(_L[field.name] for field in fields(Lease))).where(_L.name == LEASE)
_LOCK_LEASE = _LEASE.with_for_update()
_ROW = select(_J.name, _J.version, _J.body)
_OPEN_JOBS = _ROW.where(_J.settled.is_(False)).order_by(_J.submitted_at_s, _J.name)
_OPEN_COUNT = select(func.count()).select_from(t.jobs).where(_J.settled.is_(False))
_JOBS = _ROW.order_by(_J.submitted_at_s.desc(), _J.name).limit(bindparam("limit"))
_JOB = _ROW.where(_J.name == bindparam("of_name"))
_SAVE_JOB = (
    update(t.jobs)
    .where(_J.name == bindparam("of_name"), _J.version == bindparam("of_version"))
    .values(
        version=bindparam("next_version"),
        settled=bindparam("settled"),
        submitted_at_s=bindparam("submitted_at_s"),
        body=bindparam("body"),
    )
)
_EXECUTORS = select(t.executors).order_by(_E.node)
_EXECUTOR = select(t.executors).where(_E.node == bindparam("of_node")).with_for_update()
_RENEW = (
    update(t.executors)
    .where(_E.node == bindparam("of_node"))
    .values(lease_until_s=bindparam("until_s"))
)
_FORGET = delete(t.executors).where(_E.lease_until_s < bindparam("before_s"))
_HINTS = select(t.hints)
_HINT = select(t.hints).where(_H.job == bindparam("of_job"))
_OLD_HINTS = (
    select(_H.job)
    .join(t.jobs, _J.name == _H.job)
    .where(_J.settled.is_(True))
    .order_by(_J.submitted_at_s.desc(), _J.name)
    .offset(bindparam("kept"))
    .limit(HINTS_FORGOTTEN_MAX)
)
_FORGET_HINTS = delete(t.hints).where(_H.job.in_(_OLD_HINTS))
_ASIDES = select(t.asides)
_FORGET_ASIDE = delete(t.asides).where(_A.node == bindparam("of_node"))
_NEWEST_PLAN = select(_P.body).order_by(_P.number.desc()).limit(1)


def _executor(row: Any) -> ExecutorRow:
    report = from_record(ExecutorReport, json.loads(row.body), row.node)
    return ExecutorRow(node=row.node, report=report, lease_until_s=row.lease_until_s)


@lru_cache(2 * HINTS_KEPT_COUNT)
def _knowledge(job: str, body: str) -> Knowledge:
    return from_record(Knowledge, json.loads(body), job)


def _body(value: Any) -> str:
    return json.dumps(to_record(value))
