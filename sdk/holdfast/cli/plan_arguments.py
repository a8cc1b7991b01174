"""The arguments of ``holdfast plan``: a model, a cluster, and what is compared."""

from __future__ import annotations

import argparse

from holdfast.cli import argument_types as types
from holdfast.core.model_sizes import OPTIMIZER_VALUES, VALUE_BYTES


def add_plan_arguments(command: argparse.ArgumentParser) -> None:
    """Add them to the parser of the command."""
    _add_state(command)
    command.add_argument(
        "--nodes", type=types.nodes_planned, default=1, metavar="N", help="The job has N nodes."
    )
    command.add_argument(
        "--gpus",
        type=types.gpus,
        default=8,
        metavar="N",
        help="The nodes have N ranks each (default 8).",
    )
    command.add_argument(
        "--shards",
        type=types.shards,
        metavar="N",
        help="The state is cut into N parts, and each rank trains with one: 1 is plain DDP "
        "(default: as many as there are ranks, as with FSDP).",
    )
    command.add_argument(
        "--replicas",
        type=types.replicas,
        metavar="N",
        help="The job keeps N copies on other nodes (default: 0, 1 and 2 are compared).",
    )
    command.add_argument(
        "--parity",
        type=types.parity,
        metavar="K,M",
        help="The job keeps parity in place of copies, such as 4,2: shown beside what is compared.",
    )
    command.add_argument(
        "--slots",
        type=types.slots,
        default=0,
        metavar="N",
        help="The ranks save into N slots of memory each (default: 2, and 3 with --persist).",
    )
    command.add_argument(
        "--persist",
        action="store_true",
        help="With it, steps also go to an object store (default: with and without are compared).",
    )
    command.add_argument(
        "--budget",
        dest="budget_bytes",
        type=types.size_bytes,
        metavar="SIZE",
        help="The command says what does not fit an arena of SIZE, such as 1500G, and fails if "
        "nothing does.",
    )


def _add_state(command: argparse.ArgumentParser) -> None:
    size = command.add_mutually_exclusive_group(required=True)
    size.add_argument(
        "--params", type=types.params, metavar="N", help="The model has N parameters: 70e9, 70B."
    )
    size.add_argument(
        "--state",
        dest="state_bytes",
        type=types.size_bytes,
        metavar="SIZE",
        help="The state of all ranks together takes SIZE, such as 912G.",
    )
    command.add_argument(
        "--dtype",
        choices=VALUE_BYTES,
        default="fp32",
        help="The weights have this type (default fp32).",
    )
    command.add_argument(
        "--optimizer",
        choices=OPTIMIZER_VALUES,
        default="adamw",
        help="This optimizer trains it (default adamw).",
    )
    command.add_argument(
        "--optimizer-dtype",
        choices=VALUE_BYTES,
        help="The optimizer's state has this type (default: that of the weights).",
    )
    command.add_argument(
        "--master",
        action="store_true",
        help="The state also has a copy of the weights in fp32.",
    )
