"""Live through histories; say which promises broke, and how to see it."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from tests.simulation import stories
from tests.simulation.plan import Plan, draw
from tests.simulation.shrink import shrink
from tests.simulation.stories import Lived, live, live_seed

SEEDS_COUNT = 300
CHUNK_SEEDS_MAX = 10
KINDS_IN_NAME_MAX = 3
COMMAND = "python -m tests.simulation"


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what was asked for; return 1 if anything broke, else 0."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--first", type=int, default=0, metavar="K", help="the first seed")
    parser.add_argument("--seeds", type=_count, default=SEEDS_COUNT, metavar="N", help="how many")
    parser.add_argument(
        "--jobs", type=_count, default=os.cpu_count() or 1, metavar="J", help="processes"
    )
    parser.add_argument("--json", action="store_true", help="end with a line of JSON")
    parser.add_argument("--enough", type=_count, metavar="K", help="end after K that broke")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--tell", metavar="SEED", help="tell one history, a seed's or a story's")
    kinds.add_argument("--shrink", metavar="SEED", help="write the story of a seed that breaks")
    kinds.add_argument(
        "--coverage", action="store_true", help="also tell which branches were never taken"
    )
    asked = parser.parse_args(arguments)
    if asked.tell:
        return _tell(asked.tell)
    if asked.shrink:
        return _shrink(asked.shrink)
    return _run(asked)


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise ValueError(text)
    return count


class _Tally:
    """What the histories came to so far; prints those that broke as they come."""

    def __init__(self, seeds_count: int) -> None:
        self.broken: dict[int, str] = {}
        self._seeds_count = seeds_count
        self._promises: Counter[str] = Counter()
        self._began_s = time.perf_counter()
        self.done = self._cpu_s = self.events = self._commits = self._restores = 0

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began_s

    def add(self, seed: int, lived: Lived) -> None:
        self.done += 1
        self._cpu_s += lived.cpu_s
        self.events += lived.events_count
        self._commits += lived.commits_count
        self._restores += lived.restores_count
        if lived.broke:
            self.broken[seed] = lived.broke
            self._promises[lived.promise] += 1
            _progress("")
            print(f"seed {seed}: {lived.broke}\n    see {COMMAND} --tell {seed}", flush=True)
        _progress(f"{self.done} of {self._seeds_count} seeds, {len(self.broken)} broken")

    def summary(self) -> str:
        _progress("")
        promises = ", ".join(f"{promise}: {n}" for promise, n in self._promises.most_common())
        return (
            f"{self.done} seeds, {self.events} events in {self.seconds:.1f} s: "
            f"{self.events / self.seconds:.0f} events/s in all, "
            f"{self.events / max(self._cpu_s, 1e-9):.0f} per core; "
            f"{self._commits} commits, {self._restores} restores; "
            f"{len(self.broken)} broken{f' ({promises})' if promises else ''}"
        )


def _progress(text: str) -> None:
    """Show ``text`` in place of what was shown before, where somebody watches."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _run(asked: argparse.Namespace) -> int:
    seeds = range(asked.first, asked.first + asked.seeds)
    tally = _Tally(len(seeds))
    if asked.coverage:
        from tests.simulation import coverage_report  # only this needs the library

        report = coverage_report.report(seeds, lambda seed: tally.add(seed, live_seed(seed)))
        print(report, end="\n\n")
    else:
        for seed, lived in zip(seeds, _histories(seeds, asked.jobs), strict=True):
            tally.add(seed, lived)
            if asked.enough and len(tally.broken) >= asked.enough:
                break
    print(tally.summary())
    if asked.json:
        print(json.dumps({
            "seeds": tally.done,
            "events": tally.events,
            "seconds": round(tally.seconds, 3),
            "broken": tally.broken,
        }))  # fmt: skip
    return 1 if tally.broken else 0


def _histories(seeds: range, jobs: int) -> Iterable[Lived]:
    """Yield how each seed ended, in order."""
    if jobs == 1:
        yield from map(live_seed, seeds)
        return
    chunk = max(1, min(CHUNK_SEEDS_MAX, len(seeds) // (4 * jobs)))
    # Spawned, not forked: each process has another hash seed, and nobody's threads or sockets.
    with ProcessPoolExecutor(min(jobs, len(seeds)), mp_context=get_context("spawn")) as pool:
        yield from pool.map(live_seed, seeds, chunksize=chunk)


def _plan(which: str) -> Plan:
    """Return the plan of a seed, or of a story's file."""
    return draw(int(which)) if which.isdecimal() else stories.read(Path(which))[1]


def _tell(which: str) -> int:
    lived = live(_plan(which))
    print(*lived.story, sep="\n")
    print(lived.trace)
    print(
        f"{lived.events_count} events, {lived.commits_count} commits, "
        f"{lived.restores_count} restores; {lived.broke or 'every promise held'}"
    )
    return 1 if lived.broke else 0


def _shrink(which: str) -> int:
    plan = _plan(which)
    if not live(plan).broke:
        print(f"{which} breaks nothing: there is nothing to shrink")
        return 0
    tries = 0

    def breaks(candidate: Plan) -> str | None:
        nonlocal tries
        tries += 1
        _progress(f"try {tries}: {len(candidate.troubles)} troubles")
        return live(candidate).promise or None

    small = shrink(plan, breaks)
    _progress("")
    lived = live(small)
    kinds = list(dict.fromkeys(trouble.kind for trouble in small.troubles))[:KINDS_IN_NAME_MAX]
    slug = "-".join([*lived.promise.split(), *kinds, str(small.seed)]).lower()
    path = stories.FOLDER / (re.sub(r"[^a-z0-9]+", "-", slug) + ".toml")
    title = f"{lived.promise} after {', '.join(kinds) or 'no trouble'} (seed {small.seed})"
    stories.write(path, small, title, lived.broke, lived.story)
    print(path.read_text(encoding="utf-8"))
    print(f"written to {path} after {tries} tries; see {COMMAND} --tell {path}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
