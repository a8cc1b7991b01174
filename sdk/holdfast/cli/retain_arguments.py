"""The arguments of ``holdfast retain``: the rules of a policy, and the switch that has none."""

from __future__ import annotations

import argparse

from holdfast.cli import argument_types as types


def add_retain_arguments(command: argparse.ArgumentParser) -> None:
    """Add them to the parser of the command."""
    command.add_argument("--all", action="store_true", help="The store keeps every checkpoint.")
    command.add_argument(
        "--last", type=types.kept, metavar="N", help="The store keeps the newest N."
    )
    command.add_argument(
        "--every",
        type=types.kept,
        metavar="N",
        help="The store keeps the steps that are multiples of N.",
    )
    command.add_argument(
        "--spaced",
        dest="spaced_s",
        type=types.kept_span_s,
        metavar="SPAN",
        help="The store keeps one checkpoint per span, like 30m, 1h or 7d.",
    )
    command.add_argument(
        "--best", type=types.kept, metavar="N", help="The store keeps the N best by --metric."
    )
    command.add_argument(
        "--metric", metavar="K", help="The metric is the value of K in a checkpoint's notes."
    )
    command.add_argument(
        "--maximize",
        action="store_const",
        const=True,
        help="More of the metric is better (default: less is better).",
    )
    command.add_argument(
        "--min-age",
        dest="age_s_min",
        type=types.span_s,
        metavar="SPAN",
        help="The store keeps every checkpoint that is younger than this span.",
    )
