"""``python -m holdfast_services.scheduler.simulator``: what ``holdfast simulate`` runs.

Reads one JSON object of what is asked from standard input; writes JSON lines: ``{"ended": n}`` as
jobs end, then ``{"result": ...}`` with the table and where files were written, or ``{"error":
...}``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from holdfast.errors import CheckpointError
from holdfast_services.scheduler.domain.policies.fifo import Fifo
from holdfast_services.scheduler.domain.policies.plan import Policy
from holdfast_services.scheduler.domain.policies.pollux import Pollux
from holdfast_services.scheduler.domain.policies.price import Price
from holdfast_services.scheduler.domain.policies.sia import Sia
from holdfast_services.scheduler.simulator.alone import Alone
from holdfast_services.scheduler.simulator.page import page
from holdfast_services.scheduler.simulator.reading import read_trace
from holdfast_services.scheduler.simulator.results import COLUMNS, cells, document, result_of
from holdfast_services.scheduler.simulator.scenario import Scenario
from holdfast_services.scheduler.simulator.simulation import simulate

POLICIES: Mapping[str, Callable[[], Policy]] = {
    "fifo": Fifo, "pollux": Pollux, "price": Price, "sia": Sia,
}  # fmt: skip


def main() -> int:
    """Do what is asked; return the exit code."""
    said = _own_output()

    def say(line: Mapping[str, Any]) -> None:
        said.write(json.dumps(line) + "\n")
        said.flush()

    try:
        say({"result": answer(json.load(sys.stdin), say)})
    except CheckpointError as error:
        say({"error": {"kind": error.kind, "message": str(error)}})
        return 1
    except BrokenPipeError:  # whoever asked has gone
        return 1
    return 0


def _own_output() -> TextIO:
    """Return standard output for us alone: the solver of integer programs prints to it at times."""
    ours = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    return ours


def answer(asked: Mapping[str, Any], say: Callable[[Mapping[str, Any]], None]) -> dict[str, Any]:
    """Return the table, after writing the files that were asked for."""
    scenario = Scenario(**asked["scenario"])
    trace = read_trace(
        Path(asked["trace"]), asked["traces"] and Path(asked["traces"]),
        keep=asked["keep"], seed=scenario.seed,
    )  # fmt: skip
    say({"jobs": len(trace) * len(asked["policies"])})
    done = 0

    def ended() -> None:
        nonlocal done
        done += 1
        say({"ended": done})

    alone = Alone(scenario.gpus_per_node)
    results = [
        result_of(simulate(trace, POLICIES[name](), scenario, ended), alone)
        for name in asked["policies"]
    ]
    files = []
    if asked["out"]:
        text = json.dumps(document(results), indent=1) + "\n"
        files.append(_written(Path(asked["out"]), text))
    if asked["html"]:
        title = f"{Path(asked['trace']).name}, {len(trace)} jobs on {scenario.gpus} GPUs"
        files.append(_written(Path(asked["html"]), page(title, str(scenario), results)))
    return {
        "columns": COLUMNS,
        "rows": [cells(one.summary) for one in results],
        "runs": [
            {"summary": run["summary"], "applications": run["applications"]}
            for run in document(results)["runs"]
        ],
        "files": files,
    }


def _written(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
    return str(path)


if __name__ == "__main__":
    sys.exit(main())
