"""``python -m tests.bench.sched_page``: write the table of policies of the scheduler's page.

``--measure`` simulates all policies under all conditions again, which takes a quarter of an hour of
two cores. What was found is kept beside the page. The records are on the page of figures.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from tests.bench.sched_jct import DATA, FOLDERS, LACKS, TWO

from holdfast_services.scheduler.domain.policies.fifo import Fifo
from holdfast_services.scheduler.domain.policies.pollux import Pollux
from holdfast_services.scheduler.domain.policies.price import Price
from holdfast_services.scheduler.domain.policies.sia import Sia
from holdfast_services.scheduler.simulator.alone import Alone
from holdfast_services.scheduler.simulator.reading import read_trace
from holdfast_services.scheduler.simulator.results import result_of
from holdfast_services.scheduler.simulator.scenario import Scenario
from holdfast_services.scheduler.simulator.simulation import simulate

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "scheduler.md"
FOUND = PAGE.with_suffix(".json")
BLOCK = re.compile(r"(<!-- policies -->\n)(.*?)(<!-- end of policies -->)", re.DOTALL)
POLICIES = {"fifo": Fifo, "pollux": Pollux, "sia": Sia, "price": Price}
CONDITIONS: Mapping[str, tuple[int, float, Scenario]] = {
    "load 0.5": (1, 0.5, Scenario()),
    "load 1": (1, 1.0, Scenario()),
    "load 1.5": (2, 0.75, Scenario()),
    "load 2": (2, 1.0, Scenario()),
    "load 1, history": (1, 1.0, Scenario(history=True)),
    "load 1, 10 % noise, 2 % outliers": (1, 1.0, Scenario(noise=0.1, outliers=0.02)),
    "load 1, a node fails each 12 h": (1, 1.0, Scenario(mtbf_s=12 * 3600.0)),
    "load 1, 8 spot nodes": (1, 1.0, Scenario(spot_nodes=8)),
}
"""Which load's folder, the part of its jobs that is drawn, and what else is so."""


def rendered(page: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the page with its table made from ``rows``."""
    return BLOCK.sub(lambda found: found[1] + table(rows) + found[3], page)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a row for each condition, a column for each policy."""
    cells = {(row["condition"], row["policy"]): row for row in rows}
    heads = " | ".join(f"`{name}`" for name in POLICIES)
    lines = [f"| | {heads} |", "|---" * (len(POLICIES) + 1) + "|"]
    for condition in CONDITIONS:
        found = [cells[condition, name] for name in POLICIES]
        texts = [f"{one['mean_s']:.0f} ({one['ftf']:.1f})" for one in found]
        lines.append(f"| {condition} | {' | '.join(texts)} |")
    return "\n".join(lines) + "\n"


@cache
def _alone() -> Alone:
    return Alone(Scenario().gpus_per_node)


def _measured(asked: tuple[str, str]) -> dict[str, Any]:
    condition, policy = asked
    load, keep, scenario = CONDITIONS[condition]
    found = []
    for number in TWO:
        path = DATA / FOLDERS[load] / f"workload-{number}.csv"
        trace = read_trace(path, DATA, keep=keep, seed=scenario.seed)
        run = simulate(trace, POLICIES[policy](), scenario)
        found.append(result_of(run, _alone()).summary)
    return {
        "condition": condition,
        "policy": policy,
        "mean_s": fmean(one.jct_mean_s for one in found),
        "ftf": max(one.ftf_worst for one in found),
    }


def main() -> int:
    """Measure, if asked to, and write the table; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.sched_page", description=__doc__)
    parser.add_argument("--measure", action="store_true", help="simulate all policies again")
    if parser.parse_args().measure:
        if LACKS:
            sys.stderr.write(LACKS + "\n")
            return 1
        asked = [(condition, policy) for condition in CONDITIONS for policy in POLICIES]
        with ProcessPoolExecutor(2) as pool:
            rows = list(pool.map(_measured, asked))
        FOUND.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    rows = json.loads(FOUND.read_text(encoding="utf-8"))
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
