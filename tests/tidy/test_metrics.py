"""The page of metrics has all that there are, as what they are; so have alerts and dashboard."""

import json
import re
from dataclasses import fields
from pathlib import Path

from holdfast.core.reports import RankCosts
from holdfast_services.metadata import histograms
from holdfast_services.metadata.domain.durations import Span
from holdfast_services.metadata.edges.cost_figures import family

ROOT = Path(__file__).parents[2]
KINDS = {
    "gauge": "gauge",
    "GaugeMetricFamily": "gauge",
    "counter": "counter",
    "CounterMetricFamily": "counter",
    "Failures": "counter",
    "_by_transport": "counter",
    "SummaryMetricFamily": "summary",
    "Histogram": "histogram",
}
MADE = re.compile(rf"\b({'|'.join(KINDS)})\(\s*\"(holdfast_\w+)\"")
ROW = re.compile(r"^\| `(holdfast_\w+)` \| (\w+) \|", re.MULTILINE)


def in_code():
    found = {family(spec): "gauge" for spec in fields(RankCosts)}
    found |= {histograms.name(span): "histogram" for span in Span}
    services = ROOT / "services/holdfast_services"
    for path in (*services.glob("*/edges/*.py"), *services.glob("*/metrics.py")):
        for made_by, name in MADE.findall(path.read_text()):
            kind = KINDS[made_by]
            found[name + "_total" * (kind == "counter")] = kind
    return found


def test_the_page_of_metrics_has_all_there_are():
    rows = ROW.findall((ROOT / "docs/reference/metrics.md").read_text())

    assert dict(rows) == in_code()
    assert len(rows) == len(dict(rows))


def test_alerts_and_dashboard_ask_for_metrics_that_there_are():
    board = json.loads((ROOT / "deploy/grafana/dashboards/holdfast.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked.append((ROOT / "deploy/prometheus/alerts.yml").read_text())
    names = set(re.findall(r"\bholdfast_\w+", "\n".join(asked)))

    parts = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}
    served = {n + part for n, kind in in_code().items() for part in parts.get(kind, ("",))}
    assert names <= served
