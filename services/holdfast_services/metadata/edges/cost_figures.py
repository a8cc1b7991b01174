"""What saves and restores cost, by job, for Prometheus; one family for each field of a cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, fields

from holdfast.core.reports import RankCosts
from holdfast_services.metadata.domain import costs
from holdfast_services.metadata.domain.attempts import status_by_rank
from holdfast_services.metadata.domain.node_view import World

JOBS_COUNT_MAX = 200
"""Jobs that have lines of their own, by name; of more jobs than that only the number is told."""

_UNITS = {"s": "seconds", "bytes": "bytes"}


def cost_lines(world: World) -> Iterator[str]:
    """Return the lines of all cost families; a figure that is not known has no line."""
    known = {
        run.job: costs.shown(run.current, status_by_rank(run, world.nodes))
        for run in sorted(world.runs, key=lambda run: run.job)
        if run.current
    }
    listed = dict(list(known.items())[:JOBS_COUNT_MAX])
    for spec in fields(RankCosts):
        name = family(spec)
        yield f"# HELP {name} {_help(spec)}\n# TYPE {name} gauge\n"
        for job, cost in listed.items():
            if value := getattr(cost, spec.name):
                yield f'{name}{{job="{job}"}} {value:.15g}\n'
    name = "holdfast_attempt_jobs_not_listed"
    yield f"# HELP {name} Jobs beyond the first {JOBS_COUNT_MAX}, without lines of their own.\n"
    yield f"# TYPE {name} gauge\n{name} {len(known) - len(listed)}\n"


def family(spec: Field[object]) -> str:
    """Return the name of a field's family: its unit last, spelled out."""
    stem, _, unit = spec.name.rpartition("_")
    return f"holdfast_attempt_{stem}_{_UNITS[unit]}"


def _help(spec: Field[object]) -> str:
    over = "the slowest rank's" if spec.metadata["over"] is max else "the sum over the ranks"
    return f"{spec.metadata['about']}, {over}, {_UNITS[spec.name.rpartition('_')[2]]}."
