"""One job on one page, and one checkpoint of it. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.core.byte_sizes import format_bytes
from holdfast.core.shard import Shard
from holdfast.format.keys import folder
from holdfast_services.metadata.domain import drain_interval
from holdfast_services.metadata.domain.ancestry import Ancestor
from holdfast_services.metadata.domain.holds import Listed
from holdfast_services.metadata.domain.model import Run, Stored
from holdfast_services.metadata.domain.node_view import World
from holdfast_services.metadata.edges.dashboard.charts import Chart, charts
from holdfast_services.metadata.edges.dashboard.facts import Facts, facts_of
from holdfast_services.metadata.edges.dashboard.ladder import Entry, entries
from holdfast_services.metadata.edges.dashboard.lineage import Decided, Forebear, decided, forebears
from holdfast_services.metadata.edges.dashboard.news import Item, items
from holdfast_services.metadata.edges.dashboard.overview import JobRow, job_row
from holdfast_services.metadata.edges.dashboard.rank_map import RankMap, rank_map
from holdfast_services.metadata.edges.dashboard.spent import SpentRow, spent
from holdfast_services.metadata.edges.dashboard.texts import (
    ago,
    checkpoint_path,
    counted,
    job_path,
    lasted,
)

STEPS_PER_PAGE = 25
BAD_SHOWN_MAX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """What the catalogue says of a run beside the snapshot.

    ``rows`` are those of the page, one more than fit where there are older ones; ``newest`` are for
    the charts. ``line`` is of the newest checkpoint, ``events`` the newest that went wrong.
    """

    rows: Sequence[Listed]
    newest: Sequence[Listed]
    line: Sequence[Ancestor]
    events: Sequence[Mapping[Any, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPage:
    """One job: see the template for what each part is called."""

    row: JobRow
    about: tuple[tuple[str, str], ...]
    ladder: tuple[Entry, ...]
    first: bool
    older: str
    durable: bool
    map: RankMap | None
    map_of: str
    map_path: str
    charts: tuple[Chart, ...]
    stall: str
    decided: Decided | None
    line: tuple[Forebear, ...]
    failures: str
    spent: tuple[SpentRow, ...]
    events: tuple[Item, ...]


def job_page(run: Run, world: World, read: Read, *, first: bool, durable: bool) -> JobPage:
    """Return the page of a job.

    Args:
        run: The job's.
        world: What happens now.
        read: What the catalogue says beside it.
        first: It is the first page of the ladder.
        durable: Only what is in the object store was asked for.
    """
    facts = facts_of(run, world)
    shown = read.rows[:STEPS_PER_PAGE]
    more = len(read.rows) > len(shown)
    mapped = next((row for row in facts.usable if facts.copies.get(row.id)), None)
    row = job_row(facts)
    return JobPage(
        row=row,
        about=tuple(_about(facts, world)),
        ladder=entries(facts, shown, first=first and not durable, more=more),
        first=first,
        older=_older(run, shown[-1], durable=durable) if more else "",
        durable=durable,
        map=rank_map(facts.copies[mapped.id], mapped.world_size) if mapped else None,
        map_of=f"step {mapped.id.step:,}" if mapped else "",
        map_path=checkpoint_path(run.job, mapped.id) if mapped else "",
        charts=charts(read.newest),
        stall=row.stall,
        decided=decided(run),
        line=forebears(read.line),
        failures=_failures(facts),
        spent=spent(run, world),
        events=items(read.events, world.now_s),
    )


def _older(run: Run, last: Listed, *, durable: bool) -> str:
    query = f"before={last.id.step}&before_generation={last.id.generation}"
    return f"{job_path(run.job)}?{query}{'&durable=true' if durable else ''}"


def _about(facts: Facts, world: World) -> Sequence[tuple[str, str]]:
    run, attempt = facts.run, facts.run.attempt
    if attempt is None:
        return [("attempt", "none has begun that the catalogue knows")]
    lag = facts.now_s - attempt.started_at_s
    found = [
        ("attempt", f"{attempt.generation}, begun {lasted(lag)} ago"),
        ("ranks", f"{facts.world_size:,} on {counted(len({r.node for r in run.ranks}), 'node')}"),
        ("started by", attempt.spec.holder or "unknown"),
        ("protection", f"{attempt.protection}; as it stands now {attempt.allowed}"),
    ]
    if facts.costs.copy_s:
        found.append(("copying the last save", lasted(facts.costs.copy_s)))
    if facts.costs.save_bytes:
        found.append(("size of the last save", format_bytes(facts.costs.save_bytes)))
    rule = attempt.spec.persist
    if rule is not None and rule.mtbf_s and world.limits.object_tier:
        found.append(("to the object store", drain_interval.why(rule, run, world.now_s)))
    return found


def _failures(facts: Facts) -> str:
    record = facts.run.record
    if not record.failures_count and not record.trained_s:
        return "No attempt before this one has trained."
    times = counted(record.failures_count, "of them", "of them")
    return (
        f"The attempts before this one trained for {lasted(record.trained_s)}; {times} ended "
        f"otherwise than in order."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPage:
    """One checkpoint of a job, and what may be done to it."""

    job: str
    job_path: str
    entry: Entry
    facts: tuple[tuple[str, str], ...]
    notes: str
    map: RankMap
    bad: tuple[str, ...]
    line: tuple[Forebear, ...]
    actions: tuple[tuple[str, str], ...]


def checkpoint_page(
    run: Run, item: Listed, stored: Stored | None, world: World, line: Sequence[Ancestor]
) -> CheckpointPage:
    """Return the page of a checkpoint; ``stored`` is what of it lies in the object store."""
    facts = facts_of(run, world)
    row = item.row
    copies = facts.copies.get(row.id, {})
    entry = entries(facts, [item], first=False, more=False)[0]
    shards = stored.shards if stored else ()
    bad = [f"rank {key.rank}, volume {key.volume}" for key in item.bad]
    return CheckpointPage(
        job=run.job,
        job_path=job_path(run.job),
        entry=entry,
        facts=tuple(_facts(run, item, shards, world.now_s)),
        notes=_notes(row.notes),
        map=rank_map(copies, row.world_size),
        bad=tuple(bad[:BAD_SHOWN_MAX]),
        line=forebears(line),
        actions=tuple(_actions(run, item)),
    )


def _notes(text: str) -> str:
    """Return notes for people: letters of all languages, but half a pair stays escaped."""
    said = json.dumps(json.loads(text), indent=1, ensure_ascii=False) if text else ""
    return said.encode("utf-8", "backslashreplace").decode()


def _facts(
    run: Run, item: Listed, shards: Sequence[Shard], now_s: float
) -> Sequence[tuple[str, str]]:
    row = item.row
    found = [
        ("ranks", f"{row.world_size:,}"),
        ("size", format_bytes(row.length_bytes)),
        ("committed", ago(row.local_at_s, now_s)),
    ]
    if shards:
        found.append(("in the object store", f"{counted(len(shards), 'shard')}"))
    if row.durable_at_s or row.draining:
        found.append(("folder", folder(run.job, row.id)))
    if item.scrubbed_at_s:
        found.append(("last verified", ago(item.scrubbed_at_s, now_s)))
    if item.scrub_asked:
        found.append(("verification", "asked for, not done yet"))
    return found


def _actions(run: Run, item: Listed) -> Sequence[tuple[str, str]]:
    """Return the name and the address of what may be done; the rules decide once it is asked."""
    found = ["unpin" if item.pin is not None else "pin"]
    if item.row.durable_at_s is not None:
        found += ["links", "delete"]
    elif item.row.draining:
        found.append("delete")
    found.append("rollback")
    return [(name, checkpoint_path(run.job, item.id, name)) for name in found]
