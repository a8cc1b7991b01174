"""``ledger``: where the time of a job went, month by month."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from holdfast.cli.output import Report, Table
from holdfast.cli.rest import Record, Rest
from holdfast.core.save_interval import time_text

COLUMNS = ("month", "share", "productive", "stalled", "lost", "down")
DASH = "-"


def ledger(args: argparse.Namespace, environ: Mapping[str, str]) -> Report:
    """Return what REST says of a job's time.

    Raises:
        NotFoundError: no such job.
    """
    found = dict(Rest.find(environ).of_job("GET", args.job, "/ledger"))
    months = [*found["months"], {**found["total"], "month": "all"}]
    if not found["months"]:
        return Report(data=found, text=[f"{args.job} has not trained yet"])
    return Report(data=found, text=[Table(COLUMNS, tuple(map(_row, months)))])


def _row(month: Record) -> tuple[str, ...]:
    """Return a line of the table.

    >>> _row({"month": "2026-11", "productive_share": 0.5, "productive_s": 60.0, "stalled_s": 0.0,
    ...       "lost_s": {}, "down_s": {"node": 50.0, "process": 10.0}})
    ('2026-11', '50.0 %', '60 s', '-', '-', '60 s (node 50 s, process 10 s)')
    """
    share = month["productive_share"]
    return (
        str(month["month"]),
        DASH if share is None else f"{share * 100:.1f} %",
        _time(month["productive_s"]),
        _time(month["stalled_s"]),
        _by_cause(month["lost_s"]),
        _by_cause(month["down_s"]),
    )


def _by_cause(parts: Mapping[str, float]) -> str:
    causes = ", ".join(f"{cause} {time_text(seconds)}" for cause, seconds in sorted(parts.items()))
    return f"{_time(sum(parts.values()))} ({causes})" if parts else DASH


def _time(seconds: float) -> str:
    return time_text(seconds) if seconds else DASH
