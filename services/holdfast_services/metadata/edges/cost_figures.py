"""What saves and restores cost, by job, for Prometheus; one family for each field of a cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, fields

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

from holdfast.core.reports import RankCosts
from holdfast_services.kit.exposition import gauge
from holdfast_services.metadata.domain import costs
from holdfast_services.metadata.domain.attempts import status_by_rank
from holdfast_services.metadata.domain.node_view import World

JOBS_COUNT_MAX = 200
"""Jobs that have lines of their own, by name; of more jobs than that only the number is told."""

_UNITS = {"s": "seconds", "bytes": "bytes"}


def cost_families(world: World) -> Iterator[Metric]:
    """Yield all cost families; a figure that is not known has no line."""
    known = {
        run.job: costs.shown(run.current, status_by_rank(run, world.nodes))
        for run in sorted(world.runs, key=lambda run: run.job)
        if run.current
    }
    listed = dict(list(known.items())[:JOBS_COUNT_MAX])
    for spec in fields(RankCosts):
        found = GaugeMetricFamily(family(spec), _help(spec), labels=["job"])
        for job, cost in listed.items():
            if value := getattr(cost, spec.name):
                found.add_metric([job], value)
        yield found
    yield gauge(
        "holdfast_attempt_jobs_not_listed",
        f"Jobs beyond the first {JOBS_COUNT_MAX}, without lines of their own.",
        len(known) - len(listed),
    )


def family(spec: Field[object]) -> str:
    """Return the name of a field's family: its unit last, spelled out."""
    stem, _, unit = spec.name.rpartition("_")
    return f"holdfast_attempt_{stem}_{_UNITS[unit]}"


def _help(spec: Field[object]) -> str:
    over = "the slowest rank's" if spec.metadata["over"] is max else "the sum over the ranks"
    return f"{spec.metadata['about']}, {over}, {_UNITS[spec.name.rpartition('_')[2]]}."
