"""What people and Prometheus see of where the time of jobs went (G23)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from pydantic import BaseModel

from holdfast_services.metadata.domain.accounting import shown
from holdfast_services.metadata.domain.ledger import Month, total
from holdfast_services.metadata.domain.model import Run
from holdfast_services.metadata.domain.node_view import World
from holdfast_services.metadata.edges.cost_figures import JOBS_COUNT_MAX


class MonthDoc(BaseModel):
    """Where the time of a job went in a month, seconds; ``lost_s`` and ``down_s`` by cause."""

    month: str
    trained_s: float
    productive_s: float
    stalled_s: float
    lost_s: Mapping[str, float]
    down_s: Mapping[str, float]
    productive_share: float | None


class LedgerDoc(BaseModel):
    """Where the time of a job went: month by month, the newest last, and in all of them."""

    job: str
    months: list[MonthDoc]
    total: MonthDoc


def ledger_doc(run: Run, world: World) -> LedgerDoc:
    """Return a job's ledger, with what goes on now."""
    months = shown(run, world.now_s).months
    return LedgerDoc(job=run.job, months=[*map(_month, months)], total=_month(total(months)))


def _month(month: Month) -> MonthDoc:
    return MonthDoc(
        month=month.name,
        trained_s=month.trained_s,
        productive_s=month.productive_s,
        stalled_s=month.stalled_s,
        lost_s={str(cause): seconds for cause, seconds in month.lost_s.items()},
        down_s={str(cause): seconds for cause, seconds in month.down_s.items()},
        productive_share=month.productive_share,
    )


def ledger_family(world: World) -> Iterator[Metric]:
    """Yield where the time of jobs went, of the first jobs by name."""
    about = "Where the time of a job went: productive, stalled, lost or down, and why."
    found = GaugeMetricFamily("holdfast_ledger_seconds", about, labels=["job", "kind", "cause"])
    there = [run for run in world.runs if not run.removed]
    for run in sorted(there, key=lambda run: run.job)[:JOBS_COUNT_MAX]:
        spent = total(shown(run, world.now_s).months)
        found.add_metric([run.job, "productive", ""], spent.productive_s)
        found.add_metric([run.job, "stalled", ""], spent.stalled_s)
        for kind, by_cause in (("lost", spent.lost_s), ("down", spent.down_s)):
            for cause, seconds in by_cause.items():
                found.add_metric([run.job, kind, cause], seconds)
    yield found
