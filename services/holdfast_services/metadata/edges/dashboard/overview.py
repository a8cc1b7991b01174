"""All jobs on one page, those that train first; a page of them at a time. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlencode

from holdfast.core.byte_sizes import format_bytes
from holdfast.core.decision import DecisionState
from holdfast_services.metadata.domain.model import Run
from holdfast_services.metadata.domain.node_view import World
from holdfast_services.metadata.edges.dashboard.facts import Facts, facts_of, training
from holdfast_services.metadata.edges.dashboard.paging import page_of
from holdfast_services.metadata.edges.dashboard.safety import (
    RecoveryPoint,
    recovery_points,
    recovery_time,
    restore_s,
)
from holdfast_services.metadata.edges.dashboard.texts import counted, job_path, lasted

JOBS_PER_PAGE = 50
STATES = ("all", "training", "stopped", "trouble")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Which jobs somebody wants to see: whose name has ``name`` in it, in ``state``."""

    name: str = ""
    state: str = "all"
    page: int = 1

    def path(self, page: int) -> str:
        """Return the address of another page with the same filters."""
        fields = {"name": self.name, "state": "" if self.state == "all" else self.state}
        fields["page"] = str(page) if page > 1 else ""
        query = urlencode({name: value for name, value in fields.items() if value})
        return f"/?{query}" if query else "/"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """One job."""

    job: str
    path: str
    state: str
    ranks: str
    step: str
    newest: str
    level: str
    points: tuple[RecoveryPoint, ...]
    recovery: str
    recovery_time: str
    stall: str
    pace: str
    troubles: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """A page of jobs, and the cluster in one line; ``found`` jobs fit what was asked."""

    asked: Asked
    jobs: tuple[JobRow, ...]
    found: str
    summary: str
    newer: str
    older: str
    place: str
    states: tuple[str, ...] = STATES


def overview(
    asked: Asked, names: Sequence[str], world: World, load: Callable[[str], Run | None]
) -> Overview:
    """Return the page.

    Args:
        asked: What is to be seen.
        names: All jobs there are.
        world: What happens now; jobs that are not in it have stopped.
        load: Returns the run of such a job.
    """
    runs = {run.job: run for run in world.runs}
    fitting = [name for name in names if asked.name.lower() in name.lower()]
    fitting = [name for name in fitting if _fits(asked.state, runs.get(name), world)]
    fitting.sort(key=lambda name: (name not in runs or not training(runs[name], world.now_s), name))
    page = page_of(fitting, asked.page, JOBS_PER_PAGE, asked.path)
    found = [runs.get(name) or load(name) for name in page.shown]
    return Overview(
        asked=asked,
        jobs=tuple(job_row(facts_of(run, world)) for run in found if run and not run.removed),
        found=counted(len(fitting), "job"),
        summary=summary(names, world),
        newer=page.newer,
        older=page.older,
        place=page.place,
    )


def summary(names: Sequence[str], world: World) -> str:
    """Return the cluster in one line."""
    live = world.live.values()
    used = sum(node.inventory.used_bytes for node in live)
    budget = sum(node.inventory.budget_bytes for node in live)
    trains = sum(training(run, world.now_s) for run in world.runs)
    return " · ".join(
        (
            f"{counted(len(names), 'job')}, {trains:,} training",
            f"{len(live):,} of {counted(len(world.nodes), 'node')} live",
            f"memory {format_bytes(used)} of {format_bytes(budget)}",
        )
    )


def _fits(state: str, run: Run | None, world: World) -> bool:
    if state == "training":
        return run is not None and training(run, world.now_s)
    if state == "stopped":
        return run is None or not training(run, world.now_s)
    if state == "trouble":
        return run is not None and bool(_troubles(run, world.shortages.get(run.id, "")))
    return True


def job_row(facts: Facts) -> JobRow:
    """Return the row of one job."""
    run = facts.run
    newest = facts.usable[0] if facts.usable else None
    return JobRow(
        job=run.job,
        path=job_path(run.job),
        state=facts.state,
        ranks=f"{facts.world_size:,}" if facts.world_size else "-",
        step=f"{facts.step:,}",
        newest=f"{newest.id.step:,}" if newest else "none",
        level=level(newest.durable_at_s, newest.replicated_at_s) if newest else "",
        points=recovery_points(facts),
        recovery=lasted(restore_s(facts)) if restore_s(facts) else "not measured",
        recovery_time=recovery_time(facts),
        stall=lasted(facts.costs.stall_s) if facts.costs.stall_s else "not measured",
        pace=pace(facts),
        troubles=_troubles(run, facts.shortage),
    )


def level(durable_at_s: float | None, replicated_at_s: float | None) -> str:
    """Return the highest level that a committed checkpoint has reached."""
    if durable_at_s is not None:
        return "durable"
    return "local" if replicated_at_s is None else "replicated"


def pace(facts: Facts) -> str:
    """Return how often rank 0 wishes to save, and why; empty: it does not say."""
    status = facts.statuses.get(0)
    if status is None or not status.live or not status.report.save_interval_s:
        return ""
    every = f"every {lasted(status.report.save_interval_s)}"
    return status.report.interval_why or every


def _troubles(run: Run, shortage: str) -> tuple[str, ...]:
    found = []
    decision = run.decision
    if decision is not None and decision.state is DecisionState.LOST:
        found.append(f"restore lost: {decision.reason}" if decision.reason else "restore lost")
    if shortage and run.current is not None:
        found.append(f"stays local: {shortage}")
    if any(row.bad for row in run.checkpoints):
        found.append("objects of a checkpoint were read back wrong")
    return tuple(found)
