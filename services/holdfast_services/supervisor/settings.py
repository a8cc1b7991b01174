"""What the supervisor is told on its command line and by ``HOLDFAST_*`` variables."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.core import env
from holdfast.errors import InvalidRequestError

NODES_MAX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One stack. Ports: 0 means any free one. ``idle_exit_s`` 0 means never.

    ``scheduler``: one runs, and an executor on each node, which offers ``gpus``.
    ``store`` is the object store that was asked for, empty for the one of the last time.
    ``environ`` is handed down to the children, with their own settings added.
    """

    home: Path
    nodes: tuple[str, ...]
    port: int
    rest_port: int
    scheduler: bool
    gpus: str
    idle_exit_s: float
    store: str
    detach: bool
    erase: bool
    erase_all: bool
    drain: bool
    environ: Mapping[str, str]

    @classmethod
    def from_args(cls, argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
        """Parse the command line.

        Raises:
            SystemExit: the command line is wrong; argparse has said how.
            InvalidRequestError: a number is out of range.
        """
        args = _parser().parse_args(argv)
        if not 1 <= args.nodes <= NODES_MAX:
            raise InvalidRequestError(f"--nodes must be 1..{NODES_MAX}, got {args.nodes}")
        env.size(environ, "HOLDFAST_BUDGET", 0)  # here, not in the log of every agent
        return cls(
            home=args.dir.expanduser().absolute(),
            nodes=tuple(f"node-{i}" for i in range(args.nodes)),
            port=args.port,
            rest_port=args.rest_port,
            scheduler=args.scheduler,
            gpus=args.gpus,
            idle_exit_s=args.idle_exit,
            store=args.store or environ.get("HOLDFAST_STORE", ""),
            detach=args.detach,
            erase=args.erase or args.erase_all,
            erase_all=args.erase_all,
            drain=args.drain,
            environ=dict(environ),
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m holdfast_services.supervisor")
    parser.add_argument("--dir", type=Path, required=True, help="HOLDFAST_HOME of this stack")
    parser.add_argument("--nodes", type=int, default=1, help="node agents to run (default 1)")
    parser.add_argument("--port", type=int, default=0, help="gRPC of the metadata service")
    parser.add_argument("--rest-port", type=int, default=0, help="REST and dashboard")
    parser.add_argument("--scheduler", action="store_true", help="run a scheduler and executors")
    parser.add_argument("--gpus", default="", help="what each executor offers (default: all)")
    parser.add_argument(
        "--idle-exit",
        type=float,
        default=0.0,
        metavar="S",
        help="end when no trainer has lived for S seconds and all is drained (default: never)",
    )
    parser.add_argument("--store", default="", help="object store (default: the last one, or DIR)")
    parser.add_argument(
        "--detach",
        action="store_true",
        help="run in the background; return once the stack is ready",
    )
    parser.add_argument(
        "--erase",
        action="store_true",
        help="run nothing: remove the arenas of this HOME, and forget what was in them",
    )
    parser.add_argument(
        "--erase-all",
        action="store_true",
        help="run nothing: remove catalogue and store of this HOME as well",
    )
    parser.add_argument(
        "--drain",
        action="store_true",
        help="run nothing: print how far the drain to the store is",
    )
    return parser
