"""What people look at: one snapshot of jobs, nodes and the newest plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast_services.scheduler.domain.advance import in_queue
from holdfast_services.scheduler.domain.cluster import Cluster
from holdfast_services.scheduler.domain.job import Job
from holdfast_services.scheduler.domain.wishes import Wishes
from holdfast_services.scheduler.storage import Lease, Statements
from holdfast_services.scheduler.usecases.deciding import Heard, read_cluster
from holdfast_services.scheduler.usecases.jobs import LISTED_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """All that is shown. ``jobs`` are those that are not over, in the queue's order."""

    jobs: Sequence[Job]
    over: Sequence[Job]
    cluster: Cluster
    plan: Wishes | None
    lease: Lease
    now_s: float

    @property
    def queue(self) -> list[Job]:
        """Jobs that wait for GPUs."""
        return [job for job in self.jobs if not job.parts]


def look(statements: Statements, *, limit: int = LISTED_MAX) -> Seen:
    """Return what there is to see now; ``limit`` bounds the jobs that are over."""
    now_s = statements.now_s()
    opened = [kept.job for kept in statements.open_jobs()]
    over = [kept.job for kept in statements.jobs(limit) if kept.job.over]
    nobody = Heard(rounds=None, agents=None, for_s=0.0)
    return Seen(
        jobs=in_queue(job for job in opened if not job.over),
        over=over,
        cluster=read_cluster(statements, nobody, now_s),
        plan=statements.newest_plan(),
        lease=statements.lease(),
        now_s=now_s,
    )
