"""``ls`` and ``show``: what the catalogue says of jobs and checkpoints."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from holdfast.cli.output import Report, Table
from holdfast.cli.rest import Record, Rest
from holdfast.core.ids import STEP_MAX, job_name
from holdfast.core.units import format_bytes
from holdfast.errors import InvalidRequestError, NotFoundError

LEVELS = ("local", "replicated", "durable")


@dataclass(frozen=True, slots=True)
class Target:
    """What ``JOB[@STEP]`` names; without a step, the newest checkpoint."""

    job: str
    step: int | None = None


def parse_target(text: str) -> Target:
    """Return what ``text`` names.

    Raises:
        InvalidRequestError: not ``JOB`` or ``JOB@STEP``.

    >>> parse_target("team/gpt@1200")
    Target(job='team/gpt', step=1200)
    """
    job, at, step = text.partition("@")
    if at and not (step.isascii() and step.isdigit() and int(step) <= STEP_MAX):
        raise InvalidRequestError(f"{step!r} is not a step: write JOB or JOB@STEP")
    return Target(job_name(job), int(step) if at else None)


def ls(args: argparse.Namespace, environ: Mapping[str, str]) -> Report:
    """Return all jobs, or the checkpoints of one."""
    rest = Rest.find(environ)
    if args.job is None:
        jobs = rest.jobs()
        return Report(data=jobs, text=[_jobs_table(jobs) if jobs else "no jobs yet"])
    found = rest.checkpoints(job_name(args.job))
    return Report(data=found, text=[_checkpoints_table(found) if found else "no checkpoints yet"])


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
    if note := _note(checkpoint):
        head.append(f"note        {note}")
    return Report(data=checkpoint, text=[*head, "", _shards_table(checkpoint["shards"])])


def find_checkpoint(rest: Rest, target: Target) -> Record:
    """Return the checkpoint that ``target`` names, with its shards.

    Raises:
        NotFoundError: the job has none, or not that one.
    """
    if target.step is not None:
        return rest.checkpoint(target.job, target.step)
    found = rest.checkpoints(target.job)
    usable = [checkpoint for checkpoint in found if not checkpoint["superseded"]]
    if not usable:
        raise NotFoundError(f"job {target.job} has no committed checkpoint")
    return rest.checkpoint(target.job, int(usable[0]["step"]))


def _jobs_table(jobs: list[Record]) -> Table:
    return Table(
        ("job", "run", "state", "attempt", "ranks", "step", "newest saved"),
        tuple(
            (
                str(job["job"]),
                str(job["run"]),
                "running" if job["running"] else "stopped",
                str(job["generation"]),
                str(job["world_size"]),
                str(job["step"]),
                _or_dash(job["newest_step"]),
            )
            for job in jobs
        ),
    )


def _checkpoints_table(checkpoints: list[Record]) -> Table:
    return Table(
        ("step", "attempt", "ranks", "size", *LEVELS, "copies", "note"),
        tuple(
            (
                str(found["step"]),
                str(found["generation"]),
                str(found["world_size"]),
                format_bytes(found["length_bytes"]),
                *(_time(found[f"{level}_at"]) for level in LEVELS),
                str(found["copies_min"]),
                _note(found),
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


def _replica(replica: Record) -> str:
    return f"{replica['node']} ({replica['tier']})"


def _note(checkpoint: Record) -> str:
    """Return what is special about a checkpoint."""
    return ", ".join(word for word in ("superseded", "pinned") if checkpoint[word])


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return datetime.fromtimestamp(seconds, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)
