"""The command line as argparse sees it: every command with its arguments and their types."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import holdfast
from holdfast.cli import catalogue, doctor, export, importing, keep, stack, verify, where
from holdfast.cli.output import Report
from holdfast.core.ids import STEP_MAX, job_name
from holdfast.errors import CheckpointError

COUNT_MAX = 1_000_000
SPAN_S_MAX = 100 * 366 * 86_400
LINK_S_MAX = 7 * 86_400

Command = Callable[[argparse.Namespace, Mapping[str, str]], Report]
Commands = Any  # argparse does not name its type in public

_SPAN = re.compile(r"([0-9]{1,10}(?:\.[0-9]{1,3})?)(s|m|h|d)?")
_SPAN_S = {None: 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line; ``args.command`` is what to run."""
    top = argparse.ArgumentParser(prog="holdfast", description=holdfast.__doc__.splitlines()[0])
    top.add_argument("--version", action="version", version=f"holdfast {holdfast.__version__}")
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    _add_stack(commands)
    _add_catalogue(commands)
    _add_conversion(commands)
    _add_keeping(commands)
    check = _add(commands, "doctor", "look for what commonly goes wrong", doctor.doctor)
    check.add_argument(
        "--rebuild", action="store_true", help="rebuild the catalogue from the object store"
    )
    check.add_argument("--job", type=_job, metavar="JOB", help="with --rebuild: only this one")
    return top


def _add_stack(commands: Commands) -> None:
    up = _add(commands, "up", "start the embedded stack and return once it is ready", stack.up)
    up.add_argument("--nodes", type=_nodes, default=1, metavar="N", help="node agents (default 1)")
    up.add_argument("--port", type=_port, default=0, help="gRPC port of the metadata service")
    up.add_argument("--rest-port", type=_port, default=0, help="port of REST and the dashboard")
    up.add_argument("--store", default="", metavar="URL", help="object store: file: or s3:")
    up.add_argument("--foreground", action="store_true", help="stay, and log to the terminal")
    down = _add(commands, "down", "stop the stack and give its memory back", stack.down)
    less_or_more = down.add_mutually_exclusive_group()
    less_or_more.add_argument(
        "--keep", action="store_true", help="keep arenas and catalogue for the next up"
    )
    less_or_more.add_argument(
        "--all", action="store_true", help="remove the durable checkpoints in DIR as well"
    )
    down.add_argument("--yes", action="store_true", help="do not ask")
    _add(commands, "status", "what runs here, and where", stack.status)


def _add_catalogue(commands: Commands) -> None:
    ls = _add(commands, "ls", "jobs, or the checkpoints of one", catalogue.ls)
    ls.add_argument("job", nargs="?", metavar="JOB")
    show = _add(commands, "show", "one checkpoint: levels, shards, copies", catalogue.show)
    _add_target(show)
    check = _add(commands, "verify", "hash a checkpoint again, loading nothing", verify.verify)
    _add_place(check)
    check.add_argument(
        "--tier",
        choices=["memory", "object", "all"],
        help="default: memory for a job, object for a folder",
    )


def _add_conversion(commands: Commands) -> None:
    out = _add(commands, "export", "write a checkpoint as other tools' files", export.export)
    _add_place(out)
    out.add_argument("dest", metavar="DEST", help="a local file, or folder for hf and dcp")
    out.add_argument("--format", choices=export.FORMATS, required=True)
    out.add_argument("--force", action="store_true", help="replace what is at DEST")
    into = _add(
        commands, "import", "take in other tools' files, or other checkpoints", importing.import_
    )
    into.add_argument("source", metavar="FILE_OR_FOLDER_OR_URL")
    into.add_argument("--job", type=_job, metavar="NAME", help="the job's name here")
    into.add_argument("--step", type=_step, metavar="N", help="default 0; of checkpoints: only N")
    into.add_argument(
        "--as", dest="add", default="", metavar="PREFIX", help="put PREFIX. before every name"
    )
    for command in (out, into):
        command.add_argument("--only", default="", metavar="PREFIX", help="only tensors below it")
        command.add_argument("--strip", default="", metavar="PREFIX", help="take it off the names")


def _add_keeping(commands: Commands) -> None:
    rm = _add(commands, "rm", "delete a checkpoint from the object store, or a whole job", keep.rm)
    _add_target(rm)
    rm.add_argument("--force", action="store_true", help="though it is pinned, or the newest")
    rm.add_argument("--yes", action="store_true", help="a whole job: do not ask")
    pin = _add(commands, "pin", "keep a checkpoint whatever the policy says", keep.pin)
    _add_target(pin)
    pin.add_argument("--note", default="", help="why, for the others")
    unpin = _add(commands, "unpin", "let the policy decide again", keep.unpin)
    _add_target(unpin, step=True)
    _add_retain(commands)
    collect = _add(commands, "collect", "delete what the policy does not keep", keep.collect)
    collect.add_argument("job", type=_job, metavar="JOB")
    collect.add_argument("--dry-run", action="store_true", help="only say what would go")
    scrub = _add(commands, "scrub", "have workers read a job's checkpoints back", keep.scrub)
    scrub.add_argument("job", type=_job, metavar="JOB")
    links = _add(commands, "links", "URLs that anybody can read for a while", keep.links)
    _add_target(links)
    links.add_argument(
        "--valid", dest="valid_s", type=_link_s, default=3600, metavar="SPAN", help="default 1h"
    )


def _add_retain(commands: Commands) -> None:
    retain = _add(commands, "retain", "what is kept of a job; no option: show it", keep.retain)
    retain.add_argument("job", type=_job, metavar="JOB")
    retain.add_argument("--all", action="store_true", help="keep everything")
    retain.add_argument("--last", type=_count, metavar="N", help="the newest N")
    retain.add_argument("--every", type=_count, metavar="N", help="steps that are multiples of N")
    retain.add_argument(
        "--spaced", dest="spaced_s", type=_span_s, metavar="SPAN", help="one per 1h, 30m, ..."
    )
    retain.add_argument("--best", type=_count, metavar="N", help="the N best by --metric")
    retain.add_argument("--metric", metavar="K", help="a key of the checkpoint's notes")
    retain.add_argument(
        "--maximize", action="store_const", const=True, help="more is better (default: less)"
    )
    retain.add_argument(
        "--min-age", dest="age_s_min", type=_span_s, metavar="SPAN", help="younger ones stay"
    )


def _add(commands: Commands, name: str, purpose: str, command: Command) -> argparse.ArgumentParser:
    added: argparse.ArgumentParser = commands.add_parser(name, help=purpose, description=purpose)
    added.add_argument("--json", action="store_true", help="print JSON")
    added.add_argument(
        "--dir",
        type=Path,
        metavar="DIR",
        help="a folder of its own, made private (default: HOLDFAST_HOME)",
    )
    added.set_defaults(command=command)
    return added


def _add_target(command: argparse.ArgumentParser, *, step: bool = False) -> None:
    kind, name = (_exact, "JOB@STEP") if step else (_target, "JOB[@STEP]")
    command.add_argument("target", type=kind, metavar=name)


def _add_place(command: argparse.ArgumentParser) -> None:
    command.add_argument("place", type=_place, metavar="JOB[@STEP]|FOLDER_OR_URL")


def _refusing(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return ``parse`` as argparse wants it: what it refuses is a wrong command line."""

    def read(text: str) -> Any:
        try:
            return parse(text)
        except CheckpointError as error:
            raise argparse.ArgumentTypeError(error.message) from error

    return read


_job = _refusing(job_name)
_target = _refusing(catalogue.parse_target)
_place = _refusing(where.parse_place)


def _exact(text: str) -> catalogue.Target:
    target: catalogue.Target = _target(text)
    if target.step is None:
        raise argparse.ArgumentTypeError(f"say which step: {text}@STEP")
    return target


def _number(text: str, low: int, high: int) -> int:
    if not (text.isascii() and text.isdigit()) or not low <= int(text) <= high:
        raise argparse.ArgumentTypeError(f"must be {low}..{high}, got {text}")
    return int(text)


def _nodes(text: str) -> int:
    return _number(text, 1, stack.NODES_MAX)


def _port(text: str) -> int:
    return _number(text, 0, 65_535)


def _step(text: str) -> int:
    return _number(text, 0, STEP_MAX)


def _count(text: str) -> int:
    return _number(text, 0, COUNT_MAX)


def _span_s(text: str) -> float:
    match = _SPAN.fullmatch(text)
    if match is None or not 0 <= float(match[1]) * _SPAN_S[match[2]] <= SPAN_S_MAX:
        raise argparse.ArgumentTypeError(f"must be a span like 90s, 30m, 1h or 7d, got {text}")
    return float(match[1]) * _SPAN_S[match[2]]


def _link_s(text: str) -> int:
    span_s = int(_span_s(text))
    if not 1 <= span_s <= LINK_S_MAX:
        raise argparse.ArgumentTypeError(f"must be 1s to 7d, got {text}")
    return span_s
