"""``holdfast``: reads the command line, runs one command, prints its report or its error.

Exit codes: 0, 1 the command failed, 2 the command line is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import holdfast
from holdfast.cli import catalogue, doctor, stack, verify
from holdfast.cli.output import Report, print_report
from holdfast.errors import CheckpointError

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2

Command = Callable[[argparse.Namespace, Mapping[str, str]], Report]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    args = parser().parse_args(argv)
    try:
        report: Report = args.command(args, _environ(args))
        print_report(report, as_json=args.json, out=sys.stdout)
        sys.stdout.flush()
    except CheckpointError as error:
        _print_error(error, as_json=args.json)
        return EXIT_FAILED
    except BrokenPipeError:
        # The reader has gone, e.g. `| head`; without this Python complains when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_FAILED
    return EXIT_FAILED if report.failed else EXIT_OK


def _environ(args: argparse.Namespace) -> dict[str, str]:
    """Return the environment, in which ``--dir`` names the stack and nothing else does."""
    environ = dict(os.environ)
    if args.dir:
        environ["HOLDFAST_HOME"] = str(args.dir)
        environ.pop("HOLDFAST_ADDRESS", None)
    return environ


def _print_error(error: CheckpointError, *, as_json: bool) -> None:
    """Print one line that says what is wrong and what to do."""
    line = " ".join(str(error).split())
    if as_json:
        record = {"kind": error.kind, "message": line, "context": error.context}
        print(json.dumps({"error": record}), file=sys.stderr)
    else:
        print(f"holdfast: {line}", file=sys.stderr)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line; ``args.command`` is what to run."""
    top = argparse.ArgumentParser(prog="holdfast", description=holdfast.__doc__.splitlines()[0])
    top.add_argument("--version", action="version", version=f"holdfast {holdfast.__version__}")
    commands = top.add_subparsers(metavar="COMMAND", required=True)

    up = _add(commands, "up", "start the embedded stack and return once it is ready", stack.up)
    up.add_argument("--nodes", type=_count, default=1, metavar="N", help="node agents (default 1)")
    up.add_argument("--port", type=_port, default=0, help="gRPC port of the metadata service")
    up.add_argument("--rest-port", type=_port, default=0, help="port of REST and the dashboard")
    up.add_argument("--foreground", action="store_true", help="stay, and log to the terminal")

    down = _add(commands, "down", "stop the stack and give its memory back", stack.down)
    down.add_argument(
        "--keep", action="store_true", help="keep arenas and catalogue for the next up"
    )

    _add(commands, "status", "what runs here, and where", stack.status)
    ls = _add(commands, "ls", "jobs, or the checkpoints of one", catalogue.ls)
    ls.add_argument("job", nargs="?", metavar="JOB")
    show = _add(commands, "show", "one checkpoint: levels, shards, copies", catalogue.show)
    show.add_argument("target", type=_target, metavar="JOB[@STEP]")
    check = _add(commands, "verify", "hash all held copies again, loading none", verify.verify)
    check.add_argument("target", type=_target, metavar="JOB[@STEP]")
    check.add_argument("--tier", choices=["memory"], default="memory", help="default: memory")
    _add(commands, "doctor", "look for what commonly goes wrong", doctor.doctor)
    return top


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    purpose: str,
    command: Command,
) -> argparse.ArgumentParser:
    added = commands.add_parser(name, help=purpose, description=purpose)
    added.add_argument("--json", action="store_true", help="print JSON")
    added.add_argument(
        "--dir",
        type=Path,
        metavar="DIR",
        help="a folder of its own, made private (default: HOLDFAST_HOME)",
    )
    added.set_defaults(command=command)
    return added


def _target(text: str) -> catalogue.Target:
    try:
        return catalogue.parse_target(text)
    except CheckpointError as error:
        raise argparse.ArgumentTypeError(error.message) from error


def _count(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= stack.NODES_MAX:
        raise argparse.ArgumentTypeError(f"must be 1..{stack.NODES_MAX}, got {text}")
    return int(text)


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65_535:
        raise argparse.ArgumentTypeError(f"must be 0..65535, got {text}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
