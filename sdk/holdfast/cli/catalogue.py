"""``ls`` and ``show``: what the catalogue says of jobs and checkpoints."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from holdfast.cli.output import Report, Table
from holdfast.cli.rest import Record, Rest
from holdfast.core.byte_sizes import format_bytes
from holdfast.core.ids import STEP_MAX, job_name
from holdfast.errors import InvalidRequestError, NotFoundError, PreconditionError

LEVELS = ("local", "replicated", "durable")
MARKS = ("superseded", "pinned", "bad")
NOTES_LENGTH_MAX = 60
COMMIT_SHOWN = 12

_HASH = re.compile(r"[0-9a-f]{40,64}")
_STEP = re.compile(r"([0-9]{1,15})(?:\.g([0-9]{1,10}))?")


@dataclass(frozen=True, slots=True)
class Target:
    """What ``JOB[@STEP]`` and ``--attempt`` name; without a step, the newest checkpoint.

    ``JOB@STEP.g3`` is understood as well: folders in a bucket are named like that.
    """

    job: str
    step: int | None = None
    generation: int | None = None


def parse_target(text: str) -> Target:
    """Return what ``text`` names.

    Raises:
        InvalidRequestError: not ``JOB``, ``JOB@STEP`` or ``JOB@STEP.gATTEMPT``.

    >>> parse_target("team/gpt@1200"), parse_target("gpt@12.g3")
    (Target(job='team/gpt', step=1200, generation=None), Target(job='gpt', step=12, generation=3))
    """
    job, at, where = text.partition("@")
    match = _STEP.fullmatch(where)
    if not at:
        return Target(job_name(job))
    if match is None or int(match[1]) > STEP_MAX:
        raise InvalidRequestError(
            f"{where!r} is not a step: write JOB, JOB@STEP or JOB@STEP --attempt N"
        )
    return Target(job_name(job), int(match[1]), int(match[2]) if match[2] else None)


def ls(args: argparse.Namespace, environ: Mapping[str, str]) -> Report:
    """Return all jobs, or the checkpoints of one; those without any copy are not in the table."""
    rest = Rest.find(environ)
    if args.job is None:
        jobs = rest.jobs()
        return Report(data=jobs, text=[_jobs_table(jobs) if jobs else "no jobs yet"])
    found = rest.checkpoints(job_name(args.job))
    if not found:
        return Report(data=[], text=["no checkpoints yet"])
    held = [row for row in found if row["copies_min"] or row["durable_at"] or row["draining"]]
    shown = held or found
    text: list[str | Table] = [_checkpoints_table(shown)]
    if gone_count := len(found) - len(shown):
        text.append(f"and {gone_count} that memory no longer holds: see --json")
    return Report(data=found, text=text)


def show(args: argparse.Namespace, environ: Mapping[str, str]) -> Report:
    """Return one checkpoint with its shards.

    Raises:
        NotFoundError: no such job or step.
    """
    checkpoint = find_checkpoint(Rest.find(environ), args.target)
    head = [
        f"job         {args.target.job}",
        f"run         {checkpoint['run']}",
        f"step        {checkpoint['step']}, of attempt {checkpoint['generation']}",
        *(f"{level:<10}  {_time(checkpoint[f'{level}_at'])}" for level in LEVELS),
    ]
    if checkpoint["draining"]:
        count = len(checkpoint["shards"])
        head.append(f"draining    {checkpoint['stored_shards'] or 0} of {count} shards stored")
    if marks := _marks(checkpoint):
        head.append(f"marks       {marks}")
    if checkpoint["notes"]:
        head.append(f"notes       {json.dumps(checkpoint['notes'])}")
    if checkpoint["folder"]:
        head.append(f"folder      {checkpoint['folder']}")
    text: list[str | Table] = [*head, "", _shards_table(checkpoint["shards"])]
    if checkpoint["line"]:
        text += ["", "how it came about, the last attempt first:", _line_table(checkpoint["line"])]
    return Report(data=checkpoint, text=text)


def find_checkpoint(rest: Rest, target: Target, *, durable: bool = False) -> Record:
    """Return the checkpoint that ``target`` names, with its shards.

    Args:
        rest: Who knows.
        target: Its name; without a step, the newest that a restore could choose.
        durable: It must be whole in the object store.

    Raises:
        NotFoundError: the job has none, or not that one.
        PreconditionError: it is named and is not in the object store.
    """
    if target.step is not None:
        named = rest.checkpoint(target.job, target.step, target.generation)
        if durable and not is_stored(named):
            raise PreconditionError(
                f"step {target.step} is not in the object store: `holdfast pin "
                f"{target.job}@{target.step}` brings it there while it is in memory"
            )
        return named
    found = rest.checkpoints(target.job, durable=durable)
    usable = [
        checkpoint
        for checkpoint in found
        if not checkpoint["superseded"] and (not durable or is_stored(checkpoint))
    ]
    if not usable:
        where = " in the object store" if durable else ""
        raise NotFoundError(f"job {target.job} has no committed checkpoint{where}")
    return rest.checkpoint(target.job, int(usable[0]["step"]), int(usable[0]["generation"]))


def is_stored(checkpoint: Record) -> bool:
    """Tell whether a checkpoint is whole in the object store, and stays there."""
    return checkpoint["durable_at"] is not None and not checkpoint["expired_at"]


def _jobs_table(jobs: list[Record]) -> Table:
    """Return a row per job; one that is not there any more and has saved nothing is at no step."""
    return Table(
        ("job", "run", "state", "attempt", "ranks", "step", "newest saved"),
        tuple(
            (
                str(job["job"]),
                str(job["run"]),
                "running" if job["running"] else "stopped",
                str(job["generation"]),
                str(job["world_size"]),
                _or_dash(job["step"] if job["running"] else job["step"] or job["newest_step"]),
                _or_dash(job["newest_step"]),
            )
            for job in jobs
        ),
    )


def _checkpoints_table(checkpoints: list[Record]) -> Table:
    return Table(
        ("step", "attempt", "ranks", "size", *LEVELS, "copies", "marks", "notes"),
        tuple(
            (
                str(found["step"]),
                str(found["generation"]),
                str(found["world_size"]),
                format_bytes(found["length_bytes"]),
                *(_time(found[f"{level}_at"]) for level in LEVELS[:-1]),
                _durable(found),
                str(found["copies_min"]),
                _marks(found),
                _notes(found["notes"]),
            )
            for found in checkpoints
        ),
    )


def _shards_table(shards: list[Record]) -> Table:
    return Table(
        ("rank", "size", "digest", "copies"),
        tuple(
            (
                str(shard["rank"]),
                format_bytes(shard["length_bytes"]),
                str(shard["root_digest"])[:12],
                ", ".join(_replica(replica) for replica in shard["replicas"]) or "none",
            )
            for shard in shards
        ),
    )


def _line_table(line: list[Record]) -> Table:
    return Table(
        ("attempt", "began", "from", "by", "code", "command"),
        tuple(
            (
                str(one["attempt"]),
                _time(one["began_at"]),
                _beginning(one),
                one["user"] or one["holder"] or "-",
                _code(one),
                one["command"] or "-",
            )
            for one in line
        ),
    )


def _beginning(one: Record) -> str:
    parent, back = one["parent"], one["rollback"]
    where = f"step {parent['step']} of {parent['attempt']}" if parent else "step 0"
    if back is None:
        return where
    why = f": {back['reason']}" if back["reason"] else ""
    return f"{where}, rolled back{why}"


def _code(one: Record) -> str:
    """Return the commit of an attempt in short.

    >>> _code({"commit": "4fe1c9a2b7d0e1f2a3b4c5d6e7f8091a2b3c4d5e", "dirty": True})
    '4fe1c9a2b7d0, changed'
    """
    commit = str(one["commit"])
    short = commit[:COMMIT_SHOWN] if _HASH.fullmatch(commit) else commit
    return f"{short}, changed" if one["dirty"] else short or "-"


def _replica(replica: Record) -> str:
    # The object store is no node.
    return f"{replica['node']} ({replica['tier']})" if replica["node"] else str(replica["tier"])


def _durable(checkpoint: Record) -> str:
    """Return since when it is in the object store, or how far on its way there."""
    if checkpoint["draining"]:
        return f"draining, {checkpoint['stored_shards'] or 0} stored"
    return _time(checkpoint["durable_at"])


def _marks(checkpoint: Record) -> str:
    """Return what is special about a checkpoint."""
    words = [word for word in MARKS if checkpoint[word]]
    return ", ".join([*words, *(["expired"] if checkpoint["expired_at"] else [])])


def _notes(notes: Record) -> str:
    """Return the user's metadata in one short line.

    >>> _notes({"loss": 0.25, "epoch": 3})
    'loss=0.25 epoch=3'
    """
    shown = {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in notes.items()}
    text = " ".join(f"{key}={value}" for key, value in shown.items())
    return text if len(text) <= NOTES_LENGTH_MAX else f"{text[: NOTES_LENGTH_MAX - 1]}…"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return datetime.fromtimestamp(seconds, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)
