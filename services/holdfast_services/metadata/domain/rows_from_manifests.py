"""What a catalogue concludes from the manifests in a bucket (P6): rows, rules, the counter.

Manifests are facts: they add what the catalogue does not know and change nothing that it does.
Pure; times are the database's clock, except what a manifest says of itself.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from holdfast.bucket import lineage
from holdfast.core.ids import CheckpointId, Generation
from holdfast.core.shard import Shard
from holdfast.format.manifest import Manifest
from holdfast.format.rollback import Rollback
from holdfast_services.metadata.domain.model import Checkpoint, Run, read_parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """A run with what follows from the manifests, and the rows that are to be written."""

    run: Run
    rows: tuple[Checkpoint, ...]


def choose_run(manifests: Iterable[Manifest], named: Collection[str]) -> str | None:
    """Return which run of a job is taken in; None: the bucket has none.

    Args:
        manifests: All that lie under the job's name, of any run.
        named: What the catalogue says: the job's run if it has one, or the id that follows from
            the job's name. The first of these that has a manifest is taken.

    Returns:
        One of ``named``, else the run whose newest manifest is the newest by its own clock.
    """
    made_s: dict[str, float] = {}
    for manifest in manifests:
        run = str(manifest.checkpoint.run)
        made_s[run] = max(made_s.get(run, 0.0), manifest.created_at_s)
    for run in named:
        if run in made_s:
            return run
    return max(made_s, key=lambda run: (made_s[run], run), default=None)


def adopt(
    run: Run,
    known: Iterable[Checkpoint],
    manifests: Sequence[Manifest],
    now_s: float,
    *,
    drained: Mapping[CheckpointId, Sequence[Shard]] | None = None,
    generation_min: int = 0,
    rollbacks: Sequence[Rollback] = (),
) -> Adopted:
    """Return the run with what ``manifests`` and ``rollbacks``, all its own, prove.

    Whatever generation a manifest is of is one that was, so the counter goes above it. A
    checkpoint that the catalogue knows as durable stays as it is: it knows better. One that drains
    has come to the end of it if the manifest lists the shards that were to be written: a catalogue
    from a backup has not heard of it.

    Args:
        run: As read under the job's lock.
        known: All rows of the run.
        manifests: Those that lie in the bucket.
        now_s: When they were seen: from here on their ages count.
        drained: The shards of those that drain.
        generation_min: The newest that left anything in the bucket.
        rollbacks: The records of those that lie there.
    """
    rows = {row.id: row for row in known}
    found = []
    for manifest in manifests:
        row = rows.get(manifest.checkpoint)
        if row is None or (row.durable_at_s is None and not row.draining):
            found.append(_durable(row or _row(manifest), manifest, now_s))
        elif row.draining and _is_written(run, manifest, (drained or {}).get(row.id, ())):
            found.append(_durable(replace(row, drain_at_s=None), manifest, now_s))
    generations = [manifest.checkpoint.generation for manifest in manifests]
    generations += [Generation(rollback.generation) for rollback in rollbacks]
    newest_of_all = max((run.generation, generation_min, *generations))
    over = {row.id for row in found}
    drains = tuple(drain for drain in run.drains if drain.checkpoint not in over)
    moved = run.after(*lineage.moves(manifests, rollbacks))
    changed = replace(moved, generation=newest_of_all, drains=drains)
    newest = max((row.id for row in found if changed.usable(row.id)), default=None)
    if newest is not None:
        changed = replace(changed, persisted_step=max(run.persisted_step, newest.step))
    return Adopted(run=changed, rows=tuple(found))


def _is_written(run: Run, manifest: Manifest, shards: Sequence[Shard]) -> bool:
    wanted = sorted(shards, key=lambda shard: shard.id)
    return list(manifest.shards) == wanted and not run.superseded(manifest.checkpoint)


def _row(manifest: Manifest) -> Checkpoint:
    return Checkpoint(
        id=manifest.checkpoint,
        world_size=manifest.world_size,
        plan_hash=manifest.shards[0].plan_hash,
        length_bytes=manifest.length_bytes,
        local_at_s=manifest.created_at_s,
        parent=read_parent(manifest.checkpoint, manifest.parent),
    )


def _durable(row: Checkpoint, manifest: Manifest, now_s: float) -> Checkpoint:
    notes = json.dumps(dict(manifest.notes), sort_keys=True) if manifest.notes else ""
    return replace(row, durable_at_s=now_s, notes=row.notes or notes)
