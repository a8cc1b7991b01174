"""The page: plan, queue, nodes and why, as HTML that a browser needs nothing else for.

Every text is escaped where it becomes a part of the page; there is no script and no foreign origin.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from holdfast_services.scheduler.domain.job import Job
from holdfast_services.scheduler.edges.documents import node_doc, why, wished
from holdfast_services.scheduler.usecases.reading import Seen

OVER_SHOWN_MAX = 50
JOBS_SHOWN_MAX = 500
REFRESH_S = 5

_STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em; color: #222; }
table { border-collapse: collapse; margin-bottom: 2em; }
th, td { text-align: left; padding: .2em .8em; border-bottom: 1px solid #ddd; vertical-align: top; }
.bad { color: #a00; font-weight: bold; } .faint { color: #777; }
@media (prefers-color-scheme: dark) { body { background: #181818; color: #ddd; }
  th, td { border-color: #444; } .bad { color: #f88; } }
"""


def html(seen: Seen) -> str:
    """Return the page."""
    parts = [
        "<!doctype html><html lang=en><head><meta charset=utf-8>",
        f"<meta http-equiv=refresh content={REFRESH_S}><title>Holdfast scheduler</title>",
        f"<style>{_STYLE}</style></head><body><h1>Scheduler</h1>",
        *(f"<p class=bad>{escape(line)}</p>" for line in _troubles(seen)),
        f"<p class=faint>{escape(_plan(seen))}</p>",
        "<h2>Jobs</h2>",
        _table(_JOB_COLUMNS, (_job(job, seen) for job in seen.jobs[:JOBS_SHOWN_MAX])),
        _more(len(seen.jobs) - JOBS_SHOWN_MAX, "jobs"),
        "<h2>Nodes</h2>",
        _table(("node", "GPUs", "type", "used by", "state"), _nodes(seen)),
        "<h2>Over</h2>",
        _table(("job", "state", "since", "message"), map(_over, seen.over)),
        "</body></html>",
    ]
    return "".join(parts)


_JOB_COLUMNS = ("job", "owner", "state", "since", "GPUs", "nodes", "wished", "why")


def _troubles(seen: Seen) -> Iterable[str]:
    lease = seen.lease
    if lease.until_s <= seen.now_s:
        yield "Nobody plans: no scheduler holds the lease. Jobs train on."
    if lease.metadata_out_since_s:
        since = _at(lease.metadata_out_since_s)
        yield (
            f"The metadata service has not answered since {since}. Jobs train on; nothing starts "
            f"or changes until it does."
        )


def _plan(seen: Seen) -> str:
    plan = seen.plan
    if plan is None:
        return "No plan has been made yet."
    notes = "".join(f" {note}." for note in plan.notes)
    return (
        f"Plan {plan.number} by {plan.policy}, made {_at(plan.made_at_s)} in "
        f"{plan.took_s * 1e3:.0f} ms. Planned by {seen.lease.holder}.{notes}"
    )


def _job(job: Job, seen: Seen) -> Sequence[str]:
    spec = job.spec
    wish = wished(job, seen.plan)
    return (
        spec.name,
        spec.owner,
        f"{job.state.value}: {job.message}" if job.message else job.state.value,
        _at(job.since_s),
        f"{job.gpus} of {spec.gpus_min}:{spec.gpus_max}",
        _shares(job.shares),
        "" if wish is None or wish == job.shares else _shares(wish) or "none",
        why(job, seen.plan),
    )


def _nodes(seen: Seen) -> Iterable[Sequence[str]]:
    for _, node in sorted(seen.cluster.nodes.items()):
        used = node_doc(node, seen.jobs, seen.now_s)["used"]
        kind = f"{node.gpu_type} spot" if node.spot else node.gpu_type
        users = ", ".join(f"{device}: {job}" for device, job in sorted(used.items()))
        yield node.name, str(node.gpus), kind, users, node.hindrance(seen.now_s) or "usable"


def _over(job: Job) -> Sequence[str]:
    return job.name, job.state.value, _at(job.since_s), job.message


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body or '<tr><td class=faint>none</td></tr>'}</table>"


def _more(count: int, what: str) -> str:
    return f"<p class=faint>and {count} more {escape(what)}</p>" if count > 0 else ""


def _shares(shares: Mapping[str, int]) -> str:
    return ", ".join(f"{node} {gpus}" for node, gpus in sorted(shares.items()))


def _at(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at_s))
