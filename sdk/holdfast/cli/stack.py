"""``up``, ``down`` and ``status``: the embedded stack of one HOME."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping

from holdfast.cli.output import Json, Report, Table, waiting
from holdfast.cli.rest import Rest, nodes_table
from holdfast.core.units import format_bytes
from holdfast.embedded import (
    Stack,
    StackRequest,
    ensure_stack,
    erase_stack,
    home_folder,
    require_services,
    running_stack,
    stop_stack,
)
from holdfast.errors import NotFoundError

NODES_MAX = 64


def up(args: argparse.Namespace, environ: Mapping[str, str]) -> Report:
    """Start the stack and say how to use it; success too when it already runs."""
    home = home_folder(environ)
    request = StackRequest(nodes_count=args.nodes, port=args.port, rest_port=args.rest_port)
    if args.foreground:
        require_services()
        command = request.command(home)
        os.execv(command[0], command)  # noqa: S606 - we become the supervisor
    with waiting("starting the stack"):
        stack, started = ensure_stack(home, request)
    return describe(stack, started=started, asked_nodes_count=args.nodes)


def describe(stack: Stack, *, started: bool, asked_nodes_count: int) -> Report:
    """Return where everything is and the lines to put into a shell."""
    count = len(stack.nodes)
    begun = "started" if started else "already running"
    text: list[str | Table] = [f"{begun}: {count} node{'s' * (count != 1)}, pid {stack.pid}"]
    if count != asked_nodes_count:
        text.append(f"  not {asked_nodes_count} as asked: `holdfast down` first to change that")
    text += [
        f"  metadata   {stack.address}",
        f"  dashboard  {stack.rest_url}",
        f"  log        {stack.log}",
        "",
        f"export HOLDFAST_HOME={shlex.quote(str(stack.home))}",
        f"export HOLDFAST_ADDRESS={stack.address}",
    ]
    sockets = [shlex.quote(str(node.agent)) for node in stack.nodes]
    if count == 1:
        text.append(f"export HOLDFAST_AGENT={sockets[0]}")
    else:
        text.append("# and for the ranks of each node, one of")
        text += [f"export HOLDFAST_AGENT={socket}" for socket in sockets]
    return Report(data={"started": started, **stack_json(stack)}, text=text)


def down(args: argparse.Namespace, environ: Mapping[str, str]) -> Report:
    """Stop the stack; unless told to keep them, remove its arenas and the catalogue of them."""
    home = home_folder(environ)
    try:
        with waiting("stopping the stack"):
            pid: int | None = stop_stack(home)
    except NotFoundError:
        pid = None
    data: dict[str, Json] = {"stopped": pid is not None, "pid": pid, "freed_bytes": 0}
    text = [f"stopped pid {pid}" if pid is not None else f"nothing runs in {home}"]
    if not args.keep and home.is_dir():
        freed_bytes = erase_stack(home)
        data["freed_bytes"] = freed_bytes
        text.append(f"gave back {format_bytes(freed_bytes)}; arenas and catalogue are gone")
    return Report(data=data, text=text)


def status(_args: argparse.Namespace, environ: Mapping[str, str]) -> Report:
    """Return what runs here and the nodes that metadata knows.

    Raises:
        NotFoundError: nothing runs, and no other metadata service is named.
    """
    stack = running_stack(home_folder(environ))
    rest = Rest.find(environ)
    nodes = rest.nodes()
    text: list[str | Table] = []
    if stack is not None:
        text += [f"running, pid {stack.pid}, home {stack.home}", f"  metadata   {stack.address}"]
    text += [f"  dashboard  {rest.url}", nodes_table(nodes)]
    data = {"stack": stack_json(stack) if stack else None, "rest_url": rest.url, "nodes": nodes}
    return Report(data=data, text=text)


def stack_json(stack: Stack) -> dict[str, Json]:
    """Return ``stack`` as JSON."""
    return {
        "home": str(stack.home),
        "pid": stack.pid,
        "address": stack.address,
        "rest_url": stack.rest_url,
        "log": str(stack.log),
        "nodes": [
            {"name": node.name, "agent": str(node.agent), "arena": str(node.arena)}
            for node in stack.nodes
        ],
    }
