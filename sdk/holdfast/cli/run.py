"""``holdfast run``: torchrun's command line, as far as people use it, over our launcher."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.cli import argument_types as types
from holdfast.cli.output import Report
from holdfast.core.executions import LastWord, Outcome
from holdfast.core.meshes import of_environment
from holdfast.embedded import agent_socket
from holdfast.errors import CheckpointError, InvalidRequestError
from holdfast.launcher import ending
from holdfast.launcher.environment import own
from holdfast.launcher.notices import Source, source
from holdfast.launcher.options import (
    Options,
    check_log_folder,
    check_meshes,
    check_script,
    check_warm_cuda,
    nodes_range,
    ranks_count,
)

STREAMS_MAX = 3
AUTO = "HOLDFAST_AUTO"
_ROUNDS = "launchers find each other through the agent of their node"
_NOT_NEEDED = {
    "--rdzv-backend": _ROUNDS,
    "--rdzv-endpoint": _ROUNDS,
    "--rdzv-conf": _ROUNDS,
    "--rdzv-id": "name the launch with --job",
    "--master-addr": "each round has an address of its own",
    "--master-port": "each round has a port of its own",
    "--monitor-interval": "the end of a rank is seen at once",
    "--start-method": "ranks are processes of their own",
    "--role": "give each role a launch and a --job of its own",
    "--local-ranks-filter": "use --log-dir",
    "--no-python": "the script is run by Python",
    "--run-path": "the script is run by Python",
}


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> Report:
    """Run the ranks of this node until the launch has ended; ends the process with its code.

    Raises:
        SystemExit: with the exit code of the launch.
        CheckpointError: it could not begin, or was refused.
    """
    _fill_standard_streams()
    try:
        word = _run(_options(args, environ), environ)
    except CheckpointError as error:
        ending.write(args.ending, LastWord(outcome=Outcome.REFUSED, code=1, reason=error.message))
        raise
    ending.write(args.ending, word)
    sys.exit(word.code)


def _run(options: Options, environ: Mapping[str, str]) -> LastWord:
    check_script(options)
    check_warm_cuda(options, environ)
    check_log_folder(options)
    ranks = ranks_count(options.nproc, environ)
    check_meshes(options, ranks)
    world_size = ranks * options.nodes_max
    agent = agent_socket(environ, world_size=world_size, local_world_size=ranks)
    from holdfast.launcher.launch import Launcher  # noqa: PLC0415 - grpc, which no other error needs

    return Launcher(options, ranks, agent, environ).run()


def _fill_standard_streams() -> None:
    """Have no socket of ours take the number of a standard stream that is closed."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= STREAMS_MAX - 1:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def _options(args: argparse.Namespace, environ: Mapping[str, str]) -> Options:
    least, most = args.nodes
    auto = args.auto or environ.get(AUTO) == "1"
    if not auto and (args.fresh or args.auto_steps_by):
        raise InvalidRequestError("--fresh and --auto-steps-by are for --auto: add it")
    if args.standalone and most > 1:
        raise InvalidRequestError("--standalone is for one node: leave it or --nnodes out")
    if args.redirects and not args.log_dir:
        raise InvalidRequestError("--redirects needs --log-dir DIR: the output goes there")
    return Options(
        script=args.script,
        arguments=tuple(args.arguments),
        module=args.module,
        job=args.job or "",
        standalone=args.standalone,
        nodes_min=least,
        nodes_max=most,
        nproc=args.nproc,
        restarts_max=args.restarts_max,
        shrink_after_s=args.shrink_after_s,
        grace_s=args.grace_s,
        log_folder=args.log_dir,
        redirects=args.redirects,
        tee=args.tee,
        standby=args.standby,
        preload=tuple(args.preload),
        warm_cuda=args.warm_cuda,
        notices=tuple(args.notices),
        address=args.address,
        allocated=args.allocated,
        meshes=tuple(args.meshes or of_environment(own(environ))),
        auto=auto,
        auto_steps_by=args.auto_steps_by,
        fresh=args.fresh,
    )


class _NotNeeded(argparse.Action):
    """Refuses an option of torchrun's by its name, with what to do instead."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        """Refuse it."""
        option = self.option_strings[0]
        parser.error(f"torchrun's {option} is not needed: {_NOT_NEEDED[option]}")


def _nodes(text: str) -> tuple[int, int]:
    try:
        return nodes_range(text)
    except InvalidRequestError as error:
        raise argparse.ArgumentTypeError(error.message) from error


def notice(text: str) -> Source:
    """Return what gives notice that a node will be taken away."""
    try:
        return source(text)
    except InvalidRequestError as error:
        raise argparse.ArgumentTypeError(error.message) from error


def _streams(text: str) -> int:
    if text.isascii() and text.isdigit() and int(text) <= STREAMS_MAX:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text}: pass 0, 1 (stdout), 2 (stderr) or 3 (both)")


def _seconds(text: str) -> float:
    if re.fullmatch(r"[0-9]{1,6}(\.[0-9]+)?", text):
        return float(text)
    return float(types.span_s(text))


def _restarts(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= 4:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text} is no number of restarts from 0 to 9999")


def add_run_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of ``holdfast run``, with torchrun's spellings."""
    _add_size(command)
    _add_ends(command)
    _add_output(command)
    _add_auto(command)
    # For whoever starts launchers: where to leave the last word; that rounds are not to begin
    # before somebody says who takes part.
    command.add_argument("--ending", type=Path, help=argparse.SUPPRESS)
    command.add_argument("--allocated", action="store_true", help=argparse.SUPPRESS)
    for option in _NOT_NEEDED:
        command.add_argument(
            *_spelled(option), action=_NotNeeded, nargs="?", help=argparse.SUPPRESS
        )
    command.add_argument(
        "-m",
        "--module",
        action="store_true",
        help="The script is the name of a module, as for python -m.",
    )
    command.add_argument(
        "script", metavar="SCRIPT", help="The ranks run this script with all that follows."
    )
    command.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        metavar="...",
        help="The script gets these arguments.",
    )


def _spelled(option: str) -> tuple[str, ...]:
    """Return the spellings of an option that torchrun takes."""
    return tuple(dict.fromkeys([option, f"--{option[2:].replace('-', '_')}"]))


def _add_size(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--job",
        type=types.job,
        metavar="NAME",
        help="The launchers of this name are one launch (default: made of the command, so that "
        "it is the same on all nodes).",
    )
    command.add_argument(
        "--standalone",
        action="store_true",
        help="The launch is of this node alone; services are started if none run.",
    )
    command.add_argument(
        "--nnodes",
        dest="nodes",
        type=_nodes,
        default=(1, 1),
        metavar="N|MIN:MAX",
        help="The launch has so many nodes (default 1). More than MAX wait in reserve.",
    )
    command.add_argument(
        *_spelled("--nproc-per-node"),
        dest="nproc",
        default="1",
        metavar="N|auto|gpu|cpu",
        help="The node has so many ranks (default 1).",
    )
    command.add_argument(
        "--mesh",
        dest="meshes",
        action="append",
        default=[],
        metavar="AXIS=N,...",
        help="The ranks are told this mesh, such as dp=4,tp=2, if there are as many of them; one "
        "axis may be *. Several say several numbers of ranks.",
    )
    command.add_argument(
        *_spelled("--node-rank"),
        metavar="N",
        help="This option is accepted, and has no effect: nodes keep the ranks that they have.",
    )
    command.add_argument(
        *_spelled("--local-addr"),
        dest="address",
        default="",
        metavar="HOST",
        help="The ranks of this node are reached at this name or address by others (default: the "
        "agent's).",
    )


def _add_ends(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        *_spelled("--max-restarts"),
        dest="restarts_max",
        type=_restarts,
        default=20,
        metavar="N",
        help="The launch fails when ranks have been restarted N times within an hour (default 20).",
    )
    command.add_argument(
        "--shrink-after",
        dest="shrink_after_s",
        type=_seconds,
        default=30.0,
        metavar="SPAN",
        help="With MIN:MAX, training goes on with fewer than MAX nodes after so long (default "
        "30s).",
    )
    command.add_argument(
        "--notice",
        dest="notices",
        type=notice,
        action="append",
        default=[],
        metavar="file:PATH|http://URL|aws|gcp",
        help="The node will be taken away once this file is there, this address answers, or the "
        "cloud says so: all ranks save a step, and with MIN:MAX the other nodes go on from it. "
        "This option may be given several times.",
    )
    command.add_argument(
        "--grace",
        dest="grace_s",
        type=_seconds,
        default=30.0,
        metavar="SPAN",
        help="The ranks have so long to end after SIGTERM or Ctrl-C, and others to copy after a "
        "notice that does not say when it is over (default 30s).",
    )
    command.add_argument(
        "--no-standby",
        dest="standby",
        action="store_false",
        help="The launcher keeps no process that waits to become a rank: a restart takes seconds "
        "longer.",
    )
    command.add_argument(
        "--preload",
        action="append",
        default=[],
        metavar="MODULE",
        help="The standbys import this module too; this option may be given several times.",
    )
    command.add_argument(
        "--warm-cuda",
        action="store_true",
        help="The standbys also make the CUDA context of their rank's GPU, and take memory there.",
    )


def _add_output(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        *_spelled("--log-dir"),
        dest="log_dir",
        type=Path,
        metavar="DIR",
        help="The output of ranks goes to files in this folder, as --redirects or --tee say.",
    )
    command.add_argument(
        "-r",
        "--redirects",
        type=_streams,
        default=0,
        metavar="0-3",
        help="The output of ranks goes to files only; 1: standard output, 2: standard error, "
        "3: both.",
    )
    command.add_argument(
        "-t",
        "--tee",
        type=_streams,
        default=0,
        metavar="0-3",
        help="The output of ranks goes to the terminal behind their numbers, and to files; 1: "
        "standard output, 2: standard error, 3: both.",
    )


def _add_auto(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--auto",
        action="store_true",
        help="The script needs no change: what it trains is saved after each step, and restored. "
        "HOLDFAST_AUTO=1 does the same.",
    )
    command.add_argument(
        "--auto-steps-by",
        default="",
        metavar="NAME",
        help="With --auto, a step is done when this optimizer has stepped (default: each one has).",
    )
    command.add_argument(
        "--fresh",
        action="store_true",
        help="With --auto, training starts over at step 0, once for this launch.",
    )
