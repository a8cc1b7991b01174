"""``save``: all ranks of a job save a step soon, because somebody wants them to."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping

from holdfast.cli import argument_types as types
from holdfast.cli.output import Report
from holdfast.cli.rest import Rest
from holdfast.errors import OutcomeUnknownError, PreconditionError

POLL_S = 0.5


def add_save_arguments(command: argparse.ArgumentParser) -> None:
    """Add them to the parser of the command."""
    command.add_argument(
        "--wait",
        dest="wait_s",
        type=types.span_s,
        default=0.0,
        metavar="SPAN",
        help="The command ends once the step is safe, or after this span, like 90s or 5m.",
    )


def save(args: argparse.Namespace, environ: Mapping[str, str]) -> Report:
    """Have all ranks of a job save a step, and with ``--wait`` wait until it is safe.

    Raises:
        NotFoundError: no such job.
        PreconditionError: not all ranks of it train, or training has ended before the step.
        OutcomeUnknownError: the step was not safe in time; it may be soon.
    """
    rest = Rest.find(environ)
    done = dict(rest.of_job("POST", args.job, "/save"))
    said = f"all ranks of {args.job} save step {done['step']}: {done['reason']}"
    if args.wait_s:
        _await_step(rest, args.job, int(done["step"]), args.wait_s)
        said = f"step {done['step']} of {args.job} is safe"
    return Report(data={"job": args.job, **done}, text=[said])


def _await_step(rest: Rest, job: str, step: int, wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    while (found := rest.job(job))["newest_step"] is None or found["newest_step"] < step:
        if not found["running"]:
            raise PreconditionError(f"{job} has ended before step {step} was safe", job=job)
        if time.monotonic() > deadline:
            raise OutcomeUnknownError(
                f"step {step} of {job} is not safe after {wait_s:g} s, and may be soon: "
                f"`holdfast ls {job}` tells",
                job=job,
            )
        time.sleep(POLL_S)
