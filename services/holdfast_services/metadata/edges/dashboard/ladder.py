"""The ladder: how far each step has got, in words that need no colour. Pure.

A level is a fact with a time. What has no copy in memory now says so: slots of older steps are used
again, by design.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from holdfast.core.byte_sizes import format_bytes
from holdfast.core.ids import CheckpointId
from holdfast_services.metadata.domain.believed_copies import CheckpointCopies, ranks_of
from holdfast_services.metadata.domain.holds import Listed, holds
from holdfast_services.metadata.domain.model import Checkpoint, Run
from holdfast_services.metadata.edges.dashboard.facts import Facts
from holdfast_services.metadata.edges.dashboard.texts import (
    ago,
    checkpoint_path,
    clock,
    counted,
    lasted,
)

MARKS = {"reached": "✓", "gone": "-", "ahead": "○", "going": "↑", "bad": "✗"}
"""The sign of each state, beside its colour."""
SAID = {
    "reached": "reached",
    "gone": "reached, no whole copy in memory now",
    "ahead": "not reached",
    "going": "under way",
    "bad": "bad",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One level of a step; ``state`` is a key of ``MARKS``, ``about`` more of it for who asks."""

    name: str
    state: str
    about: str = ""

    @property
    def mark(self) -> str:
        """The sign of its state."""
        return MARKS[self.state]

    @property
    def said(self) -> str:
        """Its state in words."""
        return self.about or SAID[self.state]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One step on the page; ``tags`` are what is special about it, ``path`` its own page."""

    step: int
    attempt: int
    rungs: tuple[Rung, ...]
    tags: tuple[tuple[str, str], ...] = ()
    size: str = ""
    saved: str = ""
    saved_ago: str = ""
    copies: str = ""
    path: str = ""
    dim: bool = False


def entries(facts: Facts, rows: Sequence[Listed], *, first: bool, more: bool) -> tuple[Entry, ...]:
    """Return what stands on one page of the ladder, the newest first.

    Args:
        facts: Of the run.
        rows: The committed ones of this page.
        first: It is the first page: what is under way stands there.
        more: Older rows follow on the next page.
    """
    found = [_committed(facts, item) for item in rows]
    lowest = min((item.id.step for item in rows), default=0) if more else 0
    if first:
        found += _uncommitted(facts, {item.id for item in rows}, lowest)
    return tuple(sorted(found, key=lambda one: (one.step, one.attempt), reverse=True))


def copies_min(copies: CheckpointCopies, world_size: int) -> int:
    """Return how many nodes have the shard that fewest have; 0 if one is missing."""
    if len(ranks_of(copies)) < world_size:
        return 0
    return min((len(item.nodes) for item in copies.values()), default=0)


def _committed(facts: Facts, item: Listed) -> Entry:
    row, run = item.row, facts.run
    held = facts.copies.get(row.id, {})
    least = copies_min(held, row.world_size)
    return Entry(
        step=row.id.step,
        attempt=row.id.generation,
        rungs=rungs(row, item, in_memory=_in_memory(held, row.world_size)),
        tags=tuple(_tags(run, item)),
        size=format_bytes(row.length_bytes),
        saved=clock(row.local_at_s),
        saved_ago=ago(row.local_at_s, facts.now_s),
        copies=counted(least, "copy", "copies") if least else "",
        path=checkpoint_path(run.job, row.id),
        dim=run.superseded(row.id) or row.expired,
    )


def rungs(row: Checkpoint, item: Listed, *, in_memory: bool) -> tuple[Rung, ...]:
    """Return local, replicated, durable of a committed checkpoint."""
    memory = "reached" if in_memory else "gone"
    copied = "ahead" if row.replicated_at_s is None else memory
    after = "" if row.replicated_at_s is None else _after(row.replicated_at_s, row)
    return (
        Rung(name="local", state=memory),
        Rung(name="replicated", state=copied, about=after if copied == "reached" else ""),
        _durable(row, item),
    )


def _durable(row: Checkpoint, item: Listed) -> Rung:
    if row.bad:
        return Rung(name="durable", state="bad", about="objects were read back wrong")
    if row.expired:
        return Rung(name="expired", state="gone", about="its objects are being deleted")
    if row.durable_at_s is not None:
        return Rung(name="durable", state="reached", about=_after(row.durable_at_s, row))
    if row.draining:
        done = item.stored_shards or 0
        return Rung(name=f"draining {done:,} of {row.world_size:,}", state="going")
    return Rung(name="durable", state="ahead")


def _in_memory(copies: CheckpointCopies, world_size: int) -> bool:
    """Tell whether nodes have all of a checkpoint, or can make it."""
    there = all(item.nodes or item.rebuilt for item in copies.values())
    return there and len(ranks_of(copies)) >= world_size


def _after(at_s: float, row: Checkpoint) -> str:
    return f"reached {lasted(at_s - row.local_at_s)} after the commit"


def _tags(run: Run, item: Listed) -> Iterable[tuple[str, str]]:
    if run.superseded(item.id):
        yield "superseded", "left behind by a restore or a rollback: never chosen by itself"
    if item.pin is not None:
        yield "pinned", item.pin or "a user keeps it"
    for use in holds(run, item):
        if not use.startswith("being uploaded"):
            yield use, "not deleted meanwhile"


def _uncommitted(facts: Facts, known: set[CheckpointId], lowest: int) -> Iterable[Entry]:
    """Yield the steps that are being saved, and those that will never be whole."""
    run, size = facts.run, facts.world_size
    rows = known | {row.id for row in run.checkpoints}
    dropped = {(one.step, one.generation) for one in run.abandoned}
    begun = Counter(step for status in facts.statuses.values() for step in status.report.saving)
    sealed: dict[int, int] = {
        key.step: len(ranks_of(copies))
        for key, copies in facts.copies.items()
        if key not in rows and key.generation == run.generation
    }
    committed: set[int] = {key.step for key in rows if key.generation == run.generation}
    for step in sorted((begun.keys() | sealed.keys()) - committed):
        if step >= lowest and (step, run.generation) not in dropped:
            found = (begun[step], sealed.get(step, 0), size)
            yield _under_way(step, run.generation, *found, training=facts.training)
    for one in run.abandoned:
        if one.step >= lowest:
            lost = Rung(name="abandoned", state="bad", about="it will never be whole")
            why = ((one.reason, "why"),) if one.reason else ()
            yield Entry(step=one.step, attempt=one.generation, rungs=(lost,), tags=why, dim=True)


def _under_way(
    step: int, attempt: int, begun: int, sealed: int, size: int, *, training: bool
) -> Entry:
    local = Rung(name=f"local {sealed:,} of {size:,}", state="going" if sealed else "ahead")
    if not training:
        local = Rung(name=local.name, state="bad", about="not whole, and nobody trains")
        return Entry(step=step, attempt=attempt, rungs=(local,), dim=True)
    saving = (Rung(name=f"saving on {begun:,} of {size:,} ranks", state="going"),) if begun else ()
    ahead = (Rung(name="replicated", state="ahead"), Rung(name="durable", state="ahead"))
    return Entry(step=step, attempt=attempt, rungs=(*saving, local, *ahead))
