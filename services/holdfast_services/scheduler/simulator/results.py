"""What a simulation says: figures of a run as a row for people, and as JSON for machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from holdfast_services.scheduler.simulator.alone import Alone
from holdfast_services.scheduler.simulator.figures import (
    JobFigures,
    Summary,
    job_figures,
    quantile,
    summary,
)
from holdfast_services.scheduler.simulator.simulation import Run

COLUMNS = (
    "policy", "mean s", "p50 s", "p99 s", "makespan s", "in use", "goodput", "cost", "worst FTF",
    "starts",
)  # fmt: skip
DIGITS = 6
"""Of what is written: more are noise of the last bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A run with its figures."""

    run: Run
    jobs: list[JobFigures]
    summary: Summary


def result_of(run: Run, alone: Alone) -> Result:
    """Return the figures of a run."""
    jobs = job_figures(run, alone)
    return Result(run=run, jobs=jobs, summary=summary(run, jobs, alone))


def cells(one: Summary) -> tuple[str, ...]:
    """Return a run as the cells of a row, see ``COLUMNS``."""
    return (
        one.policy,
        f"{one.jct_mean_s:.0f}",
        f"{one.jct_p50_s:.0f}",
        f"{one.jct_p99_s:.0f}",
        f"{one.makespan_s:.0f}",
        f"{one.utilisation:.1%}",
        f"{one.goodput:.1f}",
        f"{one.cost:.0f}",
        f"{one.ftf_worst:.2f}",
        f"{one.starts_mean:.2f}",
    )


def document(results: Sequence[Result]) -> dict[str, Any]:
    """Return all figures as JSON has them, rounded to what is not noise."""
    first = results[0].run
    return {
        "format": "holdfast.simulation/1",
        "scenario": asdict(first.scenario),
        "runs": [
            {
                "summary": _rounded(asdict(one.summary)),
                "applications": _applications(one.jobs),
                "jobs": [_rounded(asdict(job)) for job in one.jobs],
                "rounds": [_rounded(asdict(each)) for each in one.run.rounds],
            }
            for one in results
        ],
    }


def _applications(jobs: Sequence[JobFigures]) -> list[dict[str, Any]]:
    whole_s = sum(job.jct_s for job in jobs) or 1.0
    found = []
    for name in sorted({job.application for job in jobs}):
        times = sorted(job.jct_s for job in jobs if job.application == name)
        found.append(
            _rounded(
                {
                    "application": name,
                    "jobs": len(times),
                    "jct_mean_s": sum(times) / len(times),
                    "jct_p50_s": quantile(times, 0.5),
                    "share_of_all": sum(times) / whole_s,
                }
            )
        )
    return found


def _rounded(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: round(value, DIGITS) if isinstance(value, float) else value
        for name, value in fields.items()
    }
