"""How long saves, copies, uploads and restores took, by what one transaction has changed."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from holdfast.core.ids import CheckpointId
from holdfast_services.metadata.domain.model import Checkpoint, Run


class Span(Enum):
    """What took its time; the value is what it is."""

    STALL = "Time that training waited for a save: the newest one's, every 10 s at most"
    COPY = "Time to copy the state of a save into shared memory: as for the stall"
    REPLICATE = "Time from a checkpoint's commit until all its copies lay on other nodes"
    PERSIST = "Time from when a checkpoint became due until the object store had all of it"
    RESTORE = "Time of a restore until its tensors were loaded: decide, fetch, load"


class Took(NamedTuple):
    """What took ``seconds``, until ``end_s`` of the catalogue's clock; ``of``: which checkpoint.

    ``of`` and ``end_s`` are None for what an attempt tells of its saves from time to time.
    """

    span: Span
    seconds: float
    of: CheckpointId | None = None
    end_s: float | None = None


def took(before: Run, after: Run) -> Iterator[Took]:
    """Yield what has ended between two states of a run."""
    known = {row.id: row for row in before.checkpoints}
    for row in after.checkpoints:
        old = known.get(row.id)
        end_s = row.replicated_at_s
        if end_s is not None and (old is None or old.replicated_at_s is None):
            yield Took(Span.REPLICATE, max(0.0, end_s - row.local_at_s), row.id, end_s)
        due_s = old.drain_at_s if old is not None and old.durable_at_s is None else None
        end_s = row.durable_at_s
        if due_s is not None and end_s is not None:
            yield Took(Span.PERSIST, max(0.0, end_s - due_s), row.id, end_s)
    yield from _costs(before, after)


def committed(before: Run, after: Run) -> Iterator[Checkpoint]:
    """Yield the checkpoints that have become ones between two states of a run."""
    known = {row.id for row in before.checkpoints}
    for row in after.checkpoints:
        if row.id not in known and row.durable_at_s is None:  # else a manifest has told of it
            yield row


def _costs(before: Run, after: Run) -> Iterator[Took]:
    old, new = before.attempt, after.attempt
    if old is None or new is None or old.generation != new.generation or old.costs == new.costs:
        return
    for span, was_s, is_s in (
        (Span.STALL, old.costs.stall_s, new.costs.stall_s),
        (Span.COPY, old.costs.copy_s, new.costs.copy_s),
    ):
        if is_s and is_s != was_s:
            yield Took(span, is_s)
    if new.costs.load_s and not old.costs.load_s:
        seconds = new.costs.decide_s + new.costs.fetch_s + new.costs.load_s
        of = after.decision.checkpoint if after.decision else None
        yield Took(Span.RESTORE, seconds, of, new.costs_at_s)
