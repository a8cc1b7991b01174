"""``up``, ``down`` and ``status``: the embedded stack of one HOME."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from holdfast.cli.output import Json, Report, Table, confirm, waiting
from holdfast.cli.rest import Rest, nodes_table
from holdfast.core.byte_sizes import format_bytes
from holdfast.embedded import (
    DrainProgress,
    Erased,
    Stack,
    StackRequest,
    drain,
    ensure_stack,
    erase_stack,
    home_folder,
    live_trainers,
    require_services,
    running_stack,
    stop_stack,
)
from holdfast.errors import CheckpointError, NotFoundError, UnavailableError
from holdfast.objectstore import open_store

NODES_MAX = 64


def up(args: argparse.Namespace, environ: Mapping[str, str]) -> Report:
    """Start the stack and say how to use it; success too when it already runs."""
    home = home_folder(environ)
    request = StackRequest(
        nodes_count=args.nodes,
        port=args.port,
        rest_port=args.rest_port,
        scheduler=args.scheduler,
        gpus=args.gpus,
        store=_store_url(args.store or environ.get("HOLDFAST_STORE", "")),
    )
    if args.foreground:
        require_services()
        command = request.command(home)
        os.execv(command[0], command)  # noqa: S606 - we become the supervisor
    with waiting("starting the stack"):
        stack, started = ensure_stack(home, request)
        trouble = store_trouble(Rest(stack.rest_url))
    return describe(stack, request, started=started, trouble=trouble)


def store_trouble(rest: Rest) -> str:
    """Return why the service's object store cannot be used now; empty when it can."""
    try:
        found = rest.store()
    except CheckpointError as error:
        return f"the service did not say: {error.message}"
    return "" if found["ok"] or not found["url"] else str(found["error"])


def _store_url(asked: str) -> str:
    """Return ``asked``, which may be a path, as the URL that the stack will show."""
    return open_store(asked).url if asked else ""


def describe(stack: Stack, asked: StackRequest, *, started: bool, trouble: str = "") -> Report:
    """Return where everything is, ``trouble`` of the store, and the lines to put into a shell."""
    count = len(stack.nodes)
    begun = "started" if started else "already running"
    text: list[str | Table] = [f"{begun}: {count} node{'s' * (count != 1)}, pid {stack.pid}"]
    if count != asked.nodes_count:
        text.append(f"  not {asked.nodes_count} as asked: `holdfast down` first to change that")
    if asked.store not in ("", stack.store):
        text.append(f"  not store {asked.store} as asked: `holdfast down` first to change that")
    if asked.scheduler and not stack.scheduler_url:
        text.append("  no scheduler as asked: `holdfast down` first to change that")
    text += [
        f"  metadata   {stack.address}",
        f"  dashboard  {stack.rest_url}",
        *([f"  scheduler  {stack.scheduler_url}"] if stack.scheduler_url else []),
        *_store_lines(stack, trouble),
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
    data = {"started": started, **stack_json(stack), "store_error": trouble}
    return Report(data=data, text=text)


def _store_lines(stack: Stack, trouble: str) -> list[str]:
    lines = [f"  store      {stack.store}"]
    if trouble:
        lines.append(
            f"             fails: {trouble}; nothing becomes durable until the store works"
        )
    return lines


def down(args: argparse.Namespace, environ: Mapping[str, str]) -> Report:
    """Stop the stack and give its memory back, unless told to keep it.

    What is durable stays, in the store and in the catalogue, unless all is to go.

    Raises:
        InvalidRequestError: trainers are live or all is to go, and nobody has agreed to that.
    """
    home = home_folder(environ)
    if not args.yes:
        _agree(home, everything=args.all)
    try:
        with waiting("stopping the stack"):
            pid: int | None = stop_stack(home)
    except NotFoundError:
        pid = None
    data: dict[str, Json] = {"stopped": pid is not None, "pid": pid, "freed_bytes": 0}
    text = [f"stopped pid {pid}" if pid is not None else f"nothing runs in {home}"]
    if not args.keep and home.is_dir():
        erased = erase_stack(home, everything=args.all)
        data |= asdict(erased)
        text += _lines(erased)
    return Report(data=data, text=text)


def _agree(home: Path, *, everything: bool) -> None:
    """Ask, where somebody would lose more than expected: live trainers, durable checkpoints."""
    stack = running_stack(home)
    live = live_trainers(stack) if stack is not None else 0
    loss = [f"{live} ranks train on it, and lose what protects them"] if live else []
    loss += ["the durable checkpoints go too"] if everything else []
    if loss:
        text = f"the stack of {home}: {'; '.join(loss)}"
        confirm(f"stop {text}?", f"{text}: say --yes as well")


def _lines(erased: Erased) -> list[str]:
    lines = [f"gave back {format_bytes(erased.freed_bytes)} of memory"]
    if erased.undrained_count:
        lines.append(f"  {erased.undrained_count} shards or manifests had not reached the store")
    if erased.store_freed_bytes:
        lines.append(f"removed {format_bytes(erased.store_freed_bytes)} of durable checkpoints")
    if erased.store:
        lines.append(f"durable checkpoints stay in {erased.store}")
    if erased.catalogue_lost:
        lines.append(
            f"the catalogue could not forget memory alone ({erased.catalogue_lost}) and was "
            f"removed: jobs find what is durable in the store again, by their names"
        )
    return lines


def status(_args: argparse.Namespace, environ: Mapping[str, str]) -> Report:
    """Return what runs here, how far its drain is, and the nodes that metadata knows.

    Raises:
        NotFoundError: nothing runs, and no other metadata service is named.
    """
    stack = running_stack(home_folder(environ))
    rest = Rest.find(environ)
    nodes = rest.nodes()
    text: list[str | Table] = []
    drained = _drain(stack) if stack is not None else None
    trouble = store_trouble(rest)
    if stack is not None:
        text += [f"running, pid {stack.pid}, home {stack.home}", f"  metadata   {stack.address}"]
        text += [*_store_lines(stack, trouble), f"  worker     {_worker(drained)}"]
    text += [f"  dashboard  {rest.url}", nodes_table(nodes)]
    data: dict[str, Json] = {"stack": stack_json(stack) if stack else None, "rest_url": rest.url}
    data |= {"drain": asdict(drained) if drained else None, "store_error": trouble, "nodes": nodes}
    return Report(data=data, text=text)


def _drain(stack: Stack) -> DrainProgress | None:
    try:
        return drain(stack.home)
    except UnavailableError:
        return None


def _worker(drained: DrainProgress | None) -> str:
    if drained is None:
        return "its queue does not answer"
    state = "ready" if drained.worker_ready else "not ready"
    busy_count = drained.items_count - drained.waiting_count
    return f"{state}; queue: {drained.waiting_count} waiting, {busy_count} being done"


def stack_json(stack: Stack) -> dict[str, Json]:
    """Return ``stack`` as JSON."""
    return {
        "home": str(stack.home),
        "pid": stack.pid,
        "address": stack.address,
        "rest_url": stack.rest_url,
        "log": str(stack.log),
        "store": stack.store,
        "scheduler_url": stack.scheduler_url,
        "nodes": [
            {"name": node.name, "agent": str(node.agent), "arena": str(node.arena)}
            for node in stack.nodes
        ],
    }
