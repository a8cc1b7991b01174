"""``top``: jobs, nodes and news of a cluster on one screen, drawn anew until Ctrl-C.

What is shown is a function of the answers of REST and of the room there is; without a terminal, or
without rich, it is printed once.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from holdfast.cli.output import Report, Table, counted, drawn
from holdfast.cli.rest import Record, Rest
from holdfast.core.byte_sizes import format_bytes
from holdfast.core.save_interval import time_text
from holdfast.core.text import shown
from holdfast.errors import CheckpointError

EVENTS_COUNT = 6
LINES_OF_A_TABLE = 4
"""Its head, the lines above and below it, and one that counts what does not fit."""
LINES_MIN = 3
EVERY_S_MIN = 0.2
DASH = "-"
_PRINTED_LINES = 1000


@dataclass(frozen=True, slots=True)
class Cluster:
    """What REST says of a cluster at one moment."""

    url: str
    jobs: Sequence[Record]
    nodes: Sequence[Record]
    store: Record
    events: Sequence[Record]

    @classmethod
    def ask(cls, rest: Rest) -> Cluster:
        """Return what ``rest`` answers now.

        Raises:
            UnavailableError: it does not answer.
        """
        return cls(rest.url, rest.jobs(), rest.nodes(), rest.store(), rest.events(EVENTS_COUNT))


def top(args: argparse.Namespace, environ: Mapping[str, str]) -> Report:
    """Draw until Ctrl-C; print once if that is asked for, or if there is no terminal.

    Raises:
        CheckpointError: the service is not found, or does not answer at first.
    """
    rest = Rest.find(environ)
    cluster = Cluster.ask(rest)
    if args.once or args.json or not sys.stdout.isatty() or not _watch(rest, cluster, args.every):
        data = {
            "url": cluster.url,
            "jobs": list(cluster.jobs),
            "nodes": list(cluster.nodes),
            "store": cluster.store,
            "events": list(cluster.events),
        }
        return Report(data=data, text=screen(cluster, _PRINTED_LINES))
    return Report(data=None, text=[])


def _watch(rest: Rest, cluster: Cluster, every_s: float) -> bool:
    """Draw anew every ``every_s`` until Ctrl-C; False if rich is not installed."""
    try:
        from rich.console import Group  # noqa: PLC0415 - only for a terminal
        from rich.live import Live  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415
    except ImportError:
        return False
    trouble = ""
    try:
        with Live(screen=True, auto_refresh=False) as live:
            while True:
                lines = shutil.get_terminal_size().lines - bool(trouble)
                blocks = [trouble, *screen(cluster, lines)] if trouble else screen(cluster, lines)
                parts = [Text(shown(b)) if isinstance(b, str) else drawn(b) for b in blocks]
                live.update(Group(*parts), refresh=True)
                time.sleep(max(every_s, EVERY_S_MIN))
                try:
                    cluster, trouble = Cluster.ask(rest), ""
                except CheckpointError as error:  # what was seen last stays
                    trouble = f"no answer since {_clock(time.time())}: {error.message}"
    except KeyboardInterrupt:
        return True


def screen(cluster: Cluster, lines: int) -> list[str | Table]:
    """Return what a terminal of so many lines shows; the most urgent rows where not all fit."""
    room = max(2 * LINES_MIN, lines - 1 - 2 * LINES_OF_A_TABLE - EVENTS_COUNT - 1)
    jobs = sorted(cluster.jobs, key=lambda job: (not job["running"], str(job["job"])))
    nodes = sorted(cluster.nodes, key=lambda node: (node["live"], -_fill(node), str(node["node"])))
    jobs_room = max(LINES_MIN, min(len(jobs), room - min(len(nodes), room // 2)))
    blocks: list[str | Table] = [summary(cluster)]
    blocks += _some(Table(JOB_COLUMNS, tuple(map(_job_row, jobs))), jobs_room, "job")
    nodes_room = max(LINES_MIN, room - jobs_room)
    blocks += _some(Table(NODE_COLUMNS, tuple(map(_node_row, nodes))), nodes_room, "node")
    blocks += [_event_line(event) for event in cluster.events[:EVENTS_COUNT]]
    return blocks


def summary(cluster: Cluster) -> str:
    """Return the cluster in one line."""
    training = sum(job["running"] for job in cluster.jobs)
    live = [node for node in cluster.nodes if node["live"]]
    used, budget = (sum(node[key] for node in live) for key in ("used_bytes", "budget_bytes"))
    store = cluster.store
    state = "no object store" if not store["url"] else "store ok" if store["ok"] else "STORE DOWN"
    return " | ".join(
        (
            cluster.url,
            f"{counted(len(cluster.jobs), 'job')}, {training} training",
            f"{len(live)} of {counted(len(cluster.nodes), 'node')} live",
            f"memory {format_bytes(used)} of {format_bytes(budget)}",
            state,
        )
    )


JOB_COLUMNS = ("job", "state", "ranks", "step", "safe", "copied", "durable", "stall", "note")
NODE_COLUMNS = ("node", "state", "ranks", "shards", "memory", "of", "full")


def _job_row(job: Record) -> tuple[str, ...]:
    stall_s = job["costs"].get("stall_s")
    note = job["shortage"] or (f"{job['failures']} failed before" if job["failures"] else "")
    return (
        str(job["job"]),
        "trains" if job["running"] else "stopped",
        str(job["world_size"]),
        str(job["step"] or DASH),
        *(
            DASH if job[key] is None else str(job[key])
            for key in ("newest_step", "newest_replicated_step", "newest_durable_step")
        ),
        DASH if stall_s is None else time_text(stall_s),
        str(note),
    )


def _node_row(node: Record) -> tuple[str, ...]:
    return (
        str(node["node"]),
        "live" if node["live"] else "LOST",
        str(node["ranks"]),
        str(node["shards"]),
        format_bytes(node["used_bytes"]),
        format_bytes(node["budget_bytes"]),
        f"{100 * _fill(node):.0f} %",
    )


def _fill(node: Record) -> float:
    return float(node["used_bytes"]) / max(1.0, float(node["budget_bytes"]))


def _event_line(event: Record) -> str:
    where = " ".join(filter(None, (str(event["job"]), str(event["node"]))))
    text = " ".join(str(event["message"]).split())
    return f"{_clock(event['at'])} {event['severity']:<7} {where}: {text}"


def _some(table: Table, room: int, what: str) -> list[str | Table]:
    """Return the first rows of a table, and how many more there are."""
    if not table.rows:
        return [f"no {what}s yet"]
    left = len(table.rows) - room
    shown: list[str | Table] = [Table(table.columns, table.rows[:room])]
    return [*shown, f"and {counted(left, f'more {what}')}"] if left > 0 else shown


def _clock(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, tz=UTC).astimezone().strftime("%H:%M:%S")
