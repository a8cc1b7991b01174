"""The arguments of ``holdfast simulate``: a trace, policies, a cluster, and what goes wrong."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from holdfast.cli import argument_types as types
from holdfast.cli.simulate import POLICIES, Command, simulate


def add_simulate(add: Callable[[str, str, Command], argparse.ArgumentParser]) -> None:
    """Add the command to those that ``add`` adds to."""
    command = add(
        "simulate workload-1.csv --compare",
        "This command says what the scheduler would do with the jobs of a trace. It needs no "
        "service.",
        simulate,
    )
    command.add_argument(
        "trace", metavar="TRACE", help="The jobs of this workload of Pollux (.csv), or recording."
    )
    which = command.add_mutually_exclusive_group()
    which.add_argument(
        "--policy",
        action="append",
        choices=POLICIES,
        default=[],
        help="The jobs are scheduled by this policy; several give a row each (default: price).",
    )
    which.add_argument(
        "--compare", action="store_true", help="The command runs all policies, for one table."
    )
    command.add_argument(
        "--traces",
        metavar="FOLDER",
        help="The folder traces of Pollux lies in this one (default: beside the workload's).",
    )
    command.add_argument(
        "--keep",
        type=types.fraction,
        default=1.0,
        metavar="PART",
        help="The command keeps so large a part of the jobs, drawn by the seed, such as 0.5.",
    )
    _add_cluster(command)
    _add_knowledge(command)
    _add_mishaps(command)
    command.add_argument(
        "--out", metavar="FILE", help="The figures of all jobs and rounds go to this file, as JSON."
    )
    command.add_argument(
        "--html", metavar="FILE", help="The command writes a page with charts to this file."
    )


def _add_cluster(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--nodes", type=types.nodes_planned, default=16, metavar="N",
        help="The cluster has N nodes (default 16).",
    )  # fmt: skip
    command.add_argument(
        "--gpus", type=types.gpus, default=4, metavar="N",
        help="The nodes have N GPUs each (default 4).",
    )  # fmt: skip
    command.add_argument(
        "--round-s", type=types.positive_s, default=60.0, metavar="S",
        help="The scheduler plans every S seconds (default 60).",
    )  # fmt: skip
    command.add_argument(
        "--restart-s", type=types.span_s, default=30.0, metavar="S",
        help="The jobs make no progress for S seconds when they start or move (default 30).",
    )  # fmt: skip
    command.add_argument(
        "--at-once", action="store_true",
        help="With it, who arrives between two rounds gets what is free at once.",
    )  # fmt: skip
    command.add_argument(
        "--seed", type=types.seed, default=0, metavar="N",
        help="The same N draws the same failures and noise (default 0).",
    )  # fmt: skip


def _add_knowledge(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--history", action="store_true",
        help="With it, jobs of one application share what they have measured.",
    )  # fmt: skip
    command.add_argument(
        "--undeclared", action="store_true", help="With it, no job says how many epochs it wants."
    )
    command.add_argument(
        "--wrong-by", type=types.sigma, default=0.0, metavar="SIGMA",
        help="The epochs that jobs declare are wrong by a factor, log-normal with this sigma.",
    )  # fmt: skip


def _add_mishaps(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--noise", type=types.sigma, default=0.0, metavar="SIGMA",
        help="The step times vary by a factor, log-normal with this sigma, such as 0.1.",
    )  # fmt: skip
    command.add_argument(
        "--outliers", type=types.fraction, default=0.0, metavar="PART",
        help="The measurements are five times too long in so large a part.",
    )  # fmt: skip
    command.add_argument(
        "--mtbf", dest="mtbf_s", type=types.span_s, default=0.0, metavar="SPAN",
        help="The nodes fail after this time on average, such as 12h (default: never).",
    )  # fmt: skip
    command.add_argument(
        "--spot-nodes", type=types.count, default=0, metavar="N",
        help="The last N nodes are spot nodes, which are taken away at times.",
    )  # fmt: skip
    command.add_argument(
        "--spot-mtbf", dest="spot_mtbf_s", type=types.span_s, default=14_400.0, metavar="SPAN",
        help="The spot nodes are taken away after this time on average (default 4h).",
    )  # fmt: skip
