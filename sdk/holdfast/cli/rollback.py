"""``rollback``: the next start of a job begins at an older checkpoint, or at one that was left."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from holdfast.cli.catalogue import find_checkpoint
from holdfast.cli.output import Report, confirm, counted
from holdfast.cli.rest import Record, Rest
from holdfast.code_version import user
from holdfast.errors import PreconditionError

STEPS_NAMED_MAX = 8


def rollback(args: argparse.Namespace, environ: Mapping[str, str]) -> Report:
    """Take a job back to a checkpoint; what came after it is kept, and not restored by itself.

    Raises:
        PreconditionError: the job trains, or the checkpoint cannot be restored, or somebody else
            was quicker.
        InvalidRequestError: steps would be lost that are only in memory, and nobody agreed.
    """
    rest = Rest.find(environ)
    found = find_checkpoint(rest, args.target)
    job = rest.job(args.target.job)
    if job["running"] and not args.force:  # nobody is asked about steps, and refused then
        raise PreconditionError(
            f"{job['job']} is training: attempt {job['attempt']}, started by {job['holder']}; stop "
            f"its launcher first (Ctrl-C, or SIGTERM), or use --force, after which it saves nothing"
        )
    rows = rest.checkpoints(args.target.job)
    lost = going(rows, found)
    if lost and not args.yes:
        what = f"{_steps(lost)} of {found['job']}, only in memory,"
        refusal = f"{what} would be lost: `holdfast pin JOB@STEP` keeps one; or say --yes as well"
        confirm(f"roll back to step {found['step']}? {what} will be lost", refusal)
    wish = {
        "attempt": job["attempt"],
        "force": args.force,
        "holder": user(),
        "reason": args.reason,
    }
    done = rest.roll_back(found, wish)
    fenced = int(job["attempt"]) if job["running"] else None
    stored = {(row["step"], row["attempt"]) for row in rows if row["durable_at"] is not None}
    return Report(data=done, text=told(done, stored, fenced))


def going(checkpoints: list[Record], to: Record) -> list[Record]:
    """Return what memory alone has and frees once the job was rolled back, newest first.

    >>> row = {"superseded": False, "durable_at": None, "copies_min": 1, "attempt": 2}
    >>> rows = [{**row, "step": 9}, {**row, "step": 8, "durable_at": 1.0}, {**row, "step": 5}]
    >>> [found["step"] for found in going(rows, rows[2])]
    [9]
    """
    return [
        row
        for row in checkpoints
        if not row["superseded"]
        and row["durable_at"] is None
        and row["copies_min"]
        and (row["step"] > to["step"] or row["attempt"] > to["attempt"])
    ]


def told(done: Record, stored: set[tuple[int, int]], fenced: int | None) -> list[str]:
    """Return what people are told of a rollback.

    Args:
        done: The answer.
        stored: Steps and attempts that the object store has.
        fenced: The attempt that trained.
    """
    where = f"step {done['step']} of attempt {done['attempt']}"
    if done["repeated"]:
        return [f"{done['job']} is rolled back to {where} already: the next start restores it"]
    told = [f"{done['job']} is rolled back to {where}: the next start restores it"]
    if left := done["left"]:
        told.append(f"left behind, {counted(len(left), 'checkpoint')}: {_steps(left)}")
    ahead = next((row for row in left if (row["step"], row["attempt"]) in stored), None)
    if ahead:
        again = f"holdfast rollback {done['job']}@{ahead['step']} --attempt {ahead['attempt']}"
        told.append(f"`{again}` goes forward again, to the newest of them in the object store")
    if fenced is not None:
        told.append(f"attempt {fenced} saves nothing any more: stop it, and start the job again")
    return told


def _steps(rows: list[Record]) -> str:
    named = ", ".join(str(row["step"]) for row in rows[:STEPS_NAMED_MAX])
    more = len(rows) - STEPS_NAMED_MAX
    return f"step{'s' if len(rows) > 1 else ''} {named}" + (f" and {more} more" if more > 0 else "")
