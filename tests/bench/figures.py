"""``python -m tests.bench.figures``: write the tables of the page of figures from one run.

``--take build/bench.json`` makes that run the one that the page quotes; with ``--only sched/`` its
records of these names, and of others what was quoted before. The records are kept beside the page,
so that nobody has to copy numbers, and a test can tell that nobody did.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "figures.md"
RUN = PAGE.with_suffix(".json")
HEAD = ("| record | ours | peer or limit | ratio | aim | |", "|---|---|---|---|---|---|")
NONE = "\N{EN DASH}"
# A comment names the records of the table that follows it, by the beginnings of their names.
BLOCK = re.compile(r"(<!-- records: (.+?) -->\n)(.*?)(<!-- end of records -->)", re.DOTALL)

Record = Mapping[str, Any]


def rendered(page: str, records: Sequence[Record]) -> str:
    """Return the page with its tables made from ``records``."""

    def table(found: re.Match[str]) -> str:
        beginnings = tuple(found[2].split())
        rows = [row(record) for record in records if record["name"].startswith(beginnings)]
        assert rows, f"no record begins with any of {beginnings}"
        return found[1] + "\n".join((*HEAD, *rows)) + "\n" + found[4]

    return BLOCK.sub(table, page)


def taken(run: Sequence[Record], before: Sequence[Record], only: str) -> list[Record]:
    """Return what is quoted from now on: of ``run`` the names that begin with ``only``.

    >>> taken([{"name": "a/1"}, {"name": "b/1"}], [{"name": "a/0"}, {"name": "b/0"}], "b/")
    [{'name': 'a/0'}, {'name': 'b/1'}]
    """
    kept = [record for record in before if only and not record["name"].startswith(only)]
    return kept + [record for record in run if record["name"].startswith(only)]


def row(record: Record) -> str:
    """Return a record as a row. The ratio is its own: times better, or part of the limit."""
    unit, value, peer_value = record["unit"], record["value"], record["peer_value"]
    peer = f"{record['peer']}: {number(peer_value)} {unit}" if peer_value is not None else NONE
    verdict = ("met" if record["met"] else "**missed**") if record["target"] else ""
    cells = (
        f"`{record['name']}`", f"{number(value)} {unit}", peer, number(record["ratio"]),
        record["target"] or NONE, verdict,
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def number(value: float) -> str:
    """Return three digits that count.

    >>> number(1740.2), number(0.9849), number(17.63)
    ('1740', '0.985', '17.6')
    """
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def main() -> int:
    """Take a run, if asked to, and write the tables; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.figures", description=__doc__)
    parser.add_argument("--take", type=Path, metavar="FILE", help="quote this run from now on")
    parser.add_argument("--only", default="", metavar="NAME", help="take records that start so")
    arguments = parser.parse_args()
    if arguments.take:
        records = taken(
            json.loads(arguments.take.read_text(encoding="utf-8")),
            json.loads(RUN.read_text(encoding="utf-8")),
            arguments.only,
        )
        RUN.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    records = json.loads(RUN.read_text(encoding="utf-8"))
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8"), records), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
