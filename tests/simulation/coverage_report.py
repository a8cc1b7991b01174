"""Which branches of the domains a set of histories takes, and in how many of them each."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path

from coverage import Coverage
from coverage.python import PythonFileReporter

PACKAGES = ("holdfast_services.metadata.domain", "holdfast_services.agent.domain")
RAREST_COUNT = 10

Branch = tuple[int, int]

_ROOT = Path(__file__).parents[2]


def report(seeds: Iterable[int], live: Callable[[int], None]) -> str:
    """Live through each seed; return which branches they took, to be printed.

    One coverage context per seed tells how many of them take a branch. Only what runs inside
    functions counts: the modules are imported before, and branch nowhere else.
    """
    measured = Coverage(
        data_file=None, branch=True, source_pkgs=PACKAGES, config_file=False, messages=False
    )
    measured.set_option("run:disable_warnings", ["module-not-measured"])
    measured.set_option("run:core", "ctrace")  # it knows contexts and branches in every Python
    seeds = list(seeds)
    measured.start()
    try:
        for seed in seeds:
            measured.switch_context(str(seed))
            live(seed)
    finally:
        measured.stop()
    return _told(measured, len(seeds))


def _told(measured: Coverage, seeds_count: int) -> str:
    lines, never, taken = [], [], []
    for path in _files():
        branches, taken_by = _branches(measured, path)
        name = os.path.relpath(path, _ROOT)
        count = sum(1 for branch in branches if taken_by[branch])
        lines.append(f"{count:5} / {len(branches):<5} {name}")
        for line, to in sorted(branches):
            place = f"{name}:{line} -> {to if to > 0 else 'exit'}"
            if taken_by[line, to]:
                taken.append((taken_by[line, to], place))
            else:
                never.append(place)
    taken.sort(key=lambda one: one[0])
    return "\n".join([
        "branches taken / all:",
        *lines,
        f"{len(taken):5} / {len(taken) + len(never):<5} in all",
        "",
        f"never taken, {len(never)}:",
        *(f"  {place}" for place in never),
        "",
        f"the rarest of those taken, in how many of {seeds_count} seeds:",
        *(f"{count:5}  {place}" for count, place in taken[:RAREST_COUNT]),
    ])  # fmt: skip


def _files() -> list[Path]:
    return sorted(
        path
        for package in PACKAGES
        for folder in (find_spec(package).submodule_search_locations)
        for path in Path(folder).glob("*.py")
    )


def _branches(measured: Coverage, path: Path) -> tuple[set[Branch], Counter[Branch]]:
    """Return the branches of a file, and how many seeds took each."""
    reporter = PythonFileReporter(str(path), measured)
    exits, exempt = reporter.exit_counts(), reporter.no_branch_lines()
    branches = {
        (line, to) for line, to in reporter.arcs() if exits.get(line, 0) > 1 and line not in exempt
    }
    data, taken_by = measured.get_data(), Counter()
    for context in sorted(data.measured_contexts()):
        if context:  # what ran between seeds has none
            data.set_query_context(context)
            arcs = data.arcs(str(path)) or ()
            taken_by.update(branches & reporter.translate_arcs(arcs))
    return branches, taken_by
