"""Arguments of the commands about the stack of this machine."""

from __future__ import annotations

from holdfast.cli import argument_types as types
from holdfast.cli import stack
from holdfast.cli.scheduling_arguments import Add


def add_stack(add: Add) -> None:
    """Add the commands."""
    up = add(
        "up --nodes 2",
        "This command starts Holdfast's services on this machine and returns once they are ready.",
        stack.up,
    )
    up.add_argument(
        "--nodes",
        type=types.nodes,
        default=1,
        metavar="N",
        help="The stack runs N node agents (default 1).",
    )
    up.add_argument(
        "--port",
        type=types.port,
        default=0,
        help="The metadata service serves gRPC on this port (default: any free one).",
    )
    up.add_argument(
        "--rest-port",
        type=types.port,
        default=0,
        help="The dashboard and REST are served on this port (default: any free one).",
    )
    up.add_argument(
        "--store",
        default="",
        metavar="URL",
        help="Checkpoints are persisted to this object store, file:///folder or s3://bucket/prefix "
        "(default: the one of the last time, at first the folder store in DIR).",
    )
    up.add_argument(
        "--scheduler",
        action="store_true",
        help="The stack also runs a scheduler, and an executor on each node.",
    )
    up.add_argument(
        "--gpus",
        default="",
        metavar="N|auto",
        help="With --scheduler, each node offers so many GPUs, or places of ranks where there are "
        "none (default: all, or one place).",
    )
    up.add_argument(
        "--foreground",
        action="store_true",
        help="The command stays until you stop it, and logs to the terminal.",
    )
    _add_down(add)
    add(
        "status",
        "This command shows which services run on this machine, and where.",
        stack.status,
    )


def _add_down(add: Add) -> None:
    down = add(
        "down --keep",
        "This command stops the services and gives their memory back. Checkpoints that are in "
        "memory only are lost, unless you keep them.",
        stack.down,
    )
    less_or_more = down.add_mutually_exclusive_group()
    less_or_more.add_argument(
        "--keep",
        action="store_true",
        help="The next `holdfast up` finds memory and catalogue as they are now.",
    )
    less_or_more.add_argument(
        "--all",
        action="store_true",
        help="The command also removes the durable checkpoints in DIR.",
    )
    down.add_argument(
        "--yes", action="store_true", help="The command does not ask before it removes anything."
    )
