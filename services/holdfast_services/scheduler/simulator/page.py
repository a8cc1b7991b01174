"""The report as one HTML page: a table of runs and charts, without anything from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from holdfast_services.scheduler.simulator.charts import chart, cumulative
from holdfast_services.scheduler.simulator.results import COLUMNS, Result, cells

STYLE = """
body { font: 15px system-ui, sans-serif; margin: 2em auto; max-width: 75em; color: #222; }
table { border-collapse: collapse; } th, td { padding: .2em .8em; text-align: right; }
th { border-bottom: 1px solid #888; } td:first-child, th:first-child { text-align: left; }
svg { width: 36em; max-width: 100%; font-size: 11px; } .title { font-size: 13px; }
"""


def page(title: str, scenario: str, results: Sequence[Result]) -> str:
    """Return the page. The same results make the same bytes."""
    head = "".join(f"<th>{escape(column)}</th>" for column in COLUMNS)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells(result.summary)) + "</tr>\n"
        for result in results
    )
    charts = "\n".join(_charts(results))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style></head><body>\n"
        f"<h1>{escape(title)}</h1>\n<p>{escape(scenario)}</p>\n"
        f"<table><tr>{head}</tr>\n{rows}</table>\n{charts}\n</body></html>\n"
    )


def _charts(results: Sequence[Result]) -> list[str]:
    by_policy = {result.summary.policy: result for result in results}
    hours = {
        name: [(one.at_s / 3600, one) for one in result.run.rounds]
        for name, result in by_policy.items()
    }
    return [
        chart(
            "Completion times",
            {name: cumulative([j.jct_s for j in one.jobs]) for name, one in by_policy.items()},
            across="seconds", up="share of jobs", log=True,
        ),
        chart(
            "GPUs in use",
            {name: [(at, float(one.gpus)) for at, one in rounds] for name, rounds in hours.items()},
            across="hours", up="GPUs",
        ),
        chart(
            "Jobs",
            {
                name: [(at, float(one.active)) for at, one in rounds]
                for name, rounds in hours.items()
            },
            across="hours", up="jobs that are there",
        ),
        chart(
            "Finish-time fairness",
            {name: cumulative([j.ftf for j in one.jobs]) for name, one in by_policy.items()},
            across="times the time alone on a fair share", up="share of jobs", log=True,
        ),
        chart(
            "Cost so far",
            {name: _summed(result) for name, result in by_policy.items()},
            across="hours", up="price of the GPUs that jobs had",
        ),
        chart(
            "Price of a GPU",
            {name: [(at, one.price) for at, one in rounds] for name, rounds in hours.items()},
            across="hours", up="seconds of delay per second",
        ),
    ]  # fmt: skip


def _summed(result: Result) -> list[tuple[float, float]]:
    whole, found = 0.0, []
    for one in result.run.rounds:
        whole += one.cost_per_h * result.run.scenario.round_s / 3600
        found.append((one.at_s / 3600, whole))
    return found
