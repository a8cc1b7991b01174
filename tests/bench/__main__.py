"""``python -m tests.bench``: measure Holdfast against its peers, write ``build/bench.json``.

Each benchmark runs in a process of its own, with a stack of its own, one after the other.
"""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tests.bench.harness import machine

MODULES = (
    "light",
    "stall",
    "stall_growth",
    "snapshot",
    "restore",
    "fetch",
    "training",
    "replicating",
    "memory",
    "persist",
    "draining",
    "catalogue",
    "page",
    "needs",
    "parity",
    "planner",
    "save_plan",
    "dcp",
    "deepspeed",
    "reshard",
    "recover",
    "rescale",
    "start",
    "launches",
    "elastic",
    "auto",
    "sched_rounds",
    "sched_jct",
)
MODULE_S_MAX = 1500.0
END_S_MAX = 60.0


def main() -> int:
    """Run what was asked for; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--only", default="", metavar="NAME", help="records that start with NAME")
    parser.add_argument("--quick", action="store_true", help="smaller state: shows that it works")
    parser.add_argument("--result", type=Path, default=Path("build/bench.json"))
    parser.add_argument("--inside", metavar="MODULE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        return _inside(arguments.inside, arguments)
    records: list[dict[str, Any]] = [machine()]
    failed = []
    for module in MODULES:
        bench = importlib.import_module(f"tests.bench.{module}")
        names = bench.NAMES
        if not any(name.startswith(arguments.only) for name in names):
            continue
        if lacks := getattr(bench, "LACKS", ""):  # what it measures with is not on this machine
            print(f"{module}: left out, {lacks}", flush=True)
            continue
        print(f"{', '.join(names)} …", flush=True)
        found, whole = _measure(module, arguments)
        records += found
        if not whole:
            failed.append(module)
    _print(records[1:])
    _write(arguments.result, records, whole=not arguments.only)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _measure(module: str, arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    """Return the records of one module, measured in a fresh process, and whether they are all."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "records.json"
        command = [sys.executable, "-W", "ignore", "-m", "tests.bench", "--inside", module]
        command += ["--result", str(result), "--only", arguments.only]
        command += ["--quick"] if arguments.quick else []
        code = _run(module, command)
        records: list[dict[str, Any]] = []
        if result.exists():
            records = json.loads(result.read_text(encoding="utf-8"))
        return records, bool(records) and code == 0


def _run(module: str, command: Sequence[str]) -> int:
    """Run a module; at the deadline it is told to end, so that it leaves no stack behind."""
    with subprocess.Popen(command) as process:
        try:
            return process.wait(MODULE_S_MAX)
        except subprocess.TimeoutExpired:
            print(f"{module}: not within {MODULE_S_MAX:.0f} s", file=sys.stderr)
        process.send_signal(signal.SIGINT)
        try:
            process.wait(END_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
        return 1


def _inside(module: str, arguments: argparse.Namespace) -> int:
    """Write each record when it is there: those before a failure or the deadline stay."""
    measure = importlib.import_module(f"tests.bench.{module}").measure
    records: list[dict[str, Any]] = []
    for record in measure(quick=arguments.quick):
        if record.name.startswith(arguments.only):
            records.append(record.as_json())
            draft = arguments.result.with_suffix(".tmp")
            draft.write_text(json.dumps(records), encoding="utf-8")
            draft.replace(arguments.result)
    return 0


def _print(records: Sequence[dict[str, Any]]) -> None:
    table = Table()
    for column in ("name", "ours", "unit", "peer", "ratio", "target", "", "how measured"):
        table.add_column(column, overflow="fold")
    for record in records:
        peer_value = record["peer_value"]
        table.add_row(
            record["name"],
            f"{record['value']:.4g}",
            record["unit"],
            "" if peer_value is None else f"{peer_value:.4g}, {record['peer']}",
            f"{record['ratio']:.3g}",
            record["target"],
            ("met" if record["met"] else "MISSED") if record["target"] else "",
            record["note"],
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _write(path: Path, records: Sequence[dict[str, Any]], *, whole: bool) -> None:
    """Write the records; a partial run replaces only those that it measured."""
    kept: list[dict[str, Any]] = []
    if not whole and path.exists():
        new = {record["name"] for record in records}
        old = json.loads(path.read_text(encoding="utf-8"))
        kept = [record for record in old if record["name"] not in new]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([*records, *kept], indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
