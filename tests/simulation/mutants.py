"""Mutants: the product with one guard taken away each, to see whether the simulator misses it.

A mutant that no seed finds is a hole in the simulator: no history needs that guard, or nobody
looks at what it keeps. Defects that were mended once are mutants too, under their old names; what
several guards keep by now takes all of them away. Each change names text that is in its file
once, so that a mutant that no longer fits is an error and not a guard that was never taken.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.simulation.guards import MUTANTS
from tests.simulation.mutant import Mutant

ROOT = Path(__file__).parents[2]
COPIED = ("sdk", "services", "tests/simulation", "tests/said.py")
SEEDS_COUNT = 2000
ENOUGH_COUNT = 3
"""Of seeds that a mutant breaks: more say nothing new, and a mutant that many miss takes long."""
ALONE_SEEDS_COUNT = 50
START_S_MAX = 60.0
SEED_S_MAX = 10.0
WITNESS_FOLDERS = ("tests/simulation/witnesses", "tests/simulation/stories")


class MisfitError(AssertionError):
    """A change names text that is not in its file, or is there more than once."""


def mutated(mutant: Mutant, root: Path = ROOT) -> dict[str, str]:
    """Return path -> text of the files below ``root`` that the mutant changes; all of it compiles.

    Raises:
        MisfitError: a change does not fit the product any more; says which.
    """
    texts: dict[str, str] = {}
    for change in mutant.changes:
        text = texts.get(change.path) or (root / change.path).read_text(encoding="utf-8")
        if (count := text.count(change.old)) != 1:
            raise MisfitError(
                f"mutant {mutant.name}: {change.path} has {count} times, not once: {change.old!r}"
            )
        texts[change.path] = text.replace(change.old, change.new)
    for path, text in texts.items():
        compile(text, f"{path} of mutant {mutant.name}", "exec")
    return texts


@dataclass(frozen=True, slots=True)
class Missed:
    """What broke without a guard, by seed or witness, and how many seeds were lived through."""

    broken: Mapping[str, str]
    seeds_count: int


def witnesses(root: Path = ROOT) -> dict[str, list[str]]:
    """Return mutant -> files of plans, from ``root``, on which it is said to break."""
    found: dict[str, list[str]] = {}
    for path in sorted(path for name in WITNESS_FOLDERS for path in (root / name).glob("*.toml")):
        for mutant in tomllib.loads(path.read_text(encoding="utf-8")).get("misses", ()):
            found.setdefault(mutant, []).append(str(path.relative_to(root)))
    return found


def broken_by(mutant: Mutant, root: Path, seeds_count: int, *, drawn: bool = False) -> Missed:
    """Live through witnesses, then seeds, with a copy of ``root`` that has the mutant's changes.

    One witness that breaks is enough. Of seeds at most ``seeds_count``, and no more once
    ``ENOUGH_COUNT`` have broken; ``drawn``: only these.
    """
    with tempfile.TemporaryDirectory(prefix="mutant") as folder:
        tree = _copy(root, Path(folder))
        for path, text in mutated(mutant, root).items():
            (tree / path).write_text(text, encoding="utf-8")
        for path in () if drawn else witnesses(root).get(mutant.name, ()):
            if broke := _tell(tree, path):
                return Missed({Path(path).stem: broke}, 0)
        return _live(tree, seeds_count) if seeds_count else Missed({}, 0)


def _copy(root: Path, tree: Path) -> Path:
    for name in COPIED:
        if (root / name).is_file():
            shutil.copy(root / name, tree / name)
        else:
            shutil.copytree(root / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tree


def _tell(tree: Path, path: str) -> str:
    """Return what a plan breaks in ``tree``; empty: nothing.

    Raises:
        RuntimeError: the simulator did not even begin, which is no proof of anything.
    """
    try:
        done = _simulation(tree, START_S_MAX + SEED_S_MAX, "--tell", path)
    except subprocess.TimeoutExpired:
        return "deadline: not over"
    if not done.returncode:
        return ""
    _, told, broke = done.stdout.rpartition(" restores; ")
    if not told:
        raise RuntimeError(f"{path} cannot be lived through: {done.stderr[-500:]}")
    return broke.strip()


def _simulation(tree: Path, limit_s: float, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.simulation", *arguments]
    path = os.pathsep.join(str(tree / name) for name in ("sdk", "services", "."))
    env = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"}
    return subprocess.run(
        command, cwd=tree, env=env, timeout=limit_s, capture_output=True, text=True, check=False
    )


def _live(tree: Path, seeds_count: int) -> Missed:
    asked = ("--seeds", str(seeds_count), "--jobs", "1", "--enough", str(ENOUGH_COUNT))
    limit_s = START_S_MAX + seeds_count * SEED_S_MAX
    try:
        done = _simulation(tree, limit_s, "--json", *asked)
    except subprocess.TimeoutExpired:
        return Missed({"all": f"deadline: not over after {limit_s:.0f} s"}, seeds_count)
    try:
        told = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = [f"exit code {done.returncode}", *done.stderr.splitlines()][-1]
        return Missed({"all": last}, seeds_count)
    return Missed(told["broken"], told["seeds"])


def main() -> int:
    """Live through the seeds with each mutant; return how many of them nobody saw."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutants", description=__doc__)
    parser.add_argument(
        "--seeds", type=int, default=SEEDS_COUNT, metavar="N", help="at most, 0: none"
    )
    parser.add_argument("--only", default="", metavar="A,B", help="names of mutants")
    parser.add_argument("--drawn", action="store_true", help="no witnesses: only seeds")
    parser.add_argument("--jobs", type=int, default=2, metavar="J", help="mutants side by side")
    asked = parser.parse_args()
    names = asked.only.split(",") if asked.only else [mutant.name for mutant in MUTANTS]
    if unknown := set(names) - {mutant.name for mutant in MUTANTS}:
        parser.error(f"no mutants of the names {', '.join(sorted(unknown))}")
    mutants = [mutant for mutant in MUTANTS if mutant.name in names]
    with tempfile.TemporaryDirectory(prefix="mutants") as folder:
        # It takes long: what is edited meanwhile must not differ from one mutant to the next.
        return len(_holes(mutants, _copy(ROOT, Path(folder)), asked))


def _holes(mutants: Sequence[Mutant], root: Path, asked: argparse.Namespace) -> list[str]:
    """Print what each mutant broke; return the names of those that broke nothing."""
    for mutant in mutants:
        mutated(mutant, root)  # all fit, before the first one takes its time
    alone_count = min(ALONE_SEEDS_COUNT, asked.seeds)
    if broken := broken_by(Mutant("none", "nothing", ()), root, alone_count).broken:
        raise SystemExit(f"without any mutant {len(broken)} seeds are red: {dict(broken)}")
    holes = []
    with ThreadPoolExecutor(asked.jobs) as pool:
        found = pool.map(
            lambda mutant: broken_by(mutant, root, asked.seeds, drawn=asked.drawn), mutants
        )
        for mutant, missed in zip(mutants, found, strict=True):
            texts = missed.broken.values()
            count = "all" if "all" in missed.broken else len(texts)
            how = f"{count} of {missed.seeds_count}"
            if texts and not missed.seeds_count:
                how = ", ".join(missed.broken)
            promises = ", ".join(sorted({text.partition(":")[0] for text in texts}))
            print(f"{mutant.name:28} {how:44} {promises:8} {mutant.takes}", flush=True)
            if not texts:
                holes.append(mutant.name)
    print(f"{len(mutants)} mutants, {len(holes)} holes{': ' if holes else ''}{', '.join(holes)}")
    return holes


if __name__ == "__main__":
    sys.exit(main())
