"""Arguments of the commands that ask the scheduler."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from holdfast.cli import argument_types as types
from holdfast.cli import scheduling
from holdfast.cli.run import notice
from holdfast.core.job_spec import GPUS_MAX

Add = Callable[[str, str, scheduling.Command], argparse.ArgumentParser]
"""Adds a command: its usage, what it does, what runs it."""


def add_scheduling(add: Add) -> None:
    """Add the commands."""
    _add_submit(
        add(
            "submit --job gpt --gpus 1:8 -- train.py --lr 3e-4",
            "This command has the scheduler take a job on.",
            scheduling.submit,
        )
    )
    listed = add("jobs", "This command lists the jobs of the scheduler.", scheduling.jobs)
    listed.add_argument("--all", action="store_true", help="The list has jobs that are over, too.")
    add(
        "queue",
        "This command lists the jobs that wait for GPUs, and why each waits.",
        scheduling.queue,
    )
    for usage, what, command in (
        ("explain gpt", "This command says what a job has, and why.", scheduling.explain),
        ("cancel gpt", "This command has a job save once more, and end.", scheduling.cancel),
    ):
        one = add(usage, what, command)
        one.add_argument("job", type=types.job, metavar="JOB", help="The job has this name.")
    _add_execute(
        add(
            "execute --gpus auto",
            "This command runs jobs on this node as the scheduler says.",
            scheduling.execute,
        )
    )


def _add_submit(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--file",
        type=Path,
        metavar="FILE",
        help="The job is what this file says, TOML or JSON, as far as options say nothing else.",
    )
    command.add_argument(
        "--job", dest="name", type=types.job, metavar="NAME", help="The job has this name."
    )
    command.add_argument(
        "--gpus",
        type=_gpus,
        metavar="N|MIN:MAX",
        help="The job trains on so many GPUs (default 1).",
    )
    command.add_argument(
        "--mesh",
        dest="meshes",
        action="append",
        metavar="AXIS=N,...",
        help="The job trains on as many GPUs as this mesh, such as dp=4,tp=2, has; one axis may be "
        "*. Several say several numbers of GPUs.",
    )
    command.add_argument(
        "--priority",
        type=int,
        metavar="N",
        help="The job goes before those of a lower priority (default 0).",
    )
    command.add_argument(
        "--owner", metavar="NAME", help="The job counts for the quota of this owner."
    )
    command.add_argument(
        "--dry-run",
        action="store_true",
        help="The command only says whether the job would be taken on.",
    )
    _add_how_it_scales(command)
    _add_how_it_runs(command)
    command.add_argument(
        "words",
        nargs=argparse.REMAINDER,
        metavar="-- ...",
        help="The ranks run this: a script with its arguments, options of `holdfast run` before "
        "it.",
    )


def _add_how_it_scales(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--no-preempt",
        dest="preemptible",
        action="store_const",
        const=False,
        help="The job keeps its GPUs once it has some.",
    )
    command.add_argument(
        "--epochs", type=int, metavar="N", help="The job has so many passes over the data to do."
    )
    command.add_argument(
        "--samples", type=int, metavar="N", help="The data has so many samples, for --epochs."
    )
    command.add_argument(
        "--work",
        type=float,
        metavar="STEPS",
        help="The job has so many steps to do, at the initial batch size.",
    )
    command.add_argument(
        "--family",
        metavar="NAME",
        help="The job scales as others of this family do (default: those of the same command).",
    )
    command.add_argument(
        "--type",
        dest="gpu_types",
        action="append",
        metavar="TYPE",
        help="The job runs on GPUs of this type; this option may be given several times (default: "
        "of any type).",
    )


def _add_how_it_runs(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--env",
        dest="environment",
        type=_variable,
        action="append",
        metavar="NAME=VALUE",
        help="The ranks have this variable; this option may be given several times.",
    )
    command.add_argument(
        "--cwd",
        dest="folder",
        metavar="FOLDER",
        help="The command runs in this folder of each node (default: this one).",
    )
    command.add_argument(
        "--grace",
        dest="grace_s",
        type=types.span_s,
        metavar="SPAN",
        help="The ranks have so long to end when they are told to (default 30s).",
    )
    command.add_argument(
        "--retries",
        type=int,
        metavar="N",
        help="The job begins again so often after its script has failed (default 0).",
    )


def _add_execute(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--scheduler",
        default="",
        metavar="URL",
        help="The orders come from this scheduler (default: HOLDFAST_SCHEDULER, or that of the "
        "stack).",
    )
    command.add_argument(
        "--gpus",
        dest="offered",
        default="auto",
        metavar="N|auto",
        help="The node offers so many GPUs (default: all that it has), or, where it has none, "
        "places of ranks.",
    )
    command.add_argument(
        "--type", metavar="TYPE", help="The GPUs are of this type (default: what the driver says)."
    )
    command.add_argument("--spot", action="store_true", help="The node can be taken away.")
    command.add_argument(
        "--notice",
        dest="notices",
        type=_notice,
        action="append",
        default=[],
        metavar="file:PATH|http://URL|aws|gcp",
        help="The node will be taken away once this says so, as for `holdfast run`: jobs leave it "
        "at a saved step.",
    )
    command.add_argument(
        "--folder",
        type=Path,
        metavar="FOLDER",
        help="The executor keeps logs, and what the next one must know, in this folder (default: "
        "in HOLDFAST_HOME).",
    )
    command.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="The nodes of this Ray cluster run jobs, in place of this one: auto, or HOST:PORT.",
    )
    command.add_argument(
        "--nodes",
        type=types.nodes_planned,
        metavar="N",
        help="With --ray so many nodes are reserved, all or none (default: all with so many GPUs).",
    )
    command.add_argument(
        "--hold",
        dest="hold_s",
        type=types.span_s,
        default=60.0,
        metavar="SPAN",
        help="With --ray jobs of a node end when Ray has let go of it for so long (default 60s).",
    )
    command.add_argument("--while-held", type=Path, help=argparse.SUPPRESS)


def _notice(text: str) -> str:
    """Return the name of a source of notices as it came: it goes on to other nodes."""
    notice(text)
    return text


def _gpus(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9]{1,6})(?::([0-9]{1,6}))?", text)
    least = int(found[1]) if found else 0
    most = int(found[2] or found[1]) if found else 0
    if not 1 <= least <= most <= GPUS_MAX:
        raise argparse.ArgumentTypeError(f"must be N or MIN:MAX from 1 to {GPUS_MAX}, got {text}")
    return least, most


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text}")
    return name, value
